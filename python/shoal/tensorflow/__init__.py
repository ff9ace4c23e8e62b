"""Shoal for TensorFlow: collectives on tensors, and training on several workers with Keras or a GradientTape.

    import shoal.tensorflow as shoal
    shoal.init()
    tape = shoal.DistributedGradientTape(tape)               # its gradients are averages over all ranks
    shoal.broadcast_variables(model.variables, root_rank=0)

`shoal.tensorflow.keras` is for model.fit. docs/tensorflow.md is the manual."""
from .. import _input
from ._collectives import (  # noqa: F401
    Compression, ReduceOp, allgather, allreduce, alltoall, barrier, broadcast, grouped_allreduce, oob_allreduce, reducescatter)
from ._world import (  # noqa: F401
    cross_rank, cross_size, init, is_initialized, local_rank, local_size, rank, shutdown, size)
from .data import shard, sharded_indices  # noqa: F401
from .tape import DistributedGradientTape  # noqa: F401
from .variables import allgather_object, broadcast_object, broadcast_variables, compare_variables  # noqa: F401

_input.watch_tensorflow()


def __getattr__(name):
    """Imports Keras, strategies and profiles at first use."""
    if name == "distribute":
        import importlib
        return importlib.import_module(".distribute", __name__)
    if name in ("profile", "Profile"):
        import importlib
        return getattr(importlib.import_module(".profiles", __name__), name)
    if name in ("DistributedOptimizer", "keras"):
        import importlib
        keras = importlib.import_module(".keras", __name__)
        return keras if name == "keras" else keras.DistributedOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
