"""smp.nn: names of modules that scripts use."""
from torch.nn import LayerNorm

from smdistributed.modelparallel.exceptions import SMPUnsupportedError

FusedLayerNorm = LayerNorm  # torch's own kernel is fused on the CPU


class DistributedTransformerLayer:
    """The vendor's own layer, which scripts name as the tensor-parallel form of a block. It cannot be made: blocks stay what they are."""

    def __init__(self, *_, **__):
        raise SMPUnsupportedError("smp.nn.DistributedTransformerLayer is not served: use torch's or the model's own layers")
