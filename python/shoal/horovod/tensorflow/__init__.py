"""Horovod's names for TensorFlow, over Shoal.

    import shoal.horovod.tensorflow as hvd        # instead of import horovod.tensorflow as hvd
    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    hvd.broadcast_variables(model.variables, root_rank=0)

docs/horovod.md is the manual."""
from .._common.errors import HorovodInternalError  # noqa: F401
from .._common.operators import Adasum, Average, Max, Min, Product, Sum  # noqa: F401
from . import elastic, util  # noqa: F401
from ._operations import (  # noqa: F401
    allgather, allreduce, alltoall, barrier, broadcast, broadcast_, grouped_allgather, grouped_allreduce, grouped_reducescatter, join,
    reducescatter)
from ._world import (  # noqa: F401
    ProcessSet, add_process_set, ccl_built, cross_rank, cross_size, cuda_built, ddl_built, global_process_set, gloo_built,
    gloo_enabled, init, is_homogeneous, is_initialized, local_rank, local_rank_op, local_size, local_size_op, mpi_built, mpi_enabled,
    mpi_threads_supported, nccl_built, process_set_included_op, rank, rank_op, remove_process_set, rocm_built, shutdown, size, size_op,
    start_timeline, stop_timeline)
from .compression import Compression  # noqa: F401
from .functions import (  # noqa: F401
    allgather_object, broadcast_global_variables, broadcast_object, broadcast_object_fn, broadcast_variables)
from .gradients import DistributedGradientTape, PartialDistributedGradientTape  # noqa: F401
from .util import _executing_eagerly  # noqa: F401


def __getattr__(name):
    """Imports Keras at first use."""
    if name in ("DistributedOptimizer", "SyncBatchNormalization", "keras"):
        import importlib
        keras = importlib.import_module(".keras", __name__)
        return keras if name == "keras" else getattr(keras, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
