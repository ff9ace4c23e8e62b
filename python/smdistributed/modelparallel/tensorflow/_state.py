"""The job, and the ranks of its processes. Each process has one partition of one replica of the model. With "horovod": true there may
be several replicas: then Horovod's job is that of the ranks with the same partition, so hvd.allreduce() averages over replicas."""
from __future__ import annotations

import keras
import tensorflow as tf

import shoal.tensorflow as shoal
from shoal.tensorflow import _world
from smdistributed.modelparallel import _parameters, _ranks
from smdistributed.modelparallel.exceptions import SMPConfigError, SMPError, SMPUnsupportedError

# Parameters that are served in PyTorch only, with the value for which they ask for nothing.
OF_PYTORCH = {"tensor_parallel_degree": 1, "sharded_data_parallel_degree": 1, "shard_optimizer_state": False,
              "delayed_parameter_initialization": False, "fp16": False, "bf16": False}
# Parameters without effect in TensorFlow, with the value for which they ask for nothing, and why.
WITHOUT_EFFECT = {"pipeline": ("interleaved", "TensorFlow runs each layer as soon as its inputs are there"),
                  "active_microbatches": (None, "TensorFlow runs each layer as soon as its inputs are there"),
                  "ddp": (False, "\"horovod\": true is for replicas in TensorFlow")}


class State:
    """What smp.init() has set up. worlds: the numbers of this rank's communicators in shoal.tensorflow, by kinds of groups."""
    cfg = placement = None
    worlds = {}

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
    placement = _ranks.Placement(shoal.size(), cfg.pipeline_parallel_degree, strategy=cfg.placement_strategy)
    replicas = placement.sizes["D"]
    if replicas > 1 and not cfg.horovod:
        raise SMPConfigError(f"smp.init: {shoal.size()} processes are {replicas} replicas of {cfg.pipeline_parallel_degree} partitions, which "
                             "\"horovod\": true trains together with TensorFlow: set it, and average gradients with hvd.allreduce() of "
                             f"shoal.horovod.tensorflow; or start {cfg.pipeline_parallel_degree} processes")
    state.placement, state.worlds = placement, {kind: _world_of(placement, kind) for kind in ("PP_GROUP", "DP_GROUP")}
    if cfg.horovod:
        from shoal.horovod.tensorflow import _world as horovod_world
        horovod_world.init_over(state.worlds["DP_GROUP"])
    state.cfg = cfg
    for name, (value, reason) in WITHOUT_EFFECT.items():
        if getattr(cfg, name) != value:
            notes.append(f"{name} has no effect: {reason}")
    for note in notes:
        log(note)
    _serve_get_gradients()


def _world_of(placement, kind):
    """Returns the number of this rank's communicator of a kind. All ranks make all of them, in the same order."""
    groups = placement.groups(kind)
    if groups == [list(range(shoal.size()))]:
        return 0
    numbers = [_world.add_world(group) for group in groups]
    return next(number for number, group in zip(numbers, groups) if shoal.rank() in group)


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


def _of(kind):
    """Returns the functions for one kind of group: rank and size."""
    def rank_in():
        return state.require() and state.placement.rank_in(kind, shoal.rank())

    def size_of():
        return state.require() and len(state.placement.group(kind, shoal.rank()))
    return rank_in, size_of


pp_rank, pp_size = _of("PP_GROUP")
mp_rank, mp_size = _of("MP_GROUP")
dp_rank, dp_size = _of("DP_GROUP")
rdp_rank, rdp_size = _of("RDP_GROUP")


def barrier():
    """Waits until all ranks have called it."""
    state.require()
    shoal.barrier()
