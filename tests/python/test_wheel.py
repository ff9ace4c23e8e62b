#!/usr/bin/env python3
"""The results of `pip install .`: an sdist of the tracked files, the wheel built from it, installed without PyTorch and
used as a user would. A machine without libfabric and libsodium is a chroot with the wheel and the C library."""
import os
import pathlib
import re
import shutil
import sys
import tempfile
import zipfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[2]
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-wheel-"))
MAKER = ROOT / "maker/bin/python3"  # has pip, and meson-python for the sdist
USER = ROOT / "user/bin/python3"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "PYTHON", "LD_"))}
BUILD_TIMEOUT_S = 700
UNREACHABLE = ("Could not find a version that satisfies", "No matching distribution", "Failed to establish a new connection")

SOURCES = {".py", ".cpp", ".h", ".css"}
PACKAGE = {"bin/shoal", "lib/libshoal.so.0", "lib/libshoal_tensorflow.so",
           *(f"include/shoal/{path.name}" for path in (TOP / "include/shoal").glob("*.h")),
           *(str(path.relative_to(TOP / "python/shoal")) for path in (TOP / "python/shoal").rglob("*")
             if path.suffix in SOURCES and path.parent.name != "operations")}
BUNDLED = {"lib/libfabric.so.1", "lib/libfabric/libefa-fi.so", "lib/libfabric/libverbs-fi.so", "lib/libsodium.so",
           "licenses/libfabric.txt", "licenses/libsodium.txt"}
MACHINES = ("x86_64", "aarch64")  # there are libraries to bundle for these

ALL_REDUCE = """
import ctypes, shoal
library = ctypes.CDLL(str(shoal.library_path()))
context, comm = ctypes.c_void_p(), ctypes.c_void_p()
assert library.shoal_context_create(None, ctypes.byref(context)) == 0
assert library.shoal_comm_create(context, None, ctypes.byref(comm)) == 0
FLOAT32, SUM = 0, 0
values = (ctypes.c_float * 3)(*([1.0 + library.shoal_comm_rank(comm)] * 3))
assert library.shoal_allreduce(comm, values, values, ctypes.c_size_t(3), FLOAT32, SUM, None) == 0
print("sum", list(values))
assert library.shoal_comm_finalize(comm) == 0
library.shoal_comm_free(comm)
library.shoal_context_destroy(context)
"""


# Imports nothing of Shoal: torch finds the back-end by its entry point.
TRAINING = """
import sys, torch, torch.distributed as dist
torch.manual_seed(1)
dist.init_process_group("shoal")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(2)
x = torch.randn(12, 20)
y = x[:, :3].clone()
mine = slice(dist.get_rank(), None, dist.get_world_size())
for step in range(50):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
    optimizer.step()
weight = model.module.weight.double()
print(sys.modules["shoal.torch"].shim(), f"{torch.nn.functional.mse_loss(model(x), y):.4f} {weight.square().sum():.4f}")
"""


def pip(*words):
    code, out, err = call(MAKER, "-m", "pip", *words, env=CLEAN, timeout=BUILD_TIMEOUT_S)
    for line in (out + err).splitlines():
        if any(told in line for told in UNREACHABLE):
            raise Skip(f"pip cannot get what the build needs: {line.strip()}")
    expect(code == 0, out, err)


def tracked_tree():
    """Makes a repository of the tracked files, and of those that `git add .` would track. Ignored files are not needed."""
    code, out, err = call("git", "-C", TOP, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if code:
        raise Skip(f"this is no checkout: {err.strip()}")
    for name in set(out.split("\0")) - {""}:
        if (TOP / name).is_file():
            (ROOT / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, ROOT / "tree" / name)
    person = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*person, "commit", "-q", "-m", "all"]):
        code, out, err = call("git", "-C", ROOT / "tree", *words)
        expect(code == 0, words, out, err)
    return ROOT / "tree"


def the_one(folder, pattern):
    found = list((ROOT / folder).glob(pattern))
    if not found:
        raise Skip(f"there is no {pattern}: see what failed before")
    expect(len(found) == 1, found)
    return found[0]


def package():
    return the_one("user", "lib/python*/site-packages/shoal")


def command(*words):
    the_one("user", "lib/python*/site-packages/shoal")
    return call(USER.parent / "shoal", *words, env=CLEAN)


def sdist_is_made_of_what_is_tracked():
    code, out, err = call(sys.executable, "-m", "venv", ROOT / "maker", env=CLEAN, timeout=BUILD_TIMEOUT_S)
    if code:
        raise Skip(f"python3 cannot make a virtual environment: {(out + err).strip()}")
    tree = tracked_tree()
    requires = re.search(r"^requires = \[(.*?)\n\]", (tree / "pyproject.toml").read_text(), re.S | re.M).group(1)
    makers = [name for name in re.findall(r'"(.*?)"', requires) if name.startswith(("meson", "ninja"))]
    expect(len(makers) == 3, requires)
    pip("install", "--quiet", *makers)
    env = {**CLEAN, "PATH": f"{MAKER.parent}:{CLEAN['PATH']}"}
    (ROOT / "sdist").mkdir()
    code, out, err = call(MAKER, "-c", f"import mesonpy; mesonpy.build_sdist({str(ROOT / 'sdist')!r})", cwd=tree, env=env,
                          timeout=BUILD_TIMEOUT_S)
    expect(code == 0, out, err)
    the_one("sdist", "shoal-*.tar.gz")


def wheel_is_built_from_the_sdist():
    """Built without optimization, because this test looks at the wheel's contents; compiling then takes a fifth of the time."""
    quick = [f"--config-settings=setup-args={option}" for option in ("-Doptimization=0", "-Dkernels=baseline")]
    pip("wheel", "--no-deps", *quick, "-w", ROOT / "wheels", the_one("sdist", "shoal-*.tar.gz"))
    the_one("wheels", "shoal-*.whl")


def wheel_holds_what_it_should_and_nothing_else():
    wanted = PACKAGE | (BUNDLED if os.uname().machine in MACHINES else set())
    names = zipfile.ZipFile(the_one("wheels", "*.whl")).namelist()
    held = {name.partition("/")[2] for name in names if name.startswith("shoal/")}
    expect(held == wanted, "in one only:", sorted(held ^ wanted))
    others = [name for name in names if not name.startswith(("shoal/", f"shoal-{version()}.dist-info/"))]
    expect(not others, others)


def version():
    return re.search(r"^  version: '(.*?)'", (TOP / "meson.build").read_text(), re.M).group(1)


def wheel_names_no_folder_of_the_machine_that_built_it():
    wheel = zipfile.ZipFile(the_one("wheels", "*.whl"))
    for name in names_of_own(wheel):
        for folder in (str(ROOT), str(TOP), tempfile.gettempdir(), str(pathlib.Path.home())):
            expect(folder.encode() + b"/" not in wheel.read(name), name, "names", folder)


def names_of_own(wheel):
    return [name for name in wheel.namelist() if name.partition("/")[2] in PACKAGE and not name.endswith((".py", ".cpp"))]


def wheel_installs_without_anything_else():
    wheel = the_one("wheels", "*.whl")
    code, out, err = call(sys.executable, "-m", "venv", "--without-pip", ROOT / "user", env=CLEAN)
    expect(code == 0, out, err)
    pip("--python", USER, "install", "--quiet", "--no-index", wheel)


def package_says_where_things_are():
    here = package()
    code, out, err = call(USER, "-c", "import os, shoal as s; print(s.__version__, s.library_path(), s.include_path(), "
                          "s.command_path()); os.environ['SHOAL_LIBRARY'] = '/other'; print(s.library_path())", env=CLEAN)
    wanted = [version(), f"{here}/lib/libshoal.so.0", f"{here}/include", f"{here}/bin/shoal", "/other"]
    expect(code == 0 and out.split() == wanted, out, err)


def torch_finds_the_backend_by_entry_point():
    package()
    code, out, err = call(USER, "-c", "import importlib.metadata as m; print([(e.group, e.name, e.value) for e in "
                          "m.distribution('shoal').entry_points if e.group.startswith('torch')])", env=CLEAN)
    expect(code == 0 and eval(out) == [("torch.backends", "shoal", "shoal._entry_point:register"),
                                       ("torch.distributed.backends", "shoal", "shoal._entry_point:register")], out, err)


def command_runs():
    expect(command("--version") == (0, f"shoal {version()}\n", ""), command("--version"))
    code, out, err = command("info")
    expect(code == 0 and not err, out, err)
    module = call(USER, "-m", "shoal", "--version", env=CLEAN)
    expect(module[1] == f"shoal {version()}\n", module)


def workers_in_python_sum():
    code, out, err = command("run", "-n", "2", USER, "-c", ALL_REDUCE)
    expect(code == 0 and out.count("sum [3.0, 3.0, 3.0]") == 2, out, err)


def add_torch():
    """Makes the PyTorch of `make test` visible to the user's Python, as if it were installed there."""
    found = list((TOP / "build/torch").glob("lib/python*/site-packages/torch/__init__.py"))
    if not found:
        raise Skip("there is no PyTorch at build/torch: `make test-all` installs it")
    the_one("user", "lib/python*/site-packages").joinpath("torch.pth").write_text(f"{found[0].parents[1]}\n")


def quick_compiler():
    """Returns a C++ compiler that does not optimize; "" if there is none. Prefers clang, which takes two thirds of the
    time; other tests compile the shim with the machine's own compiler."""
    found = shutil.which("clang++") or shutil.which("c++")
    if not found:
        return ""
    (ROOT / "quick-c++").write_text(f'#!/bin/sh\nexec "{found}" "$@" -O0\n')
    (ROOT / "quick-c++").chmod(0o755)
    return str(ROOT / "quick-c++")


def torch_trains_over_what_is_installed():
    """Two workers train as one, over either shim. The C++ shim is compiled, which is logged once."""
    package()
    add_torch()
    results, compiler = {}, quick_compiler()
    for workers, shim in (("1", "auto"), ("2", "auto"), ("2", "python")):
        env = {**CLEAN, "SHOAL_TORCH_SHIM": shim, "SHOAL_TORCH_CACHE": str(ROOT / "shims"), "OMP_NUM_THREADS": "1", "CXX": compiler}
        code, out, err = call(USER.parent / "shoal", "run", "-n", workers, USER, "-c", TRAINING, env=env, timeout=BUILD_TIMEOUT_S)
        expect(code == 0, out, err)
        results[workers, shim] = [line.split("| ")[-1].split(" ", 1) for line in out.splitlines()]
    served = {name for lines in results.values() for name, _ in lines}
    expect(served == ({"c++", "python"} if compiler else {"python"}), results)
    expect([len(lines) for lines in results.values()] == [1, 2, 2], results)
    expect(len({numbers for lines in results.values() for _, numbers in lines}) == 1, results)


def libraries_of(program):
    """Returns the loader and the libraries that it finds for a program or a library."""
    code, out, err = call("ldd", program)
    expect(code == 0, out, err)
    return {pathlib.Path(path) for path in re.findall(r"(/\S+) \(0x", out)}


def bare_machine():
    """Returns a folder with the wheel's package, the C library, and nothing else."""
    bare, here = ROOT / "bare", package()
    if bare.exists():
        return bare
    shutil.copytree(here, bare / "shoal")
    (bare / "proc").mkdir()  # the loader finds a program's folder there
    for path in set().union(*(libraries_of(here / name) for name in ("bin/shoal", "lib/libfabric.so.1", "lib/libsodium.so"))):
        if not path.is_relative_to(here):
            (bare / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, bare / path.relative_to("/"))
    return bare


def call_bare(*words):
    if os.uname().machine not in MACHINES:
        raise Skip("for this processor there is nothing to carry")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    enter = 'mount --rbind /proc "$0/proc" && exec chroot "$0" /shoal/bin/shoal "$@"'
    code, out, err = call("unshare", "--mount", *user, "sh", "-c", enter, bare_machine(), *words, env=CLEAN)
    if code and err.startswith(("unshare:", "mount:", "chroot:")):
        raise Skip(f"no chroot here: {err.strip()}")
    return code, out, err


def bundled_libfabric_serves_where_there_is_none():
    code, out, err = call_bare("info", "--providers")
    expect(re.search(r"^libfabric \S+ \(/shoal/.*lib/libfabric.so.1\)$", out, re.M), code, out, err)
    expect(re.search(r"^\* tcp ", out, re.M), out, err)


def without_the_bundled_libfabric_it_is_missed():
    bare = bare_machine()
    hidden = bare / "shoal/lib/hidden"
    (bare / "shoal/lib/libfabric.so.1").rename(hidden)
    try:
        code, out, err = call_bare("info", "--providers")
        expect(code != 0 and "next to libshoal" in out + err, code, out, err)
    finally:
        hidden.rename(bare / "shoal/lib/libfabric.so.1")


def bundled_libsodium_serves_where_there_is_none():
    bare = bare_machine()
    code, out, err = call_bare("doctor")
    expect("libsodium is not installed" not in out and "secret" in out, out, err)
    (bare / "shoal/lib/libsodium.so").unlink()
    code, out, err = call_bare("doctor")
    expect("libsodium is not installed" in out, out, err)


def machines_libfabric_goes_first():
    code, out, err = command("info", "--providers")
    machine = call("sh", "-c", "ldconfig -p | grep -o '/.*/libfabric.so.1$'")[1].split()
    if not machine:
        raise Skip("this machine has no libfabric")
    expect(str(package()) not in out, out, err)
    named = {**CLEAN, "SHOAL_LIBFABRIC": f"{package()}/lib/libfabric.so.1"}
    bundled = call(USER.parent / "shoal", "info", "--providers", env=named)
    expect(f"({package()}/lib/libfabric.so.1)" in bundled[1], bundled)


try:
    run_cases([sdist_is_made_of_what_is_tracked, wheel_is_built_from_the_sdist, wheel_holds_what_it_should_and_nothing_else,
               wheel_names_no_folder_of_the_machine_that_built_it, wheel_installs_without_anything_else,
               package_says_where_things_are, torch_finds_the_backend_by_entry_point, command_runs, workers_in_python_sum,
               torch_trains_over_what_is_installed,
               bundled_libfabric_serves_where_there_is_none, without_the_bundled_libfabric_it_is_missed,
               bundled_libsodium_serves_where_there_is_none, machines_libfabric_goes_first])
finally:
    shutil.rmtree(ROOT, ignore_errors=True)
