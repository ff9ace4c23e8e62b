"""The scripts import these names and do not use them."""
from torch.nn.parallel import DistributedDataParallel  # noqa: F401
