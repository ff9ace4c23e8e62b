"""The vendor's attention for Llama, which transformers has itself by now."""
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUnsupportedError


class LlamaFlashAttention(nn.Module):
    """Raises an error that contains what to use instead."""

    def __init__(self, config=None):
        super().__init__()
        raise SMPUnsupportedError("LlamaFlashAttention is not served: leave use_smp_flash_attn out, and make the model of transformers with "
                                  "attn_implementation=\"sdpa\"")
