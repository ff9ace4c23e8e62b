"""`import torch.sagemaker as tsm`: version 2 of SageMaker's model-parallel library, over PyTorch's FSDP with Shoal's groups. The README of
the package smdistributed describes what each name does here."""
from torch.sagemaker import _optimizer_states
from torch.sagemaker._transform import transform  # noqa: F401
from torch.sagemaker.state_handler import init, is_initialized, state  # noqa: F401

__version__ = "2.6.0"  # the vendor's, whose interface is served

_optimizer_states.install()
