"""Divides a chain of measured units into stages, with the C library's partitioner (include/shoal/pipeline.h). This module imports
no framework."""
from __future__ import annotations

import contextlib
import ctypes
import json

from shoal import _native
from smdistributed.modelparallel.exceptions import SMPConfigError

_TEXT_BYTES = 1024


@contextlib.contextmanager
def _owned(kind, call):
    """Makes an object of the library with call(address, text), and frees it at the end."""
    address, text = ctypes.c_void_p(), ctypes.create_string_buffer(_TEXT_BYTES)
    status = call(ctypes.byref(address), text)
    if status != _native.OK:
        raise SMPConfigError(f"smp: {text.value.decode(errors='replace') or _native.error_of(status)}")
    try:
        yield address
    finally:
        getattr(_native.load(), f"{kind}_free")(address)


def first_units(units, ranks, microbatches, **options):
    """Returns the numbers of the first units of stages 0, 1, ... for the shortest step of 1F1B. Each rank has one stage. units:
    dicts as in a profile's JSON, in the order in which they run. options: fields of struct shoal_partition_options."""
    library, given = _native.load(), json.dumps({"name": "model", "units": units}).encode()
    schedule_options = _native.ScheduleOptions(kind=_native.SCHEDULE_1F1B, ranks=ranks, microbatches=microbatches)
    partition_options, schedule, kind = _native.PartitionOptions(**options), ctypes.c_void_p(), ctypes.c_int()
    with _owned("profile", lambda out, text: library.profile_read(given, len(given), out, text, _TEXT_BYTES)) as profile:
        with _owned("partition", lambda out, text: library.partition_choose(
                profile, ctypes.byref(schedule_options), ctypes.byref(partition_options), ctypes.byref(schedule), out, ctypes.byref(kind),
                text, _TEXT_BYTES)) as partition:
            stages = [_native.Stage() for _ in range(ranks)]
            for number, stage in enumerate(stages):
                library.partition_stage(partition, number, ctypes.byref(stage))
            library.schedule_free(schedule)
            return [stage.first_unit for stage in stages]
