"""The state of a job on this rank: its degrees, ranks and groups."""
from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import shoal.torch  # noqa: F401  registers the back-end
from smdistributed.dataparallel import _environment
from smdistributed.modelparallel.exceptions import SMPConfigError, SMPError, SMPUnsupportedError
from torch.sagemaker import _fsdp, _parameters
from torch.sagemaker._ranks import Ranker


def _degree(name):
    """Returns a property for a degree. A script may set it before tsm.init, which then prefers it to the job's parameter."""
    def get(self):
        return self._asked.get(name, getattr(self.cfg, name))

    def set_(self, value):
        if self.ranker is not None and value != get(self):
            raise SMPError(f"tsm.state.{name} is {get(self)} since tsm.init: set it before")
        self._asked[name] = value
    return property(get, set_)


class State:
    """What tsm.init has set up. A group of one rank is None, as in the vendor's library if the feature is not used."""
    hybrid_shard_degree = _degree("hybrid_shard_degree")
    tensor_parallel_degree = tp_size = _degree("tensor_parallel_degree")
    context_parallel_degree = cp_size = _degree("context_parallel_degree")
    expert_parallel_degree = ep_size = _degree("expert_parallel_degree")

    def __init__(self):
        self._asked = {}
        self.reset()

    def reset(self):
        """Forgets a former job of this process."""
        self.cfg, self.ranker = _parameters.Parameters(), None
        self._asked.clear()
        self._made, self._own = {}, {}
        _fsdp.remove()

    def init(self, config=None):
        found, notes = _parameters.read({**_parameters.given(config), **self._asked})
        self._join()
        ranker = Ranker(dist.get_world_size(), found.hybrid_shard_degree, found.tensor_parallel_degree, found.context_parallel_degree)
        self.cfg, self.ranker, self._made = found, ranker, {}
        self._own = {"tp": self._group(ranker.get_tp_groups()), "cp": self._group(ranker.get_cp_groups()),
                     "rep": None if self.falls_back else self._group(ranker.get_rep_rank_groups())}
        if found.sm_activation_offloading and not torch.cuda.is_available():
            notes.append("sm_activation_offloading has no effect: activations are in the memory of the host already")
        for note in notes:
            log(note)
        _fsdp.install(self)

    @staticmethod
    def _join():
        if dist.is_initialized():
            return
        _environment.complete()
        if not _environment.started_as_job():
            raise SMPError("tsm.init: this process is not a rank of a job: RANK and WORLD_SIZE are not set; start it with "
                           "`shoal run -n 2 python3 ...`, torchrun or mpirun")
        dist.init_process_group("shoal")

    def require(self):
        if self.ranker is None:
            raise SMPError("call tsm.init() first")

    # ---- Ranks ----

    @property
    def rank(self):
        return dist.get_rank()

    @property
    def world_size(self):
        return dist.get_world_size()

    @property
    def tp_rank(self):
        self.require()
        return self.ranker.get_tp_rank(self.rank)

    @property
    def cp_rank(self):
        self.require()
        return self.ranker.get_cp_rank(self.rank)

    @property
    def ep_rank(self):
        return 0

    @property
    def rep_rank(self):
        self.require()
        return self.ranker.get_rep_rank(self.rank)

    # ---- Groups ----

    def _group(self, groups):
        """Returns this rank's process group among groups of ranks, or None if it is alone. All ranks of a group call it."""
        ranks = tuple(next(group for group in groups if self.rank in group))
        if len(ranks) == 1:
            return None
        if ranks not in self._made:
            is_all = len(ranks) == self.world_size
            self._made[ranks] = dist.group.WORLD if is_all else dist.new_group(list(ranks), use_local_synchronization=True)
        return self._made[ranks]

    @property
    def world_process_group(self):
        self.require()
        return dist.group.WORLD

    @property
    def tp_process_group(self):
        self.require()
        return self._own["tp"]

    @property
    def cp_process_group(self):
        self.require()
        return self._own["cp"]

    @property
    def rep_rank_process_group(self):
        """All ranks of this rank's replica, or None if PyTorch's FSDP divides parameters by its own rules."""
        self.require()
        return self._own["rep"]

    def shard_and_replica_groups(self, degree):
        """Returns the process group that divides parameters among `degree` ranks, and the one that has the same shard. Checkpoints
        then follow this degree."""
        cfg = self.cfg
        self.ranker = Ranker(self.world_size, degree, cfg.tensor_parallel_degree, cfg.context_parallel_degree)
        return self._group(self.ranker.get_shard_groups()), self._group(self.ranker.get_rep_groups())

    @property
    def falls_back(self):
        """True if PyTorch's FSDP divides parameters by its own rules."""
        return self.hybrid_shard_degree == 0 and self.tensor_parallel_degree == 1

    # ---- What is PyTorch's own, or not served ----

    @property
    def sm_activation_offloading(self):
        """True if the script should use PyTorch's offload_wrapper: true by default, as with the vendor's library, on GPUs only."""
        return torch.cuda.is_available() and self.cfg.sm_activation_offloading is not False

    @property
    def get_rng_state_tracker(self):
        raise SMPUnsupportedError("tsm.state.get_rng_state_tracker is for Transformer Engine, which is not used: train without fp8")


state = State()


def init(config=None):
    """Sets up the job. Call it on all ranks, after torch.distributed.init_process_group, before the model is made. config: a dict, the
    path of a JSON file, or None for the parameters in SM_HP_MP_PARAMETERS, if there are any."""
    state.init(config)


def is_initialized():
    return state.ranker is not None


def log(text):
    """Prints a line, once per job."""
    if dist.get_rank() == 0:
        print(f"torch.sagemaker: {text}", file=sys.stderr, flush=True)


def ranks_of_a_host():
    """Returns how many ranks are on this host."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if dist.get_world_size() % count:
        raise SMPConfigError(f"FSDP: HYBRID_SHARD divides parameters among the {count} ranks of each host, and {dist.get_world_size()} "
                             "processes are not a multiple: set hybrid_shard_degree")
    return count
