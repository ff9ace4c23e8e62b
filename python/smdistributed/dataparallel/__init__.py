"""The names of SageMaker's data-parallel library, over Shoal. PyTorch scripts import `smdistributed.dataparallel.torch`."""
from shoal import __version__  # noqa: F401
