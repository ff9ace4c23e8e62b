"""Schedules of pipelines (include/shoal/pipeline.h, sections 1 to 3): struct shoal_schedule."""
from __future__ import annotations

import ctypes
import os

from .. import _native
from .._native import OK
from ._communicator import is_own

TEXT_BYTES = 1024
KINDS = {"gpipe": _native.SCHEDULE_GPIPE, "1f1b": _native.SCHEDULE_1F1B, "interleaved": _native.SCHEDULE_INTERLEAVED,
         "breadth-first": _native.SCHEDULE_BREADTH_FIRST, "zb-h1": _native.SCHEDULE_ZB_H1, "zb-h2": _native.SCHEDULE_ZB_H2,
         "v-min": _native.SCHEDULE_V_MIN, "v-half": _native.SCHEDULE_V_HALF, "v-zb": _native.SCHEDULE_V_ZB,
         "auto": _native.SCHEDULE_AUTO}
LETTERS = "FBIWRSTU"  # by enum shoal_action_kind
OF_SEVERAL_STAGES = ("interleaved", "breadth-first")


class Schedule:
    """A schedule, which never changes. make() and read() return one."""

    def __init__(self, address):
        self._library, self._owner, self.address = _native.load(), os.getpid(), address

    def __del__(self, is_own=is_own):
        if is_own(self._owner):
            self._library.schedule_free(self.address)

    @classmethod
    def make(cls, kind, ranks, microbatches, stages=None):
        """kind: a word of KINDS. stages: of all ranks together."""
        options = options_of(kind, ranks, microbatches, stages)
        return cls._checked(lambda out, text: _native.load().schedule_create(ctypes.byref(options), out, text, TEXT_BYTES),
                            f"the schedule \"{kind}\" for {ranks} ranks and {microbatches} microbatches")

    @classmethod
    def read(cls, text):
        """Reads torch's form: a line for each rank, actions separated by commas."""
        given = text.encode()
        return cls._checked(lambda out, why: _native.load().schedule_read(given, len(given), out, why, TEXT_BYTES), "the schedule")

    @classmethod
    def _checked(cls, call, name):
        address, text = ctypes.c_void_p(), ctypes.create_string_buffer(TEXT_BYTES)
        status = call(ctypes.byref(address), text)
        if status != OK:
            reason = text.value.decode(errors="replace") or str(_native.error_of(status))
            raise ValueError(f"shoal: {name}: {reason}")
        return cls(address.value)

    @property
    def ranks(self):
        return self._library.schedule_ranks(self.address)

    @property
    def stages(self):
        return self._library.schedule_stages(self.address)

    @property
    def microbatches(self):
        return self._library.schedule_microbatches(self.address)

    def rank_of(self, stage):
        return self._library.schedule_rank_of(self.address, stage)

    def recomputed(self, stages):
        """Returns a copy that recomputes these stages: True for all, or their numbers."""
        mask = [1] * self.stages if stages is True else [0] * self.stages
        for stage in [] if stages is True else stages:
            if not (isinstance(stage, int) and 0 <= stage < self.stages):
                raise ValueError(f"shoal: recompute has {stage!r}, but the stages are 0 to {self.stages - 1}")
            mask[stage] = 1
        return self._copy(self._library.schedule_recompute, (ctypes.c_ubyte * self.stages)(*mask))

    def _copy(self, call, *arguments):
        address = ctypes.c_void_p()
        status = call(self.address, *arguments, ctypes.byref(address))
        if status != OK:
            raise _native.error_of(status)
        return Schedule(address.value)

    def recomputed_stages(self):
        return [stage for stage in range(self.stages) if self._library.schedule_recomputes(self.address, stage)]

    # ---- Replicas and sums ----

    @property
    def size(self):
        """The replicas of all ranks."""
        return self._library.schedule_size(self.address)

    def replicas_of(self, stage):
        return self._library.schedule_replicas(self.address, self.rank_of(stage))

    def replicas(self):
        """Returns the number of replicas of each rank."""
        return [self._library.schedule_replicas(self.address, rank) for rank in range(self.ranks)]

    def replicated(self, replicas):
        """Returns a copy whose ranks have these numbers of replicas."""
        return self._copy(self._library.schedule_replicate, (ctypes.c_uint32 * len(replicas))(*replicas))

    def place(self, member):
        """Returns the rank of the schedule that a member of the process group is, and which of its replicas."""
        rank, replica = ctypes.c_uint32(), ctypes.c_uint32()
        if self._library.schedule_place(self.address, member, ctypes.byref(rank), ctypes.byref(replica)) != OK:
            raise ValueError(f"shoal: the schedule is for {self.size} ranks, and there is a rank {member}")
        return rank.value, replica.value

    def members_of(self, stages):
        """Returns the members of the process group that have one of the stages."""
        ranks = {self.rank_of(stage) for stage in stages}
        return tuple(member for member in range(self.size) if self.place(member)[0] in ranks)

    def with_sums(self, ties, sums_replicas):
        """Returns a copy with actions for sums, and without those that there were. ties: the stages of each."""
        tied = [_native.TiedStage(tie=number, stage=stage) for number, stages in enumerate(ties) for stage in stages]
        return self._copy(self._library.schedule_add_sums, (_native.TiedStage * max(1, len(tied)))(*tied), len(tied), int(sums_replicas), 0)

    def plain(self):
        """Returns a copy that torch reads."""
        return self._copy(self._library.schedule_plain)

    def text(self):
        """Returns the schedule in torch's form (compute_only), with Shoal's own actions: see shoal_schedule_print."""
        return printed(lambda stream: self._library.schedule_print(self.address, stream))


def name_of(action):
    """Returns the name of a struct shoal_action in a schedule's text, such as "1F3"."""
    return f"{action.stage}{LETTERS[action.kind]}{action.microbatch}"


def printed(call):
    """Returns what a function of the library prints to a FILE."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    place, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(place), ctypes.byref(size)))
    if not stream:
        raise MemoryError("shoal: no memory for a text")
    status = call(stream)
    libc.fclose(stream)
    text = ctypes.string_at(place, size.value)
    libc.free(place)
    if status != OK:
        raise _native.error_of(status)
    return text.decode()


def schedule_of(wanted, ranks, microbatches, stages=None, replicas=None):
    """Returns the schedule for what a program asks for: a word, or a schedule's text. replicas: the number for each rank, or None."""
    if is_word(wanted):
        return Schedule.make(wanted, ranks, microbatches, stages)
    schedule = Schedule.read(wanted)
    if schedule.size != schedule.ranks:
        _require_same(schedule.replicas(), replicas)
    if (schedule.ranks, schedule.microbatches) != (ranks, microbatches):
        raise ValueError(f"shoal: the schedule is for {schedule.ranks} ranks and {schedule.microbatches} microbatches, but there are "
                         f"{ranks} and {microbatches}")
    return schedule


def _require_same(written, replicas):
    """The replicas that a schedule's text has must be those that the program asks for."""
    if replicas is None:
        raise ValueError(f"shoal: the schedule has ranks with several replicas (x{max(written)}): pass replicate={written} as well")
    if written != replicas:
        raise ValueError(f"shoal: the schedule has the replicas {written}, but replicate is {replicas}: they must be the same")


def is_word(wanted):
    """Returns true for a word of KINDS, false for a schedule's text; anything else is refused."""
    if not isinstance(wanted, str):
        raise TypeError(f"shoal: schedule must be a word or a schedule's text, not {type(wanted).__name__}")
    if wanted not in KINDS and "," not in wanted and "\n" not in wanted:
        raise ValueError(f"shoal: the schedule \"{wanted}\" is not one of {', '.join(KINDS)}, and not a schedule's text")
    return wanted in KINDS


def options_of(kind, ranks, microbatches, stages):
    return _native.ScheduleOptions(kind=KINDS[kind], ranks=ranks, microbatches=microbatches,
                                   stages_per_rank=_stages_per_rank(kind, ranks, stages))


def _stages_per_rank(kind, ranks, stages):
    if kind not in OF_SEVERAL_STAGES or stages is None:
        return 0
    if stages % ranks or stages < 2 * ranks:
        raise ValueError(f"shoal: {stages} stages for {ranks} ranks, but each rank of the schedule \"{kind}\" needs the same number of "
                         "stages, 2 or more")
    return stages // ranks
