"""smp.nn: names of modules that scripts use."""
from torch import nn as _nn
from torch.nn import LayerNorm

from smdistributed.modelparallel.exceptions import SMPUnsupportedError as _SMPUnsupportedError
from smdistributed.modelparallel.torch import _tensor

FusedLayerNorm = LayerNorm  # torch's own kernel is fused on the CPU


def DistributedLinear(in_features, out_features, bias=True, **_):
    """Makes a linear layer for the TP group. It is divided if another layer of the model makes a pair with it."""
    with _tensor.tensor_parallelism():
        return _nn.Linear(in_features, out_features, bias)


def DistributedEmbedding(num_embeddings, embedding_dim, padding_idx=None, **_):
    """Makes an embedding whose rows are divided among the ranks of the TP group."""
    with _tensor.tensor_parallelism():
        return _nn.Embedding(num_embeddings, embedding_dim, padding_idx)


class _Refused:
    def __init__(self, *_, **__):
        raise _SMPUnsupportedError(f"smp.nn.{type(self).__name__} is not served: make the model's own layer in smp.tensor_parallelism(), which "
                                   "divides it as it is")


class DistributedAttentionLayer(_Refused):
    pass


class DistributedTransformerOutputLayer(_Refused):
    pass


class DistributedTransformerLayer(_Refused):
    pass


class DistributedTransformer(_Refused):
    pass


class DistributedTransformerLMHead(_Refused):
    pass
