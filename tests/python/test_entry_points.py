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


def torch_sagemaker_is_found():
    """By the entry point of the package smdistributed. The one in python/ is for a checkout; both are the same."""
    wanted = "[torch.backends]\nsmdistributed = smdistributed.modelparallel:extend_torch\n"
    expect((TOP / "python/shoal_smddp.dist-info/entry_points.txt").read_text() == wanted)
    text = (TOP / "python/smdistributed/pyproject.toml").read_text()
    expect('[project.entry-points."torch.backends"]\nsmdistributed = "smdistributed.modelparallel:extend_torch"\n' in text, text)
    has_autoload()
    for program in ("import torch.sagemaker as tsm; print(tsm.__name__)", "from torch.sagemaker import transform as t; print(t.__module__[:15])",
                    "from torch.sagemaker.utils.process_group_utils import get_global_ranks as g; print(g.__module__[:15])",
                    "import torch, importlib.util as i; print(i.find_spec('torch.sagemaker').name)"):
        code, out, err = python(program)
        expect((code, out) == (0, "torch.sagemaker\n"), program, out, err)


def all_packages_are_installed():
    """The list in the package's pyproject.toml names every folder with modules."""
    top = TOP / "python/smdistributed"
    listed = re.findall(r'^    "(smdistributed\.[\w.]+)",$', (top / "pyproject.toml").read_text(), re.MULTILINE)
    found = sorted(".".join(path.parent.relative_to(top.parent).parts) for path in top.rglob("__init__.py"))
    expect(sorted(listed) == found, set(found) ^ set(listed))


def torch_sagemaker_without_autoload():
    program = "import torch; from smdistributed.modelparallel import extend_torch; extend_torch(); extend_torch(); " \
              "print(len(torch.__path__)); import torch.sagemaker"
    code, out, err = python(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    expect((code, out) == (0, "2\n"), out, err)
    code, out, err = python("import torch.sagemaker", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    expect(code and "No module named 'torch.sagemaker'" in err, out, err)


def other_modules_of_torch_stay():
    """Only the name sagemaker is added, and a torch.sagemaker that is there already stays."""
    has_autoload()
    code, out, err = python("import os, torch; print(len(torch.__path__), os.listdir(torch.__path__[-1]))")
    expect(code == 0 and out in ("2 ['sagemaker']\n",), out, err)
    code, out, err = python("import torch.no_such_module")
    expect(code and "No module named 'torch.no_such_module'" in err, out, err)
    (ROOT / "vendor/sagemaker").mkdir(parents=True)
    (ROOT / "vendor/sagemaker/__init__.py").write_text("whose = 'the vendor'\n")
    there = f"import torch; torch.__path__.insert(1, {str(ROOT / 'vendor')!r}); import torch.sagemaker as t; print(t.whose)"
    code, out, err = python(there)
    expect((code, out) == (0, "the vendor\n"), out, err)


try:
    run_cases([import_of_torch_is_enough, import_of_shoal_first_is_as_well, import_without_autoload_registers,
               import_of_torch_prints_nothing_and_needs_no_libshoal, torch_sagemaker_is_found, all_packages_are_installed,
               torch_sagemaker_without_autoload, other_modules_of_torch_stay])
finally:
    shutil.rmtree(ROOT, ignore_errors=True)
