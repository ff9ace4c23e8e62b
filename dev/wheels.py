#!/usr/bin/env python3
"""Makes the wheels of a release in build/wheels, checks them, and tries them on an older Debian. `make wheels` runs it.

  dev/wheels.py                     both wheels of the commit HEAD, checked, and SHA256SUMS
  dev/wheels.py --machine aarch64   only that processor (x86_64, aarch64)
  dev/wheels.py --commit v0.1.0     another commit
  dev/wheels.py --twice             builds each wheel a second time in another folder, and compares the bytes
  dev/wheels.py --try               also installs them in a chroot of Debian 11 and sums between two ranks there
  dev/wheels.py --check FILE ...    only checks these wheels
  dev/wheels.py --try FILE ...      only checks and tries these wheels

A wheel serves every Python from 3.9 on, and every Linux with glibc 2.28 or newer (manylinux_2_28). The compiler is ziglang's
from PyPI, which has the symbols of each glibc, so this machine's own is as good as any. The wheel holds what the commit holds:
changes that are not committed are left out. The same commit makes the same bytes (SOURCE_DATE_EPOCH is the commit's time;
dev/venv/wheel-tools.txt and dev/wheel_bundle.txt name exact versions), if the machine has the same headers of PMIx, libstdc++,
Python and torch, which the bill of materials names. docs/releasing.md says what is in a wheel and why.

Exit code 1: a wheel is wrong. 2: it could not be made. 3: it could not be tried here; the reason is printed."""
import argparse
import collections
import hashlib
import os
import pathlib
import re
import shutil
import sys
import tempfile

import wheel_bill
import wheel_check
import wheel_shims
import wheel_try
from wheel_run import Failed, run

TOP = pathlib.Path(__file__).resolve().parent.parent
OUT = TOP / "build/wheels"
TOOLS = TOP / "build/wheel-tools"  # made from dev/venv/wheel-tools.txt
PYTHON = TOOLS / "bin/python3"
MACHINES = ("x86_64", "aarch64")
NEW_ENOUGH = "312"  # pyzmq has one wheel for all Pythons from 3.12 on; its libsodium is the same for all

# An unoptimized build by this compiler traps undefined behavior. Meson's buildtype is "release", and the flag says it again.
# Debug information would name folders, and is larger than the program.
CROSS_FILE = """
[binaries]
c = ['{python}', '-m', 'ziglang', 'cc', '-target', '{machine}-linux-gnu.2.28']
ar = ['{python}', '-m', 'ziglang', 'ar']
strip = 'true'
pkgconfig = 'pkg-config'
python = '{python}'
python3 = '{python}'
[built-in options]
c_args = ['-fno-sanitize=undefined', '-g0']
c_link_args = ['-Wl,--strip-debug', '-Wl,--gc-sections']
b_pie = true
pkg_config_path = '{packages}'
[host_machine]
system = 'linux'
cpu_family = '{machine}'
cpu = '{machine}'
endian = 'little'
"""


# One wheel. `epoch`: the time of the commit. `folder`: everything of this build.
One = collections.namedtuple("One", "machine commit epoch folder")


def git(*words):
    return run("git", "-C", TOP, *words).strip()


def fetch_bundle(machine):
    """Returns a folder with the unpacked wheels that libfabric and libsodium come from. pip checks their hashes."""
    folder = OUT / "bundle" / machine
    wanted = TOP / "dev/wheel_bundle.txt"
    stamp = folder / hashlib.sha256(wanted.read_bytes()).hexdigest()[:16]
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(PYTHON, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes",
            "--platform", f"manylinux_2_28_{machine}", "--implementation", "cp", "--python-version", NEW_ENOUGH,
            "--dest", folder / "files", "--requirement", wanted)
        for file in sorted((folder / "files").glob("*.whl")):
            shutil.unpack_archive(file, folder / "unpacked", "zip")
        stamp.touch()
    return folder


def export(commit, folder):
    """Writes the files of a commit."""
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".tar")
    git("archive", "--output", archive, commit)
    shutil.unpack_archive(archive, folder)
    archive.unlink()


def write_pmix(folder):
    """Writes a pkg-config file for PMIx's header, which serves both processors. The library is loaded at run time, and only on
    machines that have it. Returns the header's version."""
    try:
        flags, version = (run("pkg-config", option, "pmix").strip() for option in ("--cflags", "--modversion"))
    except Failed as reason:
        raise Failed(f"there is no header of PMIx here; `dev/deps.sh wheels` installs it on Debian: {reason}") from None
    folder.mkdir()
    (folder / "pmix.pc").write_text(f"Name: pmix\nDescription: header\nVersion: {version}\nCflags: {flags}\n")
    return version


def environment_of(one):
    """Returns the variables of a build: nothing that this shell has set, such as CFLAGS, changes the bytes."""
    inherited = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
    return {**inherited, "LC_ALL": "C.UTF-8", "PATH": f"{TOOLS / 'bin'}:/usr/bin:/bin", "SOURCE_DATE_EPOCH": str(one.epoch),
            "ZIG_GLOBAL_CACHE_DIR": str(OUT / "zig"), "ZIG_LOCAL_CACHE_DIR": str(one.folder / "zig"),
            "_PYTHON_HOST_PLATFORM": f"linux-{one.machine}"}


def compile_wheel(one, bundle):
    """Returns the wheel that meson-python makes. Its libraries come from the bundle: python/bundled.py finds them there."""
    cross = one.folder / "cross.ini"
    cross.write_text(CROSS_FILE.format(python=PYTHON, machine=one.machine, packages=one.folder / "packages"))
    run(PYTHON, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir",
        f"--config-settings=setup-args=--cross-file={cross}",
        f"--config-settings=compile-args=-j{len(os.sched_getaffinity(0))}",
        "--wheel-dir", one.folder / "compiled", one.folder / "source",
        env={**environment_of(one), "PYTHONPATH": str(bundle / "unpacked")})
    return next((one.folder / "compiled").glob("shoal-*.whl"))


def finish_wheel(one, compiled, bundle, pmix):
    """Returns the finished wheel: with its tag, the shims of torch, the licences and the bill of materials."""
    run(PYTHON, "-m", "wheel", "unpack", "--dest", one.folder / "unpacked", compiled)
    content = next((one.folder / "unpacked").iterdir())
    info = next(content.glob("*.dist-info"))
    tags = re.sub(r"^Tag: .*$", f"Tag: py3-none-manylinux_2_28_{one.machine}", (info / "WHEEL").read_text(), flags=re.M)
    (info / "WHEEL").write_text(tags)
    shims = wheel_shims.add(one, content, OUT / "torch", PYTHON, environment_of(one))
    wheel_bill.add(content, one, bundle, TOOLS, {"pmix": pmix}, shims)
    for path in content.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.read_bytes()[:4] == b"\x7fELF" else 0o644)
    (one.folder / "packed").mkdir()
    run(PYTHON, "-m", "wheel", "pack", "--dest-dir", one.folder / "packed", content, env=environment_of(one))
    return next((one.folder / "packed").glob("*.whl"))


def build(machine, commit, folder):
    """Returns the path of the machine's wheel, made from a commit in a folder that does not exist yet."""
    one = One(machine, commit, int(git("log", "-1", "--format=%ct", commit)), folder)
    bundle = fetch_bundle(machine)
    export(commit, folder / "source")
    pmix = write_pmix(folder / "packages")
    return finish_wheel(one, compile_wheel(one, bundle), bundle, pmix)


def build_again(machine, commit, first):
    """Raises Failed unless a second build, in another folder and with another umask, makes the same bytes as the first."""
    before = os.umask(0o077)
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-wheel-again-") as folder:
            second = build(machine, commit, pathlib.Path(folder) / "elsewhere")
            if second.read_bytes() != first.read_bytes():
                kept = shutil.copy(second, first.with_suffix(".whl.second"))
                raise Failed(f"two builds differ: {first} and {kept}; unpack both and compare, or use diffoscope")
    finally:
        os.umask(before)
    print(f"{first.name}: a second build made the same bytes")


def make(machine, commit, is_twice):
    with tempfile.TemporaryDirectory(prefix="shoal-wheel-") as folder:
        built = build(machine, commit, pathlib.Path(folder) / "build")
        OUT.mkdir(parents=True, exist_ok=True)
        wheel = OUT / built.name
        shutil.copyfile(built, wheel)
    print(f"{wheel.name}: made from {commit[:12]}, {wheel.stat().st_size / 1e6:.1f} MB")
    if is_twice:
        build_again(machine, commit, wheel)
    return wheel


def write_sums():
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(OUT.glob("*.whl"))]
    (OUT / "SHA256SUMS").write_text("".join(lines))


def check(wheels):
    """Returns false if a wheel is wrong, after printing what is."""
    is_right = True
    for wheel in wheels:
        problems = wheel_check.problems_of(wheel) + (wheel_check.problems_by_others(wheel, PYTHON) if PYTHON.exists() else [])
        for problem in problems:
            print(f"{wheel.name}: {problem}", file=sys.stderr)
        if not problems:
            print(f"{wheel.name}: checked")
        is_right &= not problems
    return is_right


def make_all(options):
    if not PYTHON.exists():
        raise Failed(f"there is no {PYTHON.relative_to(TOP)}: `make wheels` makes it")
    commit = git("rev-parse", "--verify", f"{options.commit}^{{commit}}")
    if git("status", "--porcelain"):
        print(f"what is not committed is left out: the wheels are made from {commit[:12]}", file=sys.stderr)
    for old in OUT.glob("*.whl*"):
        old.unlink()
    wheels = [make(machine, commit, options.twice) for machine in options.machine or MACHINES]
    write_sums()
    return wheels


def arguments():
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", action="append", choices=MACHINES, help="only this processor; may be given twice")
    parser.add_argument("--commit", default="HEAD", help="what to build; HEAD by default")
    parser.add_argument("--twice", action="store_true", help="build a second time and compare")
    parser.add_argument("--check", action="store_true", help="check the named wheels and build nothing")
    parser.add_argument("--try", action="store_true", dest="is_tried", help="try the wheels in chroots of Debian 11")
    parser.add_argument("wheels", nargs="*", type=pathlib.Path, metavar="FILE", help="wheels to check or try")
    options = parser.parse_args()
    if bool(options.wheels) != options.check and not (options.wheels and options.is_tried):
        parser.error("name wheels with --check or --try" if options.wheels else "--check needs the wheels to check")
    return options


def main():
    options = arguments()
    wheels = options.wheels or make_all(options)
    if not check(wheels):
        return 1
    if options.is_tried:
        for wheel in wheels:
            wheel_try.install_and_sum(wheel, OUT / "chroots")
            print(f"{wheel.name}: installed and tried on Debian 11 (glibc 2.31)")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except wheel_try.Impossible as reason:
        print(f"wheels.py: not tried: {reason}", file=sys.stderr)
        sys.exit(3)
    except (Failed, wheel_bill.Unknown, wheel_try.Wrong) as reason:
        print(f"wheels.py: {reason}", file=sys.stderr)
        sys.exit(1 if isinstance(reason, wheel_try.Wrong) else 2)
