"""The command `smddprun`, which SageMaker's launcher puts between mpirun and the script on every rank:

    mpirun --host algo-1:8,algo-2:8 ... smddprun python -m mpi4py train.py --epochs 3

It sets torchrun's variables for this rank, and replaces itself with the script."""
from __future__ import annotations

import os
import sys

from smdistributed.dataparallel import _environment

USAGE = "usage: mpirun ... smddprun PROGRAM [ARGUMENT ...]"
# What a shell returns if a program is missing, cannot be executed, or is used wrongly.
NOT_FOUND, NOT_EXECUTABLE, WRONG_USE = 127, 126, 2


def fail(text: str, code: int) -> int:
    print(f"smddprun: {text}", file=sys.stderr)
    return code


def main() -> int:
    words = sys.argv[1:]
    if words and words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not words or words[0].startswith("-"):
        return fail(f"no program is named; {USAGE}", WRONG_USE)
    _environment.complete()
    if not _environment.started_as_job():
        return fail("nothing says which rank this is (OMPI_COMM_WORLD_RANK and _SIZE, or RANK and WORLD_SIZE); start it with "
                    "mpirun of Open MPI, or the script without it with `shoal run -n 2 python3 ...`", WRONG_USE)
    try:
        os.execvp(words[0], words)
    except FileNotFoundError:
        return fail(f"there is no program '{words[0]}'", NOT_FOUND)
    except OSError as error:
        return fail(f"'{words[0]}' cannot be started: {error.strerror}", NOT_EXECUTABLE)


if __name__ == "__main__":
    sys.exit(main())
