"""Functions for process groups."""
import torch.distributed as dist


def get_global_ranks(process_group):
    """Returns the ranks of a group within the job, in the order of the group; with None those of all ranks."""
    return dist.get_process_group_ranks(process_group)
