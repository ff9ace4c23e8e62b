"""Shoal for TensorFlow: collectives on tensors, and training on several workers with Keras or a GradientTape.

    import shoal.tensorflow as shoal
    shoal.init()

docs/tensorflow.md is the manual."""
from ._collectives import (  # noqa: F401
    Compression, ReduceOp, allgather, allreduce, alltoall, barrier, broadcast, grouped_allreduce, reducescatter)
from ._world import (  # noqa: F401
    cross_rank, cross_size, init, is_initialized, local_rank, local_size, rank, shutdown, size)
