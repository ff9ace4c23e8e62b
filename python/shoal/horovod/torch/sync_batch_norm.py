"""Batch normalization over the batches of all ranks."""
from shoal.torch import norm

from ._world import NOT_INITIALIZED, global_process_set, is_initialized


class SyncBatchNorm(norm.SyncBatchNorm):
    """shoal.torch.SyncBatchNorm with Horovod's arguments, over all ranks. Its sums use torch.distributed's default group, in
    the program's order, instead of the rounds of named operations."""

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True, process_set=global_process_set):
        if process_set is not global_process_set:
            raise ValueError(f"shoal: SyncBatchNorm is over all ranks, not over process set {process_set.process_set_id} of ranks "
                             f"{process_set.ranks}: use shoal.torch.SyncBatchNorm with a process_group of torch.distributed")
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input):
        if self.training and not is_initialized():
            raise ValueError(NOT_INITIALIZED)
        return super().forward(input)
