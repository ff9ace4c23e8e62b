"""python3 filtered.py SOCKET -- COMMAND...: becomes COMMAND, whose opens of files (and those of all that it starts) wait for an
answer from fastfile.View at the other end of SOCKET. Needs no right: a seccomp filter with user notification, Linux 5.5 or
later.

Run as a file of its own, with Python's standard library only, so that it starts fast and needs no path to be set."""
from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import sys
from typing import Dict, List, NamedTuple, Optional


class Calls(NamedTuple):
    """Numbers of the processor's system calls; `open` is missing where there is only openat."""

    audit: int
    seccomp: int
    open: Optional[int]
    openat: int
    openat2: int


CALLS: Dict[str, Calls] = {
    "x86_64": Calls(0xC000003E, 317, 2, 257, 437),
    "aarch64": Calls(0xC00000B7, 277, None, 56, 437),
}
PR_SET_NO_NEW_PRIVS = 38
SET_MODE_FILTER = 1
SPEC_ALLOW, NEW_LISTENER, WAIT_KILLABLE = 1 << 2, 1 << 3, 1 << 5
LOAD, AND, JUMP_EQUAL, JUMP_SET, RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
ALLOW, ASK = 0x7FFF0000, 0x7FC00000
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_ARGUMENTS = 0, 4, 16


class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jump_true", ctypes.c_uint8), ("jump_false", ctypes.c_uint8),
                ("k", ctypes.c_uint32)]


class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint16), ("first", ctypes.POINTER(Instruction))]


def program_of(calls: Calls) -> List[Instruction]:
    """Asks about opens that may read a file. Jumps count the instructions that they leap over."""
    nothing = os.O_DIRECTORY | getattr(os, "O_PATH", 0)
    openat_flags, open_flags = OFFSET_ARGUMENTS + 2 * 8, OFFSET_ARGUMENTS + 1 * 8
    lines = [
        (LOAD, 0, 0, OFFSET_ARCH),
        (JUMP_EQUAL, 0, 11, calls.audit),             # another kind of call: allow
        (LOAD, 0, 0, OFFSET_NUMBER),
        (JUMP_EQUAL, 8, 0, calls.openat2),            # its flags are in memory: ask
        (JUMP_EQUAL, 3, 0, calls.openat),
        (JUMP_EQUAL, 0, 7, calls.openat if calls.open is None else calls.open),
        (LOAD, 0, 0, open_flags),
        (JUMP_EQUAL, 1, 1, 0),                        # to the test of the flags in either case
        (LOAD, 0, 0, openat_flags),
        (JUMP_SET, 3, 0, nothing),                    # no bytes are read: allow
        (AND, 0, 0, os.O_ACCMODE),
        (JUMP_EQUAL, 1, 0, os.O_WRONLY),
        (RETURN, 0, 0, ASK),
        (RETURN, 0, 0, ALLOW),
    ]
    return [Instruction(*line) for line in lines]


def filter_install(calls: Calls) -> int:
    """Returns the descriptor at which the questions come. Asks for no new privileges only where it must."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    lines = program_of(calls)
    program = Program(len(lines), (Instruction * len(lines))(*lines))
    is_locked = False
    flags = NEW_LISTENER | SPEC_ALLOW | WAIT_KILLABLE
    while True:
        listener = libc.syscall(ctypes.c_long(calls.seccomp), ctypes.c_ulong(SET_MODE_FILTER), ctypes.c_ulong(flags),
                                ctypes.byref(program))
        if listener >= 0:
            return int(listener)
        number = ctypes.get_errno()
        if number == errno.EACCES and not is_locked:
            libc.prctl(ctypes.c_int(PR_SET_NO_NEW_PRIVS), *(ctypes.c_ulong(word) for word in (1, 0, 0, 0)))
            is_locked = True
        elif number == errno.EINVAL and flags & WAIT_KILLABLE:
            flags &= ~WAIT_KILLABLE
        else:
            raise OSError(number, os.strerror(number))


def main(words: List[str]) -> None:
    control = socket.socket(fileno=int(words[0]))
    control.set_inheritable(False)
    command = words[2:]
    try:
        listener = filter_install(CALLS[platform.machine()])
    except (OSError, KeyError) as error:
        sys.exit(f"shoal job: FastFile: the kernel takes no filter: {error}")
    socket.send_fds(control, [b"listener"], [listener])
    os.close(listener)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"shoal job: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
