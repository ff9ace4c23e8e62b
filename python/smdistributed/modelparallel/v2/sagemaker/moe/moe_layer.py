"""Mixtures of experts, which are not served."""
from torch import nn

from torch.sagemaker.moe.moe_config import MoEConfig


class MoELayer(nn.Module):
    """No module is one: scripts ask which modules are."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        MoEConfig()
