#!/usr/bin/env python3
"""The notebooks of examples/notebooks, executed as Jupyter does: each cell in a kernel, in a folder of its own. Their cells
check their own results."""
import json
import os
import pathlib
import sys
import tempfile

import nbclient
import nbformat
from tap import Skip, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[2]
BOOKS = TOP / "examples/notebooks"
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")
CELL_S = 300  # a cell trains for at most 20 s on a quiet machine


def kernel_environment(folder):
    """Returns an environment with the packages and the command of this checkout. All that a kernel writes is in the folder."""
    packages = [str(TOP / "python"), str(TOP / "python/smdistributed")]
    command = pathlib.Path(os.environ["SHOAL_COMMAND"])
    return {**os.environ, "SHOAL_CHECKOUT": str(TOP), "SHOAL_JOBS": f"{folder}/jobs", "SHOAL_PYTHON": sys.executable,
            "PYTHONPATH": ":".join(packages), "PATH": f"{command.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": f"{folder}/ipython", "JUPYTER_CONFIG_DIR": f"{folder}/config"}


def text_of(cell):
    """Returns what a cell has printed."""
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def execute(name):
    """Runs all cells of a notebook. Returns the text that each cell of code has printed."""
    book = nbformat.read(BOOKS / name, as_version=4)
    with tempfile.TemporaryDirectory(prefix="shoal-notebook-") as folder:
        work = pathlib.Path(folder, "work")
        work.mkdir()
        client = nbclient.NotebookClient(book, timeout=CELL_S, startup_timeout=CELL_S, kernel_name="python3",
                                         resources={"metadata": {"path": str(work)}})
        try:
            client.execute(env=kernel_environment(folder))
        except nbclient.exceptions.CellExecutionError as error:
            shown = "\n".join(text_of(cell) for cell in book.cells if cell.cell_type == "code")
            raise AssertionError(f"{error}\n--- the cells have printed\n{shown[-6000:]}") from None
    return [text_of(cell) for cell in book.cells if cell.cell_type == "code"]


def the_estimator_trains_and_answers():
    if not DATA.is_dir():
        raise Skip(f"there is no {DATA}: dev/deps.sh demo")
    printed = "\n".join(execute("estimator.ipynb"))
    expect("images are right" in printed and "ModelError" in printed and "FileNotFoundError" in printed, printed[-3000:])


def pytorch_trains_by_hand():
    printed = "\n".join(execute("pytorch_by_hand.ipynb"))
    expect("rank 1 of 2, step 150" in printed and "loss with two workers" in printed, printed[-3000:])


def notebooks_are_kept_without_outputs():
    """Outputs of one machine would change with each run."""
    books = sorted(BOOKS.glob("*.ipynb"))
    expect(len(books) == 2, books)
    for path in books:
        book = json.loads(path.read_text())
        nbformat.validate(book)
        code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
        expect(code and not any(cell["outputs"] or cell["execution_count"] for cell in code), path)


run_cases([notebooks_are_kept_without_outputs, pytorch_trains_by_hand, the_estimator_trains_and_answers])
