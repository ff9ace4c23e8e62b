#!/usr/bin/env python3
"""The programs in Python of docs/quick-start.md, as they are written there."""
import os
import pathlib
import re
import tempfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[2]
# An installed package registers itself with torch; here it is not installed.
START = "import runpy, sys; 'torch' in open(sys.argv[1]).read() and __import__('shoal.torch'); runpy.run_path(sys.argv[1], run_name='__main__')"
LOSS_AT_FIRST = 4  # on average: the sum of four squares of normal numbers


def trains(interpreter, marker):
    """Runs the program that has the marker on two workers."""
    python = TOP / "build" / interpreter / "bin/python3"
    if not python.exists():
        raise Skip(f"there is no {python}: `make test` makes it")
    text = (TOP / "docs/quick-start.md").read_text()
    program = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if marker in block)
    with tempfile.TemporaryDirectory(prefix="shoal-quick-") as folder:
        script = pathlib.Path(folder, "train.py")
        script.write_text(program)
        code, out, err = call(os.environ["SHOAL_COMMAND"], "run", "-n", "2", python, "-c", START, script, timeout=300)
    losses = re.findall(r"rank (\d) of 2: loss ([\d.]+)", out)
    expect(code == 0 and sorted(rank for rank, _ in losses) == ["0", "1"], out, err)
    expect(all(float(loss) < LOSS_AT_FIRST for _, loss in losses), losses)


def the_program_of_pytorch_trains():
    trains("torch", "import torch.distributed")


def the_program_of_tensorflow_trains():
    trains("tensorflow", "import tensorflow")


if __name__ == "__main__":
    run_cases([the_program_of_pytorch_trains, the_program_of_tensorflow_trains])
