"""Mixtures of experts, which are not served."""
from smdistributed.modelparallel.exceptions import SMPUnsupportedError


class MoEConfig:
    """Raises an error that contains what to use instead."""

    def __init__(self, *args, **kwargs):
        raise SMPUnsupportedError("torch.sagemaker.moe: the vendor's layers for mixtures of experts are not served: train the model as it is "
                                  "(moe=0), and divide it by hybrid_shard_degree")
