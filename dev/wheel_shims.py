"""Compiles the C++ shims of torch that a wheel carries, so that the first group of a job does not wait for a compiler.
dev/wheels.py calls it.

A shim fits one release of torch and one version of Python, because pybind11 reads Python's structures. It fits all builds of the
release, for CPUs and for CUDA: their headers differ in nothing that it uses. dev/wheel_torch.txt names the releases. The
compiler is ziglang's, as for the rest of the wheel, with the headers of this machine's libstdc++, which torch also uses. What
is not at hand here is left out of the wheel, with a line that says so, and compiled on the user's machine as before."""
import collections
import concurrent.futures
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import zipfile

from interpreter import find_python
from wheel_run import Failed, run

TOP = pathlib.Path(__file__).resolve().parent.parent
WANTED = TOP / "dev/wheel_torch.txt"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PLACE = "shoal/torch/compiled"
# A torch whose headers are here: its release, its commit, the folder with include and lib, the licences of the headers.
Torch = collections.namedtuple("Torch", "version git_version folder licences")
# A Python whose headers are here, in `folder`.
Python = collections.namedtuple("Python", "version exact folder")
# libstdc++: the folders of its headers, the release of gcc that it belongs to, its files.
Library = collections.namedtuple("Library", "folders release files")
# What a wheel carries: the files, and what they were compiled with.
Shims = collections.namedtuple("Shims", "files torches pythons library")
LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1")
NONE = Shims([], [], [], None)

# The headers of a newer libstdc++ use functions of glibc 2.30 and 2.32, and the newer version of a function that did not change
# for its callers. All would keep a shim from systems that the wheel serves.
SINGLE_THREADED = "static constexpr char __libc_single_threaded = 0;\n"
OLDER_SYSTEMS = r"""
#include <bits/c++config.h>
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
"""


def load_shim_file(source):
    """Returns the module _shim_file of a source tree."""
    spec = importlib.util.spec_from_file_location("_shim_file", source / "python/shoal/torch/_shim_file.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- What is at hand -------------------------------------------------------------------------------------------------------

def find_torches(cache, python):
    """Returns the wanted releases that build/torch has or that pip can download, and prints which are not at hand."""
    found = []
    for version in re.findall(r"^torch==(\S+)", WANTED.read_text(), re.M):
        torch = installed(version) or downloaded(version, cache, python)
        if torch:
            found.append(torch)
    return found


def installed(version):
    for site in sorted(TOP.glob("build/torch/lib/python3*/site-packages")):
        torch = read_torch(site)
        if torch and torch.version == version:
            return torch
    return None


def downloaded(version, cache, python):
    folder = cache / version
    if not (folder / "torch").exists():
        print(f"fetching torch {version} for its headers: about 500 MB", flush=True)
        try:
            run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", "3.11",
                "--dest", cache / "files", f"torch=={version}", env={**os.environ, "PIP_CONSTRAINT": os.devnull})
        except Failed as reason:
            print(f"torch {version} is not at hand, so the wheel carries no shim for it: {str(reason).strip().splitlines()[0]}")
            return None
        unpack(next((cache / "files").glob(f"torch-{version}[-+]*.whl")), folder)
    return read_torch(folder)


def unpack(wheel, folder):
    """Writes what a shim is compiled and linked with. The rest is a gigabyte."""
    half = folder.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        wanted = re.compile(r"torch/(include/|version\.py$|lib/lib(torch|torch_cpu|torch_python|c10)\.so$)|[^/]*\.dist-info/licenses/")
        archive.extractall(half, [name for name in archive.namelist() if wanted.match(name)])
    half.rename(folder)
    wheel.unlink()


def read_torch(site):
    """Returns the torch of a folder of packages, or None. One without licences is not used, because a wheel must carry those of the
    headers that its shims were compiled with; a line says so."""
    try:
        text = (site / "torch/version.py").read_text()
    except FileNotFoundError:
        return None
    facts = dict(re.findall(r"^(\w+)(?:: [^=]*)? = '(.*)'$", text, re.M))
    version = facts["__version__"].partition("+")[0]
    licence = next(site.glob("torch-*.dist-info/licenses/LICENSE"), None)
    if not licence:
        print(f"torch {version} in {site} is not used: it has no torch-*.dist-info/licenses/LICENSE, which a wheel with its shim must carry")
        return None
    return Torch(version, facts["git_version"], site / "torch", (licence, *sorted(licence.parent.glob("third_party/pybind11/LICENSE*"))))


def find_pythons():
    found = []
    for version in PYTHONS:
        interpreter = find_python(version)
        ask = "import sys, sysconfig; print(sysconfig.get_path('include'), sys.version.split()[0])"
        told = subprocess.run([interpreter, "-c", ask], capture_output=True, text=True).stdout.split() if interpreter else []
        if told and pathlib.Path(told[0], "Python.h").exists():
            found.append(Python(version, told[1], pathlib.Path(told[0])))
        else:
            print(f"the headers of Python {version} are not at hand, so the wheel carries no shim for it")
    return found


def find_library(machine):
    """Returns the C++ library of a processor, or None."""
    tops = [pathlib.Path(f"/usr/{machine}-linux-gnu")]
    if machine == os.uname().machine:
        tops.insert(0, pathlib.Path("/usr"))
    for top in tops:
        shared = [path for path in (top / f"lib/{machine}-linux-gnu", top / "lib64", top / "lib") if (path / LIBRARIES[0]).exists()]
        for common in sorted(top.glob("include/c++/*"), key=lambda path: path.name.zfill(4), reverse=True):
            for own in (top / f"include/{machine}-linux-gnu/c++" / common.name, common / f"{machine}-linux-gnu"):
                if shared and (own / "bits/c++config.h").exists():
                    return Library((common, own), common.name, [shared[0] / name for name in LIBRARIES])
    print(f"libstdc++ for {machine} is not at hand (Debian: g++-{machine.replace('_', '-')}-linux-gnu), so the wheel carries no "
          "shims")
    return None


# ---- Compiling -------------------------------------------------------------------------------------------------------------

def add(one, content, cache, python, environment):
    """Compiles the shims of one wheel into its unpacked content and returns them. `one` has the machine and its folder, which
    holds the sources; `environment` is that of the wheel's compiler."""
    library, torches, pythons = find_library(one.machine), find_torches(cache, python), find_pythons()
    if not library or not torches or not pythons:
        return NONE
    shim_file, folder = load_shim_file(one.folder / "source"), one.folder / "shims"
    write_own_headers(folder, pythons)
    libraries = {torch: torch.folder / "lib" if one.machine == os.uname().machine else
                 make_stubs(folder / "stubs" / torch.version, torch, one, python, environment) for torch in torches}
    (content / PLACE).mkdir()

    def compile_one(torch, headers):
        inputs = shim_file.fingerprint(one.folder / "source/include/shoal/shoal.h", torch.git_version, True, "", False)
        suffix = f".cpython-{headers.version.replace('.', '')}-{one.machine}-linux-gnu.so"
        made = content / PLACE / shim_file.name_of(torch.version, inputs, suffix)
        run(python, *command(one, shim_file, torch, headers, library, libraries[torch], content), "-o", made, env=environment)
        check_symbols(made, torch, content / "shoal/lib/libshoal.so.0")
        return f"{PLACE}/{made.name}"

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = [pool.submit(compile_one, torch, headers) for torch in torches for headers in pythons]
        return Shims([one.result() for one in compiled], torches, pythons, library)


def write_own_headers(folder, pythons):
    """Writes the header that glibc 2.28 lacks, and what every shim includes first. Links the folder in which Debian has a Python's
    pyconfig.h, under the name of either processor: both have the same types."""
    (folder / "include/sys").mkdir(parents=True)
    (folder / "include/sys/single_threaded.h").write_text(SINGLE_THREADED)
    (folder / "older_systems.h").write_text(OLDER_SYSTEMS)
    for one in pythons:
        config = one.folder.parent / (sysconfig.get_config_var("MULTIARCH") or "none") / one.folder.name
        if config.is_dir():
            for machine in ("x86_64", "aarch64"):
                link = folder / f"include/{machine}-linux-gnu" / one.folder.name
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(config)


LABEL = ".globl {0}\n{0}:\n".format


def make_stubs(folder, torch, one, python, environment):
    """Makes libraries with the names of torch's and of their symbols, for a processor that the torch at hand is not for. They
    also have the functions of a newer libstdc++ that torch brings along, so a shim takes these from torch on every system."""
    folder.mkdir(parents=True)
    for name in load_shim_file(one.folder / "source").TORCH_LIBRARIES:
        original, text = torch.folder / f"lib/lib{name}.so", folder / f"{name}.s"
        names = {symbol for symbol in symbols(original, "--defined-only") if "@" not in symbol}
        of_threads = names & thread_locals(original)
        text.write_text("".join([*map(LABEL, sorted(names - of_threads)), '.section .tbss,"awT",@nobits\n',
                                 *map(LABEL, sorted(of_threads)), ".zero 8\n"]))
        run(python, "-m", "ziglang", "cc", "-target", f"{one.machine}-linux-gnu.2.28", "-shared", "-nostdlib", text,
            f"-Wl,-soname,lib{name}.so", "-o", folder / f"lib{name}.so", env=environment)
    return folder


def command(one, shim_file, torch, headers, library, of_torch, content):
    """Returns the words for Python that run the compiler, without the name of the result."""
    include = torch.folder / "include"
    source = one.folder / "source"
    own = one.folder / "shims"
    system = (include, include / "torch/csrc/api/include", headers.folder, source / "include")
    names = ((include, "torch"), (headers.folder, "python"), (source, "shoal"), (library.folders[0], "c++"))
    return ["-m", "ziglang", "c++", "-target", f"{one.machine}-linux-gnu.2.28", "-nostdinc++", "-nostdlib++",
            *(f"-I{folder}" for folder in (own / "include", *library.folders)), *(f"-isystem{folder}" for folder in system),
            "-include", own / "older_systems.h", *shim_file.FLAGS, "-D_GLIBCXX_USE_CXX11_ABI=1", "-g0", "-w",
            "-fno-sanitize=undefined", *(f"-ffile-prefix-map={folder}={name}" for folder, name in names),
            source / "python/shoal/torch/backend/module.cpp", content / "shoal/lib/libshoal.so.0",
            f"-L{of_torch}", *(f"-l{library}" for library in shim_file.TORCH_LIBRARIES),
            *library.files, "-Wl,--strip-debug", "-Wl,-z,undefs"]  # Python's own symbols are in no library


def check_symbols(made, torch, libshoal):
    """Raises Failed if a shim needs a symbol that neither torch nor libshoal has. Torch's symbols have the same names on each
    processor. Those of libc and libstdc++ have versions, which dev/wheel_check.py looks at; Python's begin with its name."""
    needed = {name for name in symbols(made, "--undefined-only") if "@" not in name and not re.match("_?Py", name)}
    missing = needed - symbols_of_torch(torch.folder) - symbols(libshoal, "--defined-only")
    if missing:
        raise Failed(f"{made.name} needs symbols that torch {torch.version} lacks: {', '.join(sorted(missing)[:5])}")


@functools.cache
def symbols_of_torch(folder):
    libraries = sorted(folder.glob("lib/lib*.so"))
    return set().union(*(symbols(path, "--defined-only") for path in libraries))


def symbols(path, which):
    """Returns the names in a library's dynamic table, without the weak ones that it can do without."""
    rows = (line.split() for line in run("nm", "--dynamic", "--with-symbol-versions", which, path).splitlines())
    return {row[-1] for row in rows if which == "--defined-only" or row[-2] == "U"}


def thread_locals(path):
    """Returns the names of the variables in a library's dynamic table that each thread has its own of."""
    return set(re.findall(r" TLS .* (\S+)$", run("readelf", "--wide", "--dyn-syms", path), re.M))
