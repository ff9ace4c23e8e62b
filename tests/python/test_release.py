#!/usr/bin/env python3
"""What a release is made of: the version; the checks of a wheel (dev/wheel_check.py), with wheels that are wrong in one way
each; and the wheels of `make wheels` if they are there, which are checked and tried in chroots of Debian 11."""
import base64
import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(TOP / "dev"))

import version  # noqa: E402
import wheel_bill  # noqa: E402
import wheel_check  # noqa: E402
import wheel_run  # noqa: E402
import wheel_shims  # noqa: E402
import wheel_try  # noqa: E402

MACHINE = os.uname().machine
NAME = f"shoal-1.2.3-py3-none-manylinux_2_28_{MACHINE}.whl"
INFO = "shoal-1.2.3.dist-info"
TRY_S = 600
PLAIN = 'const char *shoal_nothing(void) { return "libpmix.so.2"; }'


# ---- The version -----------------------------------------------------------------------------------------------------------

def versions_agree():
    expect(version.differences() == [], version.differences())
    import_it = "import shoal; print(shoal.__version__)"
    code, out, err = call(sys.executable, "-c", import_it, env={**os.environ, "PYTHONPATH": str(TOP / "python")})
    expect(code == 0 and out.strip() == version.current(), out, err)


def one_command_writes_another_version():
    with tempfile.TemporaryDirectory() as folder:
        top = pathlib.Path(folder)
        for name in {place[0] for place in (version.SOURCE, *version.REPEATED, version.CHANGELOG)}:
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, top / name)
        version.write("12.34.56", top)
        expect(version.current(top) == "12.34.56")
        left = version.differences(top)
        expect([name for name, _, _ in left] == ["CHANGELOG.md"] and "begin the notes of 12.34.56" in left[0][2], left)
        expect("#define SHOAL_VERSION_MINOR 34\n" in (top / "include/shoal/shoal.h").read_text())


def bundle_is_what_pyproject_requires():
    pinned = set(re.findall(r"^(\S+==\S+) ", (TOP / "dev/wheel_bundle.txt").read_text(), re.M))
    required = set(re.findall(r'"(\S+==[\d.]+);', (TOP / "pyproject.toml").read_text()))
    expect(pinned == required, pinned, required)
    expect({name.partition("==")[0] for name in pinned} == {component.origin for component in wheel_bill.COMPONENTS}, pinned)


# ---- The checks ------------------------------------------------------------------------------------------------------------

def library(code, *words):
    """Returns a library or program as bytes."""
    compiler = shutil.which("cc")
    if not compiler or not shutil.which("readelf"):
        raise Skip("no C compiler, or no readelf")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "made.so")
        done = subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", path, *words], input=code, text=True,
                              capture_output=True)
        expect(done.returncode == 0, done.stderr)
        return path.read_bytes()


def good_files():
    """Returns the files of a wheel without fault, by name, without RECORD."""
    empty = library(PLAIN, "-nostdlib")
    files = {name: b"" if name.endswith((".py", ".h")) else empty for name in wheel_check.REQUIRED}
    files[f"{INFO}/WHEEL"] = f"Wheel-Version: 1.0\nTag: py3-none-manylinux_2_28_{MACHINE}\n".encode()
    files[f"{INFO}/licenses/everything.txt"] = b"as you like"
    return files


def with_bill(files):
    """Adds a bill of materials that has each library as it is."""
    listed = [{"name": name, "hashes": [{"content": hashlib.sha256(content).hexdigest()}]} for name, content in files.items()
              if content.startswith(b"\x7fELF")]
    everything = {"name": "everything", "version": "1", "licenses": [1], "externalReferences": [1], "components": listed}
    return {**files, f"{INFO}/sboms/shoal.cdx.json": json.dumps({"components": [everything]}).encode()}


def with_record(files):
    """Adds a RECORD that is right."""
    rows = [f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()},{len(content)}"
            for name, content in files.items()]
    return {**files, f"{INFO}/RECORD": "\n".join([*rows, f"{INFO}/RECORD,,"]).encode()}


def problems_of(files, name=NAME):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, name)
        with zipfile.ZipFile(path, "w") as archive:
            for file, content in files.items():
                archive.writestr(file, content)
        return wheel_check.problems_of(path)


def problems_with(changed):
    """Returns the problems of a good wheel in which some files are replaced; None removes one. Bill and RECORD fit."""
    files = {name: content for name, content in {**good_files(), **changed}.items() if content is not None}
    return problems_of(with_record(with_bill(files)))


def expect_problem(problems, *words):
    expect(len(problems) == 1 and all(word in problems[0] for word in words), words, *problems)


def wheel_without_fault_passes():
    expect(problems_with({}) == [], problems_with({}))


def names_and_tags_are_checked():
    files = with_record(with_bill(good_files()))
    expect_problem(problems_of(files, "shoal-1.2.3-cp311-cp311-linux_x86_64.whl"), "its name is not shoal-VERSION")
    other = {**good_files(), f"{INFO}/WHEEL": b"Tag: py3-none-any\n"}
    expect_problem(problems_of(with_record(with_bill(other))), "names the tags", "py3-none-any")


def missing_file_is_named():
    expect_problem(problems_with({"shoal/include/shoal/shoal.h": None}), "shoal/include/shoal/shoal.h is missing")


def record_is_compared_with_the_files():
    files = with_record(with_bill(good_files()))
    expect_problem(problems_of({**files, "shoal/__init__.py": b"other"}),
                   "RECORD has another digest or size for shoal/__init__.py")
    expect_problem(problems_of({**files, "shoal/late.py": b""}), "RECORD and the wheel disagree about shoal/late.py")


def newer_glibc_is_named():
    """pthread_create has a version of 2.34 on a machine with that glibc or a newer one."""
    start = "#include <pthread.h>\nint f(pthread_t *t, void *(*g)(void *)) { return pthread_create(t, 0, g, 0); }"
    newer = library(f"{PLAIN}\n{start}")
    if not any(needed > (2, 28) for needed in wheel_check.read_elf(newer)["GLIBC"]):
        raise Skip("this machine's glibc has no symbol that is newer than 2.28 here")
    expect_problem(problems_with({"shoal/lib/libshoal.so.0": newer}), "libshoal.so.0 needs GLIBC_2.", "glibc 2.28 lacks")


def libraries_of_the_machine_are_named():
    with tempfile.TemporaryDirectory() as folder:
        for name in ("libelse.so.1", "libibverbs.so.1"):
            pathlib.Path(folder, name).write_bytes(library(PLAIN, "-nostdlib", f"-Wl,-soname,{name}"))
        def needing(name):
            return library(PLAIN, "-nostdlib", "-Wl,--no-as-needed", f"-L{folder}", f"-l:{name}")
        expect_problem(problems_with({"shoal/lib/libsodium.so": needing("libelse.so.1")}), "libsodium.so needs libelse.so.1")
        expect_problem(problems_with({"shoal/lib/libfabric.so.1": needing("libibverbs.so.1")}), "needs libibverbs.so.1")
        expect(problems_with({"shoal/lib/libfabric/libverbs-fi.so": needing("libibverbs.so.1")}) == [])


def libraries_of_torch_serve_its_shims_only():
    shim = f"shoal/torch/compiled/shoal_torch-2.13.0-0123456789abcdef.cpython-311-{MACHINE}-linux-gnu.so"
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "libc10.so").write_bytes(library(PLAIN, "-nostdlib", "-Wl,-soname,libc10.so"))
        needing = library(PLAIN, "-nostdlib", "-Wl,--no-as-needed", f"-L{folder}", "-l:libc10.so")
    expect(problems_with({shim: needing}) == [], problems_with({shim: needing}))
    expect_problem(problems_with({"shoal/lib/libsodium.so": needing}), "libsodium.so needs libc10.so")


def newer_libraries_of_cxx_are_named():
    with tempfile.TemporaryDirectory() as folder:
        versions, name = pathlib.Path(folder, "versions"), "libstdc++.so.6"
        for version, is_known in (("GLIBCXX_3.4.24", True), ("GLIBCXX_3.4.26", False), ("CXXABI_1.3.12", False)):
            versions.write_text(f"{version} {{ shoal_other; }};")
            made = library("void shoal_other(void) {}", "-nostdlib", f"-Wl,-soname,{name},--version-script={versions}")
            pathlib.Path(folder, name).write_bytes(made)
            calling = f"{PLAIN}\nvoid shoal_other(void);\nvoid shoal_calling(void) {{ shoal_other(); }}"
            needing = library(calling, "-nostdlib", f"-L{folder}", f"-l:{name}")
            shim = f"shoal/torch/compiled/shoal_torch-2.13.0-01.cpython-311-{MACHINE}-linux-gnu.so"
            problems = problems_with({shim: needing})
            expect(problems == [], problems) if is_known else expect_problem(problems, f"needs {version}, newer than manylinux")


def build_without_pmix_is_named():
    without = library("int shoal_nothing;", "-nostdlib")
    expect_problem(problems_with({"shoal/lib/libshoal.so.0": without}), "libshoal.so.0 was built without PMIx")


def search_paths_are_relative():
    here = library(PLAIN, "-nostdlib", "-Wl,-rpath,$ORIGIN/../lib:/opt/lib")
    expect_problem(problems_with({"shoal/lib/libshoal.so.0": here}), "searches for libraries in /opt/lib")


def processor_is_checked():
    other = next(machine for machine in wheel_check.MACHINES if machine != MACHINE)
    files = good_files()
    files[f"{INFO}/WHEEL"] = f"Tag: py3-none-manylinux_2_28_{other}\n".encode()
    problems = problems_of(with_record(with_bill(files)), f"shoal-1.2.3-py3-none-manylinux_2_28_{other}.whl")
    expect(problems and all(" is for " in problem for problem in problems), problems)


def bill_of_materials_is_checked():
    files = good_files()
    expect_problem(problems_of(with_record(files)), "no bill of materials")
    billed = with_bill(files)
    changed = {**billed, "shoal/lib/libsodium.so": library(PLAIN + "int other;", "-nostdlib")}
    expect_problem(problems_of(with_record(changed)), "the bill of materials has another digest for shoal/lib/libsodium.so")
    more = {**billed, "shoal/lib/libmore.so": files["shoal/lib/libsodium.so"]}
    expect_problem(problems_of(with_record(more)), "the bill of materials does not name shoal/lib/libmore.so")
    unlicensed = {name: content for name, content in billed.items() if "/licenses/" not in name}
    expect_problem(problems_of(with_record(unlicensed)), "has no everything.txt")


# ---- The shims of torch --------------------------------------------------------------------------------------------------

def torch_in(folder, version, exported):
    """Makes a folder of packages with a torch whose one library exports a function."""
    (folder / "torch/lib").mkdir(parents=True)
    text = f"__version__ = '{version}'\ncuda: Optional[str] = None\ngit_version = 'abc'\n"
    (folder / "torch/version.py").write_text(text)
    (folder / f"torch-{version}.dist-info/licenses").mkdir(parents=True)
    (folder / f"torch-{version}.dist-info/licenses/LICENSE").write_text("as you like")
    (folder / "torch/lib/libtorch_cpu.so").write_bytes(library(f"void {exported}(void) {{}}", "-nostdlib"))
    return wheel_shims.read_torch(folder)


def torch_is_its_release_and_commit():
    with tempfile.TemporaryDirectory() as folder:
        torch = torch_in(pathlib.Path(folder), "9.8.7+cu130", "known")
        expect((torch.version, torch.git_version) == ("9.8.7", "abc"), torch)
        expect(wheel_shims.read_torch(pathlib.Path(folder, "elsewhere")) is None)


def torch_without_licences_is_named_and_not_used():
    with tempfile.TemporaryDirectory() as name:
        folder, said = pathlib.Path(name), io.StringIO()
        torch_in(folder, "9.8.7", "known")
        for missing in ("licenses/LICENSE", "licenses", "."):
            path = folder / "torch-9.8.7.dist-info" / missing
            path.unlink() if path.is_file() else path.rmdir()
            with contextlib.redirect_stdout(said):
                expect(wheel_shims.read_torch(folder) is None, missing)
            expect(said.getvalue().startswith(f"torch 9.8.7 in {folder} is not used: ") and said.getvalue().count("\n") == 1, said.getvalue())
            said.truncate(said.seek(0))


def release_that_is_not_at_hand_is_left_out():
    with tempfile.TemporaryDirectory() as folder:
        before, wheel_shims.WANTED = wheel_shims.WANTED, pathlib.Path(folder, "wanted.txt")
        wheel_shims.WANTED.write_text("# none of these exists\ntorch==0.0.77\n")
        try:
            expect(wheel_shims.find_torches(pathlib.Path(folder), "false") == [])
        finally:
            wheel_shims.WANTED = before


def symbols_that_torch_lacks_are_named():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        torch, libshoal, made = torch_in(folder, "9.8.7", "known"), folder / "libshoal.so", folder / "shim.so"
        libshoal.write_bytes(library("void shoal_known(void) {}", "-nostdlib"))
        calls = "void known(void), shoal_known(void), PyNone(void); void f(void) { known(); shoal_known(); PyNone(); }"
        made.write_bytes(library(calls, "-nostdlib"))
        wheel_shims.check_symbols(made, torch, libshoal)
        made.write_bytes(library("void unknown(void); void f(void) { unknown(); }", "-nostdlib"))
        try:
            wheel_shims.check_symbols(made, torch, libshoal)
        except wheel_run.Failed as reason:
            expect("shim.so needs symbols that torch 9.8.7 lacks: unknown" in str(reason), reason)
        else:
            expect(False, "a symbol that nothing has was not named")


# ---- The wheels of this checkout -------------------------------------------------------------------------------------------

def made_wheels():
    found = sorted((TOP / "build/wheels").glob(f"shoal-{version.current()}-*.whl"))
    if not found:
        raise Skip("there are no wheels of this version at build/wheels: `make wheels` makes them")
    return found


def wheels_pass_the_checks():
    for wheel in made_wheels():
        expect(wheel_check.problems_of(wheel) == [], wheel, *wheel_check.problems_of(wheel))


def wheels_work_on_an_older_debian():
    for wheel in made_wheels():
        code, out, err = call(sys.executable, TOP / "dev/wheels.py", "--try", wheel, timeout=TRY_S)
        if code == 3:
            raise Skip(err.strip())
        expect(code == 0 and "two ranks sum, on one host and on two" in out, code, out, err)


FIRST_GROUP = """
import torch, torch.distributed as dist
import shoal.torch as shoal
dist.init_process_group("shoal")
values = torch.full((5,), 1.0 + dist.get_rank())
dist.all_reduce(values)
print(shoal.shim(), values.tolist(), shoal._compile._loaded and shoal._compile._loaded.__file__)
dist.destroy_process_group()
"""


def wheel_serves_the_first_group_without_a_compiler():
    """With the torch of build/torch, and with nothing on PATH."""
    python = TOP / "build/torch/bin/python3"
    wheel = next((wheel for wheel in made_wheels() if MACHINE in wheel.name), None)
    if not wheel or not python.exists():
        raise Skip(f"there is no wheel for {MACHINE}, or no PyTorch at build/torch")
    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder, "package")
        shutil.unpack_archive(wheel, here, "zip")
        for program in (here / "shoal/bin").iterdir():
            program.chmod(0o755)
        env = {"HOME": folder, "PATH": folder, "PYTHONPATH": str(here), "SHOAL_TORCH_CACHE": f"{folder}/cache"}
        code, out, err = call(here / "shoal/bin/shoal", "run", "-n", "2", python, "-c", FIRST_GROUP, env=env)
        expect(code == 0 and out.count(f"c++ [3.0, 3.0, 3.0, 3.0, 3.0] {here}/shoal/torch/compiled/") == 2, out, err)
        expect("compiling" not in err and not pathlib.Path(folder, "cache").exists(), err)


def image_comes_from_debian_alone():
    """The recipe itself: no test has a program that builds images. Packages come from apt, and the rest from this checkout."""
    text = (TOP / "Containerfile").read_text()
    lines = re.sub(r"\\\n|^#.*\n", "", text, flags=re.M).splitlines()
    expect(re.search(r"^ARG BASE=debian:\d+-slim$", text, re.M) and [line.split()[1] for line in lines if line.startswith("FROM ")] == ["${BASE}"] * 2, lines)
    expect(not re.search(r"\b(pip|curl|wget|git)\b|https?:", "\n".join(lines)), lines)
    copied = [line.split()[-2] for line in lines if line.startswith("COPY ")]
    expect(copied == [".", "/image", "LICENSE"] and (TOP / "LICENSE").exists(), copied)
    options = set(re.findall(r"-D(\w+)=", text))
    known = set(re.findall(r"^option\('(\w+)'", (TOP / "meson_options.txt").read_text(), re.M))
    expect(options <= known | {"werror"}, "options of the build that do not exist", options - known)


def what_is_missing_for_a_try_is_named():
    try:
        wheel_try.require("no-such-program-of-shoal")
    except wheel_try.Impossible as reason:
        expect("dev/deps.sh chroots" in str(reason), reason)
    else:
        expect(False, "a program that does not exist was found")


run_cases([versions_agree, one_command_writes_another_version, bundle_is_what_pyproject_requires, wheel_without_fault_passes,
           names_and_tags_are_checked, missing_file_is_named, record_is_compared_with_the_files, newer_glibc_is_named,
           libraries_of_the_machine_are_named,
           libraries_of_torch_serve_its_shims_only, newer_libraries_of_cxx_are_named, build_without_pmix_is_named, search_paths_are_relative, processor_is_checked,
           bill_of_materials_is_checked, torch_is_its_release_and_commit, torch_without_licences_is_named_and_not_used, release_that_is_not_at_hand_is_left_out,
           symbols_that_torch_lacks_are_named, image_comes_from_debian_alone, what_is_missing_for_a_try_is_named, wheels_pass_the_checks,
           wheel_serves_the_first_group_without_a_compiler, wheels_work_on_an_older_debian])
