"""The names of SageMaker's data-parallel library, over Shoal. PyTorch scripts import `smdistributed.dataparallel.torch`,
TensorFlow scripts import `smdistributed.dataparallel.tensorflow`."""
from shoal import __version__  # noqa: F401
