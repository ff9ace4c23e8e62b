"""Replicas of the stages of a pipeline: what a program asks for, and what the replicas of a stage exchange."""
from __future__ import annotations

import ctypes
import io

import torch

from .. import _native
from .._native import OK
from . import _communicator, _schedules, _shares


def replicate_of(wanted, size, cuts, schedule, replicas):
    """Returns "auto", a list of numbers, or None."""
    if wanted in (None, False):
        return None
    if replicas is not None:
        raise ValueError("shoal: replicate= makes replicas of stages within a pipeline, and replicas= joins several pipelines: pass all ranks "
                         "to one pipeline, and leave out replicas=")
    if wanted in (True, "auto"):
        if cuts is not None or not _schedules.is_word(schedule):
            raise ValueError("shoal: replicate=\"auto\" chooses stages together with their replicas: leave out cuts, choose a schedule by its "
                             "word, or pass the number of ranks of each stage")
        return "auto"
    if not isinstance(wanted, (list, tuple)) or not all(isinstance(each, int) and each >= 1 for each in wanted):
        raise ValueError(f"shoal: replicate must be \"auto\", or a list of numbers from 1 on, one for each rank of the schedule, not {wanted!r}")
    if sum(wanted) != size:
        raise ValueError(f"shoal: replicate has {sum(wanted)} ranks in all ({list(wanted)}), but the process group has {size}")
    return list(wanted)


def rank_named(schedule, rank):
    """Returns "rank 2" or "ranks 2 to 4": the members of the process group that a rank of a schedule is."""
    replicas = schedule.replicas()
    first, last = sum(replicas[:rank]), sum(replicas[:rank + 1]) - 1
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def members_named(schedule, stage):
    return rank_named(schedule, schedule.rank_of(stage))


def gathered(communicator, results, samples, parts):
    """Returns the results of all replicas of a stage, joined along their samples. results: this one's, by microbatch. samples: how
    many each of them is of."""
    own = {number: (result, samples[number]) for number, result in results.items()}
    every = [own] if communicator is None else _gather(communicator, own)
    found = {number: [each[number] for each in every if number in each] for number in sorted({number for each in every for number in each})}
    # Shares follow each other in the order of replicas.
    return {number: _shares.joined([result for result, _ in each], parts, [count for _, count in each]) for number, each in found.items()}


def _gather(communicator, value):
    """Returns the values of all ranks of a communicator, in their order."""
    stream = io.BytesIO()
    torch.save(value, stream)
    own = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    sizes = _gather_bytes(communicator, torch.tensor([own.numel()]).view(torch.uint8), 8).view(torch.int64).flatten().tolist()
    room = max(sizes)
    rows = _gather_bytes(communicator, torch.nn.functional.pad(own, (0, room - own.numel())), room)
    return [torch.load(io.BytesIO(ctypes.string_at(row.data_ptr(), size)), weights_only=False) for row, size in zip(rows, sizes)]


def _gather_bytes(communicator, own, size):
    library = _native.load()
    found = torch.empty(library.comm_size(communicator.address), size, dtype=torch.uint8)
    status = library.allgather(communicator.address, own.data_ptr(), found.data_ptr(), size, _native.UINT8, None)
    if status != OK:
        raise _communicator.BackendError(f"shoal: {_communicator.timed_out(status)}{_native.error_of(status, comm=communicator.address)}")
    return found
