#!/usr/bin/env python3
"""Torch finds the backend by the entry points of pyproject.toml, whichever is imported first. Without libshoal torch still
works."""
import os
import pathlib
import re
import shutil
import sys
import tempfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[2]
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-entry-"))
SHOW = "import torch.distributed as d; print('shoal' in d.Backend.backend_list)"


def entry_points():
    """Returns the entry points that an installed wheel has, made from the groups of pyproject.toml."""
    text = (TOP / "pyproject.toml").read_text()
    groups = re.findall(r'^\[project\.entry-points\."(.*?)"\]\n(\w+) = "(.*?)"', text, re.M)
    expect(len(groups) == 2, text)
    return "".join(f"[{group}]\n{name} = {value}\n\n" for group, name, value in groups)


def python(program, **env):
    folder = ROOT / "shoal-0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: shoal\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(entry_points())
    path = f"{ROOT}:{os.environ['PYTHONPATH']}"
    return call(sys.executable, "-c", program, env={**os.environ, "PYTHONPATH": path, **env}, timeout=120)


def has_autoload():
    code, out, err = python("import torch; print(hasattr(torch, '_import_device_backends'))")
    if out == "False\n":
        raise Skip("torch looks for backends from 2.5 on")


def import_of_torch_is_enough():
    has_autoload()
    code, out, err = python(SHOW)
    expect((code, out) == (0, "True\n"), out, err)


def import_of_shoal_first_is_as_well():
    code, out, err = python(f"import shoal.torch; {SHOW}")
    expect((code, out) == (0, "True\n"), out, err)


def import_without_autoload_registers():
    code, out, err = python(SHOW, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    expect(code == 0, out, err)
    code, out, err = python(f"import shoal.torch; {SHOW}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    expect((code, out) == (0, "True\n"), out, err)


def import_of_torch_prints_nothing_and_needs_no_libshoal():
    code, out, err = python("import torch", SHOAL_LIBRARY="/no/such/libshoal.so", PATH="/nowhere")
    expect((code, out, err) == (0, "", ""), out, err)


try:
    run_cases([import_of_torch_is_enough, import_of_shoal_first_is_as_well, import_without_autoload_registers,
               import_of_torch_prints_nothing_and_needs_no_libshoal])
finally:
    shutil.rmtree(ROOT, ignore_errors=True)
