"""The names of SageMaker's data-parallel library for TensorFlow 2, over shoal.tensorflow:

    import smdistributed.dataparallel.tensorflow as sdp
    sdp.init()
    tape = sdp.DistributedGradientTape(tape)

If a script may rely on that library's refusal with "not supported", this module also refuses the call with these words."""
from __future__ import annotations

import enum

import tensorflow as tf

import shoal.tensorflow as _shoal
from shoal.tensorflow import Compression as _Compression
from shoal.tensorflow.variables import assign_broadcasts as _assign_broadcasts

from smdistributed.dataparallel import _environment

BUCKET_CAP_MB = 25
BUCKET_MULTIPLE_BYTES = 128


class ReduceOp(enum.IntEnum):
    AVERAGE = _shoal.ReduceOp.AVERAGE
    SUM = _shoal.ReduceOp.SUM
    MIN = _shoal.ReduceOp.MIN
    MAX = _shoal.ReduceOp.MAX


class Compression:
    """none: unchanged. fp16: sent as float16."""
    none, fp16 = _Compression.none, _Compression.fp16


def init():
    """Joins the job. Call it first, and once."""
    if _shoal.is_initialized():
        raise RuntimeError("init() called more than once. smdistributed.dataparallel is already initialized.")
    _environment.complete()
    _shoal.init()
    _environment.announce()


def shutdown():
    """Leaves the job. Optional, at the end of a script."""
    if _shoal.is_initialized():
        _shoal.shutdown()


def size():
    return _shoal.size()


def local_size():
    return _shoal.local_size()


def rank():
    return _shoal.rank()


def local_rank():
    return _shoal.local_rank()


def allreduce(tensor, param_index, num_params, compression=Compression.none, op=ReduceOp.AVERAGE):
    """Reduces the tensors of all ranks into a new tensor. The two numbers, a tensor's index among a step's gradients and their
    count, are not needed here."""
    if not 0 <= param_index < num_params:
        raise ValueError(f"param_index is {param_index}, and must be 0 or more and less than num_params, {num_params}")
    return _shoal.allreduce(tensor, _shoal.ReduceOp(op), compression)


def oob_allreduce(tensor, compression=Compression.none, op=ReduceOp.AVERAGE):
    """Returns the mean over all ranks, for losses and metrics."""
    _expect_average("oob_allreduce", op)
    return _shoal.oob_allreduce(tensor, compression)


def broadcast(tensor, root_rank):
    return _shoal.broadcast(tensor, root_rank)


def broadcast_variables(variables, root_rank):
    """Copies root_rank's variables to all ranks. Call it after the first step, for the variables of the model and of the
    optimizer."""
    _shoal.broadcast_variables(variables() if callable(variables) else variables, root_rank)


def broadcast_global_variables(root_rank):
    """Broadcasts all variables of a TensorFlow 1 graph."""
    if tf.executing_eagerly():
        raise RuntimeError("broadcast_global_variables() is not supported with eager execution: "
                           "broadcast_variables(model.variables, root_rank) does it")
    return tf.group(*_assign_broadcasts(tf.compat.v1.global_variables(), root_rank))


def overlap(tensor):
    """Returns the tensor unchanged. In SageMaker's library it marks where reductions begin in models that XLA compiles; here
    they begin as soon as gradients are ready."""
    return tf.identity(tensor)


def DistributedGradientTape(gradtape, device_dense="", device_sparse="", compression=Compression.none, sparse_as_dense=True,
                            op=ReduceOp.AVERAGE):
    _expect_no_devices(device_dense, device_sparse)
    _expect_average("DistributedGradientTape", op)
    return _shoal.DistributedGradientTape(gradtape, compression, sparse_as_dense)


def DistributedOptimizer(optimizer, name=None, use_locking=False, device_dense="", device_sparse="",
                         compression=Compression.none, sparse_as_dense=True, op=ReduceOp.AVERAGE, bucket_cap_mb=BUCKET_CAP_MB):
    """name and use_locking belong to TensorFlow 1 and have no effect."""
    _expect_no_devices(device_dense, device_sparse)
    _expect_average("DistributedOptimizer", op)
    if bucket_cap_mb <= 0 or bucket_cap_mb * (1 << 20) % BUCKET_MULTIPLE_BYTES:
        raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}, but bucket_cap_mb * 1024 * 1024 must be a positive multiple of "
                         f"{BUCKET_MULTIPLE_BYTES}")
    return _shoal.DistributedOptimizer(optimizer, compression, sparse_as_dense, buffer_mib=bucket_cap_mb)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """For tf.estimator and sessions of TensorFlow 1."""

    def __init__(self, root_rank, device=""):
        super().__init__()
        _expect_no_devices(device, "")
        self.root_rank, self._broadcast = root_rank, None

    def begin(self):
        self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session, coord):
        session.run(self._broadcast)


def _expect_no_devices(dense, sparse):
    if dense or sparse:
        raise ValueError("device_dense and device_sparse are not supported")


def _expect_average(function, op):
    if op != ReduceOp.AVERAGE:
        raise ValueError(f"{function}: op {op!r} is not supported: only ReduceOp.AVERAGE is")
