"""Deprecated with smdistributed.dataparallel.torch.distributed, whose DistributedDataParallel this is."""
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel  # noqa: F401
