"""The job, and the ranks of its processes. There is one pipeline: each process has one partition."""
from __future__ import annotations

import keras
import tensorflow as tf

import shoal.tensorflow as shoal
from smdistributed.modelparallel import _parameters
from smdistributed.modelparallel.exceptions import SMPConfigError, SMPError, SMPUnsupportedError

# Parameters that are served in PyTorch only, with the value for which they ask for nothing.
OF_PYTORCH = {"tensor_parallel_degree": 1, "sharded_data_parallel_degree": 1, "shard_optimizer_state": False,
              "delayed_parameter_initialization": False, "fp16": False, "bf16": False}


class State:
    """What smp.init() has set up."""
    cfg = None

    def require(self):
        if self.cfg is None:
            raise SMPError("call smp.init() first")
        return self


state = State()


def init(config=None):
    """Joins the job. Call it first, on all ranks. config: the parameters as a dict; by default those in SM_HP_MP_PARAMETERS."""
    cfg, notes = _parameters.read(_parameters.given(config))
    for name, value in OF_PYTORCH.items():
        if getattr(cfg, name) != value:
            raise SMPUnsupportedError(f"smp.init: {name} is served in PyTorch only: leave it out"
                                      f"{', and set keras.mixed_precision' if name in ('fp16', 'bf16') else ''}")
    if not issubclass(tf.keras.Model, keras.Model):
        raise SMPError("smp.init: TF_USE_LEGACY_KERAS is set, and this package is for Keras 3: unset it")
    if not shoal.is_initialized():
        shoal.init()
    if shoal.size() != cfg.pipeline_parallel_degree:
        raise SMPConfigError(f"smp.init: with TensorFlow each process has one partition, and there are {shoal.size()} processes and "
                             f"{cfg.pipeline_parallel_degree} partitions: start {cfg.pipeline_parallel_degree} processes")
    state.cfg = cfg
    for note in notes:
        log(note)
    _serve_get_gradients()


def _serve_get_gradients():
    """Adds to Keras's optimizers the method get_gradients, which scripts for this library call and Keras 3 no longer has."""
    if not hasattr(keras.optimizers.Optimizer, "get_gradients"):
        keras.optimizers.Optimizer.get_gradients = _get_gradients


def _get_gradients(self, loss, params):
    """Returns the gradients of a loss, in a function decorated with @smp.step or @tf.function."""
    return tf.gradients(loss, [getattr(each, "value", each) for each in params])


def log(text):
    """Prints a line, once per job."""
    if shoal.rank() == 0:
        tf.get_logger().warning("smdistributed.modelparallel: %s", text)


# ---- Ranks -----------------------------------------------------------------------------------------------------------------


def is_initialized():
    return state.cfg is not None


def rank():
    return state.require() and shoal.rank()


def size():
    return state.require() and shoal.size()


def local_rank():
    return state.require() and shoal.local_rank()


def local_size():
    return state.require() and shoal.local_size()


mp_rank = pp_rank = rank
mp_size = pp_size = size


def dp_rank():
    """Returns 0: there is one pipeline."""
    return state.require() and 0


def dp_size():
    return state.require() and 1


def barrier():
    """Waits until all ranks have called it."""
    state.require()
    shoal.barrier()
