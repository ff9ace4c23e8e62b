"""Deprecated, like smdistributed.dataparallel.torch.distributed: its DistributedDataParallel."""
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel  # noqa: F401
