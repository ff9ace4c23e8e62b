#!/usr/bin/env python3
"""The command and its workers as programs of another processor: SHOAL_EMULATOR runs each of them."""
import os
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "multi"))
from tap import call, expect, run_cases  # noqa: E402

EMULATOR = os.environ["SHOAL_EMULATOR"]
SHOAL = os.environ["SHOAL_COMMAND"]
EXAMPLES = pathlib.Path(os.environ["SHOAL_EXAMPLES"])


def shoal_run(workers, *program):
    code, out, err = call(EMULATOR, SHOAL, "run", "-n", workers, EMULATOR, *program)
    expect(code == 0, code, out, err)
    return out


def programs_are_of_the_other_processor():
    machine = (EXAMPLES / "01_hello").read_bytes()[18:20]
    expect(machine == b"\xb7\x00", "no ELF program of aarch64:", machine)


def two_workers_sum():
    out = shoal_run(2, EXAMPLES / "01_hello")
    for rank in (0, 1):
        expect(f"rank {rank} of 2: the sum of all ranks is 1" in out, out)


def posted_operations_are_right():
    out = shoal_run(2, EXAMPLES / "02_async")
    expect(len(re.findall(r" 0 wrong elements", out)) == 2, out)


def three_workers_split_into_groups():
    out = shoal_run(3, EXAMPLES / "03_groups")
    for rank, received in enumerate((2, 0, 1)):
        expect(f"rank {rank}: received {received} from the left" in out, out)


def all_reduces_are_checked_up_to_1_mib():
    out = shoal_run(2, SHOAL, "bench", "allreduce", "--max", "1M", "--check", "--iterations", "3", "--format", "json")
    errors = re.findall(r'"errors": *(\d+)', out)
    expect(len(errors) >= 5 and set(errors) == {"0"}, out)


run_cases([programs_are_of_the_other_processor, two_workers_sum, posted_operations_are_right, three_workers_split_into_groups,
           all_reduces_are_checked_up_to_1_mib])
