"""The state of a job on this rank: its parameters, ranks and groups."""
from __future__ import annotations

import contextlib
import os
import sys
import weakref

import torch.distributed as dist

import shoal.torch  # noqa: F401  registers the back-end
from smdistributed.dataparallel import _environment
from smdistributed.modelparallel import _parameters, _ranks
from smdistributed.modelparallel.exceptions import SMPError, SMPUnsupportedError

BACKEND = "shoal"


class ModuleManager:
    """transformers reads translate_functions when it saves a model: pairs of functions that translate states of tensor-parallel
    modules. Here it is empty."""
    translate_functions = ()


class State:
    """What smp.init() has set up. Programs read `cfg`."""
    module_manager = ModuleManager()

    def __init__(self):
        self._world, self._made = None, {}  # the default group of the job, and the groups that were made in it, by their ranks
        self.reset()

    def reset(self):
        """Forgets a former job of this process."""
        self.cfg = self.placement = self.model = None  # model: a weak reference
        self.is_tracing = False
        self.optimizers = weakref.WeakSet()
        self.running = None  # the pass whose step function runs
        self._groups = {}

    @property
    def is_initialized(self):
        return self.cfg is not None

    def init(self, config=None):
        """See init() below."""
        cfg, notes = _parameters.read(_parameters.given(config))
        if cfg.horovod:
            raise SMPUnsupportedError("smp.init: horovod: true is for TensorFlow: with PyTorch write \"ddp\": true")
        if not dist.is_initialized():
            _environment.complete()
            if not _environment.started_as_job():
                raise SMPError("smp.init: this process is not a rank of a job: RANK and WORLD_SIZE are not set; start it with "
                               "`shoal run -n 2 python3 ...`, torchrun or mpirun")
            dist.init_process_group(BACKEND)
        rank, size = dist.get_rank(), dist.get_world_size()
        placement = _ranks.Placement(size, cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement_strategy,
                                     shards=cfg.sharded_data_parallel_degree)
        if placement.sizes["D"] > 1 and not cfg.ddp:
            raise _parameters.SMPConfigError(f"smp.init: {size} processes are {placement.sizes['D']} replicas of "
                                             f"{cfg.pipeline_parallel_degree} partitions, which \"ddp\": true trains together: set it, or "
                                             f"start {cfg.pipeline_parallel_degree} processes")
        if cfg.sharded_data_parallel_degree not in (1, size):
            raise SMPUnsupportedError(f"smp.init: sharded_data_parallel_degree is {cfg.sharded_data_parallel_degree}, and is served for all "
                                      f"processes together: set it to {size}")
        if self._world is not dist.group.WORLD:
            self._world, self._made = dist.group.WORLD, {}
        elif self.cfg == cfg:
            return
        self.reset()
        self.cfg, self.placement = cfg, placement
        for kind in _ranks.KINDS:
            ranks = tuple(placement.group(kind, rank))
            if ranks not in self._made:
                self._made[ranks] = dist.new_group(list(ranks), backend=BACKEND, use_local_synchronization=True)
            self._groups[kind] = self._made[ranks]
        for note in notes:
            log(note)

    @contextlib.contextmanager
    def running_as(self, thing):
        """Inside, a step function runs."""
        self.running = thing
        try:
            yield
        finally:
            self.running = None

    def require(self):
        if not self.is_initialized:
            raise SMPError("call smp.init() first")

    def _has_shares(self):
        return self.cfg.shard_optimizer_state and self.placement.sizes["D"] > 1

    def divides(self):
        """Returns true if the data-parallel ranks divide the optimizer's states among themselves, and an engine runs the optimizer in
        the backward pass."""
        return self.is_sharded() or (self._has_shares() and self.cfg.pipeline_parallel_degree == 1 and self.cfg.microbatches == 1)

    def divides_step(self):
        """Returns true if they divide the states, and each of them steps its share in optimizer.step()."""
        return self._has_shares() and not self.divides()

    def is_sharded(self):
        """Returns true if they divide parameters as well as states."""
        return self.cfg.sharded_data_parallel_degree > 1

    def group(self, kind):
        """Returns the process group of a kind that has this rank."""
        self.require()
        return self._groups[kind]

    def ranks(self, kind):
        self.require()
        return self.placement.group(kind, dist.get_rank())


state = State()


def log(text):
    """Prints a line, once per job."""
    if dist.get_rank() == 0:
        print(f"smdistributed.modelparallel: {text}", file=sys.stderr, flush=True)


# ---- Ranks and groups ------------------------------------------------------------------------------------------------------


def init(config=None):
    """Joins the job. Call it first, on all ranks. config: the parameters as a dict; by default those in SM_HP_MP_PARAMETERS.

    Another call with the same parameters changes nothing. With others it begins anew: models and optimizers must be made again."""
    state.init(config)


def is_initialized():
    return state.is_initialized


def is_tracing():
    """Returns true while the first step finds out with which arguments the model is called."""
    return state.is_tracing


def _number_of(name, otherwise):
    """Returns a rank or size that the launcher has set, also before smp.init(). Some scripts log with it first."""
    _environment.complete()
    if name not in os.environ:
        state.require()
    return int(os.environ.get(name, otherwise() if state.is_initialized else 0))


def rank():
    """Returns the rank among all processes. It may be called before smp.init(), as size(), local_rank() and local_size()."""
    return dist.get_rank() if state.is_initialized else _number_of("RANK", dist.get_rank)


def size():
    return dist.get_world_size() if state.is_initialized else _number_of("WORLD_SIZE", dist.get_world_size)


def local_rank():
    """Returns the rank on this host."""
    return _number_of("LOCAL_RANK", dist.get_rank)


def local_size():
    return _number_of("LOCAL_WORLD_SIZE", dist.get_world_size)


def _of(kind):
    """Returns the functions for one kind of group: rank, size, process group, list of ranks."""
    def rank():
        state.require()
        return state.placement.rank_in(kind, dist.get_rank())

    def size():
        return len(state.ranks(kind))

    def process_group():
        return state.group(kind)

    def ranks():
        return state.ranks(kind)
    return rank, size, process_group, ranks


_, _, get_world_process_group, _ = _of("WORLD")
mp_rank, mp_size, get_mp_process_group, get_mp_group = _of("MP_GROUP")
dp_rank, dp_size, get_dp_process_group, get_dp_group = _of("DP_GROUP")
pp_rank, pp_size, get_pp_process_group, get_pp_group = _of("PP_GROUP")
tp_rank, tp_size, get_tp_process_group, get_tp_group = _of("TP_GROUP")
rdp_rank, rdp_size, get_rdp_process_group, get_rdp_group = _of("RDP_GROUP")
