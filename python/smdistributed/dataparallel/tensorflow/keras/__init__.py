"""For model.fit, with the names that scripts for SageMaker's library use:

    import smdistributed.dataparallel.tensorflow.keras as sdp
"""
from smdistributed.dataparallel.tensorflow import (  # noqa: F401
    Compression, DistributedOptimizer, ReduceOp, allreduce, broadcast, broadcast_variables, init, local_rank, local_size,
    oob_allreduce, rank, shutdown, size)
from smdistributed.dataparallel.tensorflow.keras import callbacks  # noqa: F401
