"""Messages between ranks: objects that can be pickled, and values whose tensors are sent as they are."""
from __future__ import annotations

import enum
import pickle

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from shoal.torch._communicator import text_of
from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.torch._state import state


class CommGroup(enum.Enum):
    """A kind of group; the one that has this rank is meant."""
    WORLD = "WORLD"
    MP_GROUP = "MP_GROUP"
    DP_GROUP = "DP_GROUP"
    PP_GROUP = "PP_GROUP"
    TP_GROUP = "TP_GROUP"
    RDP_GROUP = "RDP_GROUP"


class RankType(enum.Enum):
    """In which group a rank is counted."""
    WORLD_RANK = "WORLD"
    MP_RANK = "MP_GROUP"
    DP_RANK = "DP_GROUP"
    PP_RANK = "PP_GROUP"
    TP_RANK = "TP_GROUP"
    RDP_RANK = "RDP_GROUP"


def _kind_of(given, kinds):
    if not isinstance(given, kinds):
        raise TypeError(f"smp: {given!r} is not one of {', '.join(f'smp.{kinds.__name__}.{each.name}' for each in kinds)}")
    return given.value


# ---- Objects ---------------------------------------------------------------------------------------------------------------


def send(obj, dest_rank, rank_type=RankType.WORLD_RANK):
    """Sends an object to a rank, which calls recv_from()."""
    _send_to(_ranked(dest_rank, rank_type), obj)


def recv_from(src_rank, rank_type=RankType.WORLD_RANK):
    """Returns the object that a rank has sent with send() or broadcast()."""
    source = _ranked(src_rank, rank_type)
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group=state.group("WORLD"))
    received = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(received, source, group=state.group("WORLD"))
    return pickle.loads(received.numpy().tobytes())


def broadcast(obj, group=CommGroup.WORLD):
    """Sends an object to all other ranks of the group, which call recv_from()."""
    for other in state.ranks(_kind_of(group, CommGroup)):
        if other != dist.get_rank():
            _send_to(other, obj)


def allgather(obj, group=CommGroup.WORLD):
    """Returns the objects of all ranks of the group, in the order of ranks. All of them call it."""
    own = state.group(_kind_of(group, CommGroup))
    found = [None] * own.size()
    dist.all_gather_object(found, obj, group=own)
    return found


def barrier(group=CommGroup.WORLD):
    """Returns when all ranks of the group have called it."""
    dist.barrier(group=state.group(_kind_of(group, CommGroup)))


def _ranked(rank, rank_type):
    """Returns the rank in the world of a rank in a group."""
    ranks = state.ranks(_kind_of(rank_type, RankType))
    if not 0 <= rank < len(ranks):
        raise SMPError(f"smp: there is no rank {rank} of the type {rank_type.name}: the group has {len(ranks)}")
    if ranks[rank] == dist.get_rank():
        raise SMPError(f"smp: rank {rank} of the type {rank_type.name} is this process itself")
    return ranks[rank]


def _send_to(rank, obj):
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    dist.send(torch.tensor([data.numel()]), rank, group=state.group("WORLD"))
    dist.send(data, rank, group=state.group("WORLD"))


# ---- Values with tensors ---------------------------------------------------------------------------------------------------


class _Place:
    """Stands for a tensor in a value that is pickled."""


def share(value, source, group):
    """Returns the value of one rank of a process group on all of them. `source`: its rank in the group."""
    origin = dist.get_global_rank(group, source)
    if group.size() == 1:
        return value
    return copied(value, group.rank() == source, lambda data: dist.broadcast(data, origin, group=group),
                  lambda number: dist.all_reduce(number, dist.ReduceOp.MAX, group=group))


def copied(value, is_source, copy, find_most):
    """Returns the value of the source on all ranks. copy(tensor of bytes) fills it with the source's. Tensors are copied without
    pickling. find_most(tensor) replaces the integer in it by the largest of all ranks. If a rank cannot unpickle the value, the call
    fails on all ranks, so that none waits for it later."""
    packed, tensors = _packed(value) if is_source else (b"", [])
    size = torch.tensor([len(packed)]).view(torch.uint8)
    copy(size)
    head = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if is_source else torch.empty(int(size.view(torch.int64)), dtype=torch.uint8)
    copy(head)
    pickled, shapes = pickle.loads(head.numpy().tobytes())
    tensors = tensors if is_source else [torch.empty(shape, dtype=kind) for kind, shape in shapes]
    for tensor in tensors:
        if tensor.numel():
            copy(tensor.reshape(-1).view(torch.uint8))
    form = _unpickled(pickled, find_most)
    waiting = iter(tensors)
    return pytree.tree_map(lambda leaf: next(waiting) if isinstance(leaf, _Place) else leaf, form)


def _unpickled(pickled, find_most):
    """Returns the value without its tensors, or raises the error that is there instead, or that any of the ranks has."""
    form = failure = None
    try:
        form = pickle.loads(pickled)
    except Exception as error:
        failure = error
    worst = torch.tensor([-1 if failure is None else dist.get_rank()])
    find_most(worst)
    if failure is not None:
        raise SMPError(f"smp: a value that another rank sent cannot be unpickled here: {text_of(failure)}") from failure
    if int(worst) >= 0:
        raise SMPError(f"smp: a value cannot be sent to the other ranks, because rank {int(worst)} cannot unpickle it: see its error")
    if isinstance(form, SMPError):
        raise form
    return form


def _piece_of(tensor):
    """Returns the values of a tensor as one piece of memory."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of {tensor.layout} is not one piece of memory")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _packed(value):
    """Returns what others need to know of a value, pickled, and its tensors; or an error in place of the value."""
    try:
        tensors = [_piece_of(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        form = pytree.tree_map(lambda leaf: _Place() if isinstance(leaf, torch.Tensor) else leaf, value)
        return pickle.dumps((pickle.dumps(form), [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])), tensors
    except Exception as error:
        text = f"smp: a value cannot be sent to the other ranks: {text_of(error)}"
        return pickle.dumps((pickle.dumps(SMPError(text)), [])), []
