"""Installs a wheel in a chroot of Debian 11 and uses it there. dev/wheels.py calls it.

Debian 11 is the oldest Debian on its mirrors: glibc 2.31, Python 3.9. mmdebstrap unpacks its packages without running them, so
a chroot for aarch64 takes seconds; qemu runs its programs. Each try has its own namespaces for users, mounts, processes and
the network: it changes nothing of this machine, and leaves nothing running. For another processor that needs Linux 6.7."""
import os
import pathlib
import re
import shutil
import subprocess

RELEASE = "bullseye"
MIRROR = os.environ.get("SHOAL_DEBIAN_MIRROR", "http://deb.debian.org/debian")
PACKAGES = "python3,python3-pip"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
CHROOT_TIMEOUT_S = 600
TRY_TIMEOUT_S = 300

# The kernel recognizes programs by these bytes of their header, and runs them with qemu, in this user namespace only.
MAGIC = {
    "aarch64": r":shoal:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
               r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff",
    "x86_64": r":shoal:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x3e\x00"
              r":\xff\xff\xff\xff\xff\xfe\xfe\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff",
}
# Arguments: the chroot, the line for binfmt_misc or "", the command. An overlay takes what the command writes.
ENTER = r"""
set -eu
root=$1 foreign=$2
shift 2
if [ -n "$foreign" ]; then
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    printf '%s' "$foreign" >/proc/sys/fs/binfmt_misc/register
fi
ip link set lo up
mount -t tmpfs tmpfs "$root.work"
mkdir "$root.work/upper" "$root.work/work" "$root.work/all"
mount -t overlay overlay -o "lowerdir=$root,upperdir=$root.work/upper,workdir=$root.work/work" "$root.work/all"
root=$root.work/all
mkdir -p "$root/proc" "$root/sys" "$root/dev" "$root/tmp"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
cp "$WHEEL" "$TRIED" "$root/tmp"
exec env -i HOME=/root LC_ALL=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin "$(command -v chroot)" "$root" "$@"
"""
# Runs in the chroot, with nothing but Python and pip. Two ranks of one host sum through Python. Two hosts (by SHOAL_HOST_ID)
# sum over the wheel's libfabric with a secret, which libsodium checks.
TRIED = r"""
import os, pathlib, platform, subprocess, sys

os.environ["SHOAL_NIC"] = "lo"  # there is no other interface
BENCH = ["shoal", "bench", "allreduce", "--check", "--max", "256K", "--iterations", "5"]

ALL_REDUCE = '''
import ctypes, shoal
library = ctypes.CDLL(str(shoal.library_path()))
context, comm = ctypes.c_void_p(), ctypes.c_void_p()
assert library.shoal_context_create(None, ctypes.byref(context)) == 0
assert library.shoal_comm_create(context, None, ctypes.byref(comm)) == 0
values = (ctypes.c_float * 3)(*([1.0 + library.shoal_comm_rank(comm)] * 3))
assert library.shoal_allreduce(comm, values, values, ctypes.c_size_t(3), 0, 0, None) == 0
print("sum", list(values), flush=True)
assert library.shoal_comm_finalize(comm) == 0
'''


def call(*words):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit code {done.returncode} from {' '.join(words)}")
    return done.stdout


def expect(is_right, *shown):
    if not is_right:
        sys.exit("not as expected: " + "\n".join(map(str, shown)))


def sum_between_hosts():
    run = ["shoal", "run", "--hosts", "2", "--meet", "127.0.0.1:29500", "-n", "1", "--timeout", "100"]
    hosts = []
    for host in range(2):
        environment = {**os.environ, "SHOAL_SECRET": 32 * "5", "SHOAL_HOST_ID": f"host{host}"}
        hosts.append(subprocess.Popen([*run, "--host-index", str(host), *BENCH], stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True, env=environment))
    printed = "\n".join(host.communicate(timeout=120)[0] for host in hosts)
    expect(not any(host.returncode for host in hosts) and "2 ranks on 2 hosts" in printed, printed)


print(platform.machine(), "Python", platform.python_version(), os.confstr("CS_GNU_LIBC_VERSION"))
wheel, = pathlib.Path("/tmp").glob("shoal-*.whl")
call(sys.executable, "-m", "pip", "install", "--no-index", str(wheel))
print(call("shoal", "--version").strip())
providers = call("shoal", "info", "--providers")
expect("dist-packages/shoal" in providers and "\n* tcp " in providers, providers)
doctor = call("shoal", "doctor")
expect("libsodium is not here" not in doctor, doctor)
flags = set(pathlib.Path("/proc/cpuinfo").read_text().split()) if platform.machine() == "x86_64" else set()
expect(not {"avx2", "f16c"} <= flags or "reductions run with avx" in doctor, doctor)
printed = call("shoal", "run", "-n", "2", sys.executable, "-c", ALL_REDUCE)
expect(printed.count("sum [3.0, 3.0, 3.0]") == 2, printed)
call(*BENCH, "-n", "2")
sum_between_hosts()
print("two ranks sum, on one host and on two")
"""


class Impossible(Exception):
    """This machine cannot make or enter the chroot; the text says what it lacks."""


class Wrong(Exception):
    """The wheel does not work there; the text is what the chroot printed."""


def install_and_sum(wheel, folder):
    """Raises Wrong unless the wheel can be installed and used on Debian 11. `folder` keeps the chroots for the next time."""
    machine = re.search(r"(x86_64|aarch64)\.whl$", str(wheel))[1]
    require("unshare", "ip", "mmdebstrap")
    root = make_chroot(machine, folder.resolve())
    (folder / "tried.py").write_text(TRIED)
    command = [*namespaces(), "sh", "-c", ENTER, "sh", root, foreign(machine), "python3", "/tmp/tried.py"]
    files = {"WHEEL": str(pathlib.Path(wheel).resolve()), "TRIED": str(folder.resolve() / "tried.py")}
    try:
        done = subprocess.run(command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=TRY_TIMEOUT_S, env={**os.environ, **files})
    except subprocess.TimeoutExpired as late:
        raise Wrong(f"{wheel} on Debian 11: not done after {TRY_TIMEOUT_S} s: {late.stdout or ''}") from None
    if done.returncode:
        reason = f"{wheel} on Debian 11: exit code {done.returncode}: {done.stdout.strip()}"
        raise Impossible(reason) if is_refusal(done.stdout) else Wrong(reason)
    print("".join(f"  {line}\n" for line in done.stdout.splitlines()), end="")


def require(*programs):
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in programs if not shutil.which(program, path=path)]
    if missing:
        raise Impossible(f"there is no {', '.join(missing)} here; `dev/deps.sh chroots` installs what is needed on Debian")


def namespaces():
    """Returns the words that begin a try. --kill-child ends all its processes with this one."""
    return ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--net", "--uts"]


def is_refusal(text):
    """Returns true if the kernel refused namespaces or a mount before the wheel was used."""
    return re.match(r"(unshare|mount|ip|chroot): |RTNETLINK|sh: .*register", text) is not None


def foreign(machine):
    """Returns the line for the kernel that makes qemu run the machine's programs; "" if this machine runs them itself."""
    if os.uname().machine == machine:
        return ""
    qemu = f"qemu-{machine}-static"
    require(qemu)
    return f"{MAGIC[machine]}:{shutil.which(qemu)}:F"


def make_chroot(machine, folder):
    root = folder / f"{RELEASE}-{machine}"
    if not root.exists():
        folder.mkdir(parents=True, exist_ok=True)
        half = folder / f"{root.name}.half"
        shutil.rmtree(half, ignore_errors=True)
        done = subprocess.run(["mmdebstrap", "--quiet", "--variant=extract", f"--architectures={ARCHITECTURES[machine]}",
                               f"--include={PACKAGES}", RELEASE, half, MIRROR],
                              capture_output=True, text=True, timeout=CHROOT_TIMEOUT_S)
        if done.returncode:
            raise Impossible(f"mmdebstrap cannot make a chroot of {RELEASE} from {MIRROR}: {done.stderr.strip()[-600:]}")
        half.rename(root)
    (folder / f"{root.name}.work").mkdir(exist_ok=True)
    return root
