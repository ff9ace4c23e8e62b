"""DistributedDataParallel as it was called before SMDDP 1.4."""
import shoal.torch

import smdistributed.dataparallel.torch.distributed  # noqa: F401  says that this is deprecated

BUCKET_CAP_MB = 25


class DistributedDataParallel(shoal.torch.DistributedDataParallel):
    """Shoal's, a subclass of PyTorch's, with the order of arguments of that time; further ones go by name. Broadcasts buffers, too."""

    def __init__(self, module, device_ids=None, output_device=None, broadcast_buffers=True, process_group=None,
                 bucket_cap_mb=None, **more):
        super().__init__(module, device_ids=device_ids, output_device=output_device, broadcast_buffers=broadcast_buffers,
                         process_group=process_group, bucket_cap_mb=bucket_cap_mb or BUCKET_CAP_MB, **more)
