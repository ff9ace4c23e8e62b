#!/usr/bin/env python3
"""`shoal doctor`: each kind of finding, provoked; and hosts that answer, fail, hang, print garbage or have another version.

SHOAL_TEST_RESOLVER names a library that resolves host names, SHOAL_TEST_FABRIC a libfabric that imitates other machines."""
import ctypes
import json
import os
import pathlib
import platform
import re
import resource
import shlex
import socket
import struct
import subprocess
import tempfile
import time

from tap import Skip, call, expect, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
RESOLVER = os.environ["SHOAL_TEST_RESOLVER"]
FABRIC = os.environ.pop("SHOAL_TEST_FABRIC", "")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE", "PMI_FD",
             "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_GTIDS")
LOCAL = {"MASTER_ADDR": "127.0.0.1"}  # every machine has an interface for this address


def environment(more):
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS and not name.startswith("SHOAL_")}
    return {**kept, **more}


def doctor(*words, prepare=None, prefix=(), **more):
    """Returns (exit code, findings)."""
    done = subprocess.run([*prefix, SHOAL, "doctor", "--json", *words], env=environment(more), capture_output=True, text=True,
                          timeout=60, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    expect(done.returncode in (0, 1) and not done.stderr, done.returncode, done.stdout, done.stderr)
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    expect(done.returncode == any(finding["level"] == "error" for finding in findings), done.returncode, done.stdout)
    return done.returncode, findings


def has(findings, level, subject, text, advice=""):
    return any((one["level"], one["subject"]) == (level, subject) and text in one["found"] and advice in one["advice"]
               for one in findings)


def told(level, subject, text, *words, advice="", **more):
    """Expects such a finding, and advice if the finding is bad."""
    _, findings = doctor(*words, **more)
    expect(has(findings, level, subject, text, advice), (level, subject, text, advice), *findings)
    expect(all(one["advice"] for one in findings if one["level"] in ("warning", "error")), *findings)
    return findings


def names(mapping, ms=0):
    """Returns an environment in which host names resolve according to the mapping."""
    return {"LD_PRELOAD": RESOLVER, "MOCK_NAMES": ",".join(f"{name}={to}" for name, to in mapping.items()),
            "MOCK_RESOLVER_MS": str(ms), "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}


HANG_S = 45  # how long a server hangs; a check that ends long before has not waited for it, however busy the machine


def ended_before(seconds, began):
    took = time.monotonic() - began
    expect(took < seconds, f"it took {took:.1f} s, not less than {seconds}")


def hosts_in(*lines):
    file = tempfile.NamedTemporaryFile("w", suffix=".hosts")
    file.write("\n".join(lines) + "\n")
    file.flush()
    return file


# ---- One host --------------------------------------------------------------------------------------------------------------

def a_table_begins_with_the_version_and_ends_with_the_sum():
    code, out, err = call(SHOAL, "doctor", env=environment(LOCAL))
    lines = out.splitlines()
    expect(code == 0 and not err and lines[0].startswith("ok       version        Shoal "), code, out, err)
    expect(lines[-1] == "nothing wrong was found" and max(map(len, lines)) <= 128, out)
    code, out, err = call(SHOAL, "doctor", env=environment({**LOCAL, "SHOAL_DEPTH": "99", "SHOAL_DEPHT": "4"}))
    expect(code == 1 and out.endswith("\n1 error, 1 warning\n"), code, out, err)
    expect("\nerror    settings       SHOAL_DEPTH is 99, but may be 1 to 16\n                     -> set it" in out, out)


def every_wrong_setting_is_told():
    findings = told("error", "settings", "SHOAL_DEPTH is 99", SHOAL_DEPTH="99", SHOAL_STORES="ice", SHOAL_PORTS="9-1",
                    SHOAL_ALGORITHMS="reduce=none", SHOAL_WARN_S="1", SHOAL_ZEBRA_CROSSING="1", **LOCAL)
    expect(has(findings, "error", "settings", 'SHOAL_STORES is "ice"') and has(findings, "error", "settings", "SHOAL_PORTS"),
           *findings)
    expect(has(findings, "warning", "settings", "SHOAL_WARN_S is not", "SHOAL_WARN_MS"), *findings)
    expect(has(findings, "note", "settings", "SHOAL_ZEBRA_CROSSING"), *findings)
    expect(sum(one["subject"] == "settings" and one["level"] == "error" for one in findings) == 4, *findings)


def kernels_that_the_processor_lacks_are_told():
    if platform.machine() != "x86_64" or "avx512" in call(SHOAL, "info", "--topology")[1]:
        raise Skip("this processor has all that may be named")
    told("error", "processor", "SHOAL_KERNELS", SHOAL_KERNELS="avx512")


def variables_of_launchers_are_checked():
    told("error", "job", "RANK is set, but WORLD_SIZE is not", RANK="1")
    told("error", "job", "RANK is not below", RANK="3", WORLD_SIZE="3", MASTER_PORT="29500", **LOCAL)
    told("error", "job", "MASTER_ADDR is not set", RANK="0", WORLD_SIZE="2", MASTER_PORT="29500")
    told("error", "job", "MASTER_PORT is not set", RANK="0", WORLD_SIZE="2", **LOCAL)
    told("error", "job", 'MASTER_PORT is "high"', MASTER_PORT="high", **LOCAL)
    told("ok", "job", "started through RANK and WORLD_SIZE, 2 ranks", RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
         MASTER_PORT="29500", **LOCAL)
    told("ok", "job", "started through srun, 2 ranks", SLURM_PROCID="3", SLURM_STEP_NUM_TASKS="4", SLURM_GTIDS="2,3")
    told("error", "job", 'SLURM_STEP_NUM_TASKS is "some"', SLURM_PROCID="3", SLURM_STEP_NUM_TASKS="some")
    told("ok", "job", "no launcher started this", SLURM_PROCID="0", SLURM_NTASKS="4")


def libraries_that_cannot_be_loaded_are_told():
    with tempfile.TemporaryDirectory() as folder:
        for name in ("libpmix.so.2", "libsodium.so.23", "libsodium.so"):
            (pathlib.Path(folder) / name).write_text("no library")
        told("error", "job", "libpm" if "libpmix.so" in call("ldconfig", "-p")[1] else "PMIx", LD_LIBRARY_PATH=folder,
             PMIX_NAMESPACE="1")
        told("error", "secret", "libsodium, which proves it, is not installed", LD_LIBRARY_PATH=folder, SHOAL_SECRET="hush")
        told("note", "secret", "libsodium is not installed", LD_LIBRARY_PATH=folder)


def secrets_are_told_and_not_shown():
    told("error", "secret", "SHOAL_SECRET_FILE", SHOAL_SECRET_FILE="/no/such/file")
    told("warning", "secret", "no secret is set", WORLD_SIZE="4", RANK="0", LOCAL_WORLD_SIZE="2", MASTER_PORT="29500", **LOCAL)
    if "libsodium.so" in call("ldconfig", "-p")[1]:
        findings = told("ok", "secret", "is set", SHOAL_SECRET="hush")
        expect("hush" not in str(findings), findings)


def more_ranks_than_cores_are_told():
    told("warning", "cores", "999 ranks share", LOCAL_WORLD_SIZE="999")
    told("warning", "cores", "4096 ranks share", "--ranks", "4096")
    told("warning", "cores", "2 ranks share 1 core:", "--ranks", "2", prepare=lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]))
    told("ok", "cores", "1 of ", "--ranks", "1", prepare=lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]))


def memory_that_does_not_suffice_is_told():
    told("error", "memory", "but only", "--ranks", "4096", SHOAL_DEPTH="16", SHOAL_CHUNK_BYTES="64M")
    told("error", "memory", "SHOAL_MEMORY_LIMIT is 4096 bytes", SHOAL_MEMORY_LIMIT="4K")
    told("warning", "memory", "are left", SHOAL_MEMORY_LIMIT="900000G")


# The kernel's files about the cgroups of a process (cgroups(7)): its line in /proc/self/cgroup, files, and the expected
# finding.
GROUPS = (
    ("0::/job/step\n", {"cpu.stat": "", "job/cpu.stat": "", "job/cpu.max": "100000 50000", "job/step/cpu.stat": "",
                        "job/step/cpu.max": "max 100000"}, "cores", "3 ranks share 2 cores"),
    ("0::/job/step\n", {"cpu.stat": "", "job/cpu.max": "max 100000", "job/step/cpu.max": "30000 50000",
                        "job/step/cpu.stat": ""}, "cores", "3 ranks share 1 core:"),
    ("0::/outside\n", {"cpu.stat": "", "cpu.max": "20000 10000"}, "cores", "3 ranks share 2 cores"),
    ("4:cpuset:/other\n3:cpu,cpuacct:/job\n0::/\n", {"cpu/job/cpu.cfs_quota_us": "40000", "cpu/job/cpu.cfs_period_us": "20000"},
     "cores", "3 ranks share 2 cores"),
    ("0::/job/step\n", {"job/memory.max": "6000000", "job/memory.current": "4000000", "job/memory.stat": "inactive_file 1000",
                        "job/step/memory.max": "max", "job/step/memory.current": "5"}, "memory", "only 1 MiB are left"),
    ("9:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "9000000", "memory/job/memory.usage_in_bytes": "9000000",
                               "memory/job/memory.stat": "total_inactive_file 2500000"}, "memory", "only 2 MiB are left"),
)
BELOW_OTHER_GROUPS = ("unshare", "--mount", "sh", "-c",
                      'mount --bind "$0" /sys/fs/cgroup && mount --bind "$1" /proc/$$/cgroup && shift && exec "$@"')


def limits_of_a_container_are_told():
    """Any of the container's cgroups may have the limits. A private mount replaces the machine's cgroups."""
    for line, files, subject, text in GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            tree, own = pathlib.Path(folder, "tree"), pathlib.Path(folder, "own")
            own.write_text(line)
            for name, content in files.items():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_text(content + "\n")
            prefix = [*BELOW_OTHER_GROUPS, tree, own]
            if call(*prefix, "true")[0]:
                raise Skip("nothing can be mounted here")
            told("warning" if subject == "cores" else "error", subject, text, "--ranks", "3", prefix=prefix)


def limits_of_the_process_are_told():
    told("error", "descriptors", "20 descriptors", prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)))
    told("ok", "locked memory", "0 MiB", prepare=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)), **LOCAL)


def memory_that_a_provider_locks_is_told():
    if not FABRIC:
        raise Skip("the mock of libfabric is not built: that needs libcmocka-dev")
    # Small chunks keep all locked memory below 8 MiB, which a process may lock if it cannot raise its limit.
    aws = {"SHOAL_LIBFABRIC": FABRIC, "SHOAL_MOCK_FABRIC": "aws", "SHOAL_CHUNK_BYTES": "64K", **LOCAL}
    mib = lambda count: lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (count << 20, count << 20))
    findings = told("error", "locked memory", "provider efa locks", prepare=mib(0), **aws)
    locked = int(re.search(r"efa locks (\d+) MiB", str(findings)).group(1))
    window = int(re.search(r"staging buffers of 1 rank take (\d+) MiB", str(findings)).group(1))
    expect(locked > window + 5, locked, window)  # an endpoint's buffers are added
    told("error", "locked memory", f"provider efa locks {locked} MiB", prepare=mib(locked - 1), **aws)
    told("ok", "locked memory", "enough for the provider efa", prepare=mib(locked), **aws)
    findings = told("ok", "libfabric", "efa is chosen, the best one here", **aws)
    expect(has(findings, "ok", "libfabric", "verbs;ofi_rxm is not usable: it finds no device here"), *findings)


def system_calls_that_are_forbidden_are_told():
    """A filter answers EPERM, as a container's may."""
    numbers = {"x86_64": (319, 434, 324), "aarch64": (279, 434, 283)}.get(platform.machine())
    if not numbers:
        raise Skip("the numbers of system calls are not known here")

    def forbid():
        libc = ctypes.CDLL(None, use_errno=True)
        rows = [(0x20, 0, 0, 0)]
        for number in numbers:
            rows += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
        rows.append((0x06, 0, 0, 0x7FFF0000))
        program = b"".join(struct.pack("=HBBI", *row) for row in rows)
        buffer = ctypes.create_string_buffer(program, len(program))
        header = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", len(rows), ctypes.addressof(buffer)))
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, header, 0, 0):
            os._exit(99)

    try:
        findings = told("error", "kernel", "memfd_create is missing", prepare=forbid)
    except AssertionError as error:
        if str(error).startswith("99"):
            raise Skip("no filter of system calls can be set here")
        raise
    expect(has(findings, "note", "kernel", "pidfd_open is missing") and has(findings, "note", "kernel", "membarrier"), *findings)


# ---- Names and ports -------------------------------------------------------------------------------------------------------

def names_that_mean_nothing_are_told():
    told("error", "MASTER_ADDR", 'the host name "no.such.host.invalid" in MASTER_ADDR', MASTER_ADDR="no.such.host.invalid")
    told("error", "towards", '"no.such.host.invalid"', "--towards", "no.such.host.invalid")


def names_that_hide_rank_0_are_told():
    own = socket.gethostname()
    far = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    told("note", "own name", "127.0.1.1", **names({own: "127.0.1.1"}))
    findings = told("error", "MASTER_ADDR", f"{own} resolves to 127.0.1.1", MASTER_ADDR=own, **far, **names({own: "127.0.1.1"}))
    expect(has(findings, "warning", "own name", "127.0.1.1"), *findings)
    told("ok", "MASTER_ADDR", "reachable only by its own ranks", MASTER_ADDR=own, **names({own: "127.0.1.1"}))
    findings = told("error", "towards", f"{own} resolves to 127.0.1.1", "--towards", own, **names({own: "127.0.1.1"}))
    expect(has(findings, "warning", "own name", "127.0.1.1"), *findings)
    told("error", "MASTER_ADDR", "mistakes itself for it", MASTER_ADDR="n1", **names({"n1": "127.0.1.1"}))
    told("note", "own name", "not an address of this host", **names({own: "192.0.2.77"}))
    told("note", "own name", "cannot be looked up", **names({own: "no.such.host.invalid"}))


def name_servers_that_are_slow_or_silent_are_told():
    findings = told("warning", "MASTER_ADDR", "looking up n1 took ", "--timeout", "10", MASTER_ADDR="n1",
                    **names({"n1": "127.0.0.1"}, 1100))
    took_ms = next(int(found[1]) for found in (re.search(r"looking up n1 took (\d+) ms", one["found"]) for one in findings) if found)
    expect(1100 <= took_ms < 10000, *findings)
    began = time.monotonic()
    findings = told("error", "MASTER_ADDR", "no answer in time", "--timeout", "0.5", MASTER_ADDR="n1", **names({}, HANG_S * 1000))
    expect(has(findings, "warning", "own name", "no answer in time") or has(findings, "note", "own name", "no answer in time"),
           *findings)
    ended_before(HANG_S, began)


def ports_in_use_are_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told("error", "ports", f"ports {port} to {port}: Address already in use", SHOAL_STORE_PORT=str(port), **LOCAL)
        findings = told("note", "ports", f"MASTER_PORT {port} is in use", MASTER_PORT=str(port), **LOCAL)
        expect(has(findings, "ok", "ports", "rank 0 can listen at 127.0.0.1"), *findings)
        by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(port - 1), **LOCAL}
        told("error", "ports", f"ports {port} to {port}: Address already in use", **by_hand)
        told("ok", "ports", "rank 0 can listen at 127.0.0.1", SHOAL_JOB_ID="this", **by_hand)
        told("error", "ports", "0 are free, but the ranks here need 2", SHOAL_PORTS=str(port), **LOCAL)
        told("ok", "ports", " are free", "--ranks", "1", SHOAL_PORTS=f"{port - 16}-{port}", **LOCAL)
        told("error", "ports", "but the ranks here need 80", "--ranks", "40", SHOAL_PORTS=f"{port - 16}-{port}", **LOCAL)


def interfaces_that_do_not_fit_are_told():
    told("error", "interface", "no interface that is up is left by SHOAL_NIC=smoke0", SHOAL_NIC="smoke0")
    told("error", "interface", 'SHOAL_NIC has "10.0.0.0/99"', SHOAL_NIC="10.0.0.0/99")
    findings = told("ok", "interface", "lo (127.0.0.1), the route to the others", **LOCAL)
    expect(has(findings, "ok", "mtu", "packets of up to "), *findings)


def hosts_without_a_network_are_told():
    prefix = ["unshare", "-rn"]
    try:
        if call(*prefix, "true")[0]:
            raise Skip("no network namespace can be made here")
    except FileNotFoundError:
        raise Skip("unshare is not installed")
    findings = told("error", "towards", "no route leads from here to 192.0.2.9", "--towards", "192.0.2.9", prefix=prefix)
    expect(has(findings, "error", "interface", "no interface that is up") and has(findings, "note", "libfabric", "not asked"),
           *findings)


def providers_that_cannot_be_taken_are_told():
    if not FABRIC:
        raise Skip("the mock of libfabric is not built: that needs libcmocka-dev")
    told("error", "libfabric", "SHOAL_LIBFABRIC cannot be loaded", SHOAL_LIBFABRIC="/no/such/file", **LOCAL)
    mock = {"SHOAL_LIBFABRIC": FABRIC, **LOCAL}
    told("error", "libfabric", 'SHOAL_PROVIDER is "smoke"', SHOAL_PROVIDER="smoke", **mock)
    told("error", "libfabric", "SHOAL_PROVIDER=efa: it finds no device", SHOAL_PROVIDER="efa", **mock)
    told("error", "libfabric", "no provider of libfabric can be used", SHOAL_MOCK_FABRIC="none", **mock)
    began = time.monotonic()
    told("note", "libfabric", "did not answer in time", "--timeout", "0.5", SHOAL_MOCK_FABRIC="hangs", **mock)
    ended_before(HANG_S, began)


# ---- Many hosts ------------------------------------------------------------------------------------------------------------

VIA = """#!/bin/sh
# Runs a command as ssh would, on hosts that are not there: the name says what happens.
host=$1; shift
echo "$*" >>"$0.log"
case $host in
fails*) echo warning >&2; echo "cannot reach $host" >&2; exit 255;;
hangs*) echo "knock, knock" >&2; sleep 300;;
leaves*) sleep 300 & exec sh -c "$*";;
junk*) echo "welcome"; exit 0;;
greets*) echo "welcome {"; sh -c "$*";;
newer*) sh -c "$*" | sed 's/Shoal [0-9.]*/Shoal 9.9.9/';;
jumbo*) sh -c "$*" | sed 's/up to [0-9]* bytes/up to 9001 bytes/';;
*) exec sh -c "$*";;
esac
"""


class Via:
    """The script, in a folder with a space and a quote in its name. log() returns the commands that it had to run."""
    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="shoal doctor's ")
        self.path = pathlib.Path(self.folder.name) / "via"
        self.path.write_text(VIA)
        self.path.chmod(0o755)
        return self

    def __exit__(self, *_):
        self.folder.cleanup()

    def ask(self, *lines, words=(), via=None, **more):
        with hosts_in(*lines) as file:
            more = {**names({"n1": "127.0.0.1"}), "SHOAL_NIC": "lo", **more}
            return call(SHOAL, "doctor", "--hosts", file.name, "--via", via or shlex.quote(str(self.path)), "--timeout", "20", *words,
                        env=environment(more))

    def findings(self, *lines, **more):
        code, out, err = self.ask(*lines, words=["--json", *more.pop("words", ())], **more)
        expect(code in (0, 1) and not err, code, out, err)
        return [json.loads(line) for line in out.splitlines()]

    def log(self):
        return pathlib.Path(f"{self.path}.log").read_text().splitlines()


def of_host(findings, host, subject="host"):
    return [one for one in findings if one["subject"] == subject and host in one["hosts"]]


def what_is_the_same_is_told_once():
    with Via() as via:
        findings = via.findings("# the machines", "", "localhost slots=1   # the first", "127.0.0.1 slots=1", "127.0.0.2 slots=1")
        expect(all(len(one["hosts"]) == 3 for one in findings), *findings)
        expect(len(of_host(findings, "127.0.0.2", "version")) == 1, *findings)
        code, out, err = via.ask("localhost", "127.0.0.1 slots=99")
        expect(code == 0 and out.startswith("2 of 2 hosts answered"), code, out, err)
        expect("warning  cores          127.0.0.1: 99 ranks share" in out and "settings       every" in out, out)


def hosts_are_asked_about_the_first_one():
    with Via() as via:
        findings = via.findings("localhost slots=2", "127.0.0.3")
        expect(sorted(line.split(" doctor ")[1] for line in via.log()) ==
               ["--json --towards 'localhost'", "--json --towards 'localhost' --ranks 2"], via.log())
        expect(len(of_host(findings, "127.0.0.3", "towards")) == 1, *findings)
        findings = via.findings("no.such.host.invalid", "n2")
        expect(has(findings, "error", "towards", "no.such.host.invalid"), *findings)


def hosts_that_do_not_answer_are_told_with_the_reason():
    with Via() as via:
        began = time.monotonic()
        findings = via.findings("localhost", "fails1", "hangs1", "junk1", "hangs2", words=["--timeout", "15"])
        ended_before(2 * 15, began)  # the time of two hosts, one after the other
        for host, why in (("fails1", "exit code 255: cannot reach fails1"), ("hangs1", "no end within 15 s (--timeout): knock, knock"),
                          ("junk1", "exit code 0: welcome"), ("hangs2", "no end within 15 s")):
            told_of = of_host(findings, host)
            expect(len(told_of) == 1 and why in told_of[0]["found"] and told_of[0]["level"] == "error", host, *findings)
        expect(of_host(findings, "localhost", "version") and not of_host(findings, "localhost"), *findings)
        findings = via.findings("localhost", words=["--shoal", "/no/such/shoal"])
        expect("exit code 127" in of_host(findings, "localhost")[0]["found"], *findings)
        findings = via.findings("localhost", via="/no/such/ssh")
        expect("exit code 127" in of_host(findings, "localhost")[0]["found"], *findings)


def more_hosts_than_descriptors_are_asked_in_turn():
    hosts = [f"junk{i}" for i in range(40)]
    for limits in ("ulimit -n 24", "ulimit -S -n 24"):
        with Via() as via, hosts_in(*hosts) as file:
            out = call("sh", "-c", f'{limits} && exec "$0" "$@"', SHOAL, "doctor", "--json", "--hosts", file.name, "--via",
                       shlex.quote(str(via.path)), "--timeout", "60", env=environment(LOCAL))[1]
            findings = [json.loads(line) for line in out.splitlines()]
            for host in hosts:
                told_of = of_host(findings, host)
                expect(len(told_of) == 1 and "exit code 0: welcome" in told_of[0]["found"], limits, host, *findings)


def what_a_host_leaves_running_does_not_spoil_its_answer():
    with Via() as via:
        findings = via.findings("localhost", "leaves1", words=["--timeout", "10"])
        expect(not of_host(findings, "leaves1") and of_host(findings, "leaves1", "version"), *findings)


def greetings_are_passed_over():
    with Via() as via:
        findings = via.findings("localhost", "greets1")
        expect(not of_host(findings, "greets1") and of_host(findings, "greets1", "version"), *findings)


def versions_and_mtus_that_differ_are_told():
    with Via() as via:
        findings = via.findings("127.0.0.1", "newer1", "jumbo1")
        for subject, level, host, text in (("version", "error", "newer1", "Shoal 9.9.9"), ("mtu", "warning", "jumbo1", "9001")):
            rows = [one for one in findings if one["subject"] == subject]
            expect(len(rows) == 2 and all(one["level"] == level and one["advice"] for one in rows), subject, *rows)
            expect([one["hosts"] for one in rows if text in one["found"]] == [[host]], *rows)


def words_reach_the_shell_there_as_they_are():
    with Via() as via:
        folder = pathlib.Path(via.folder.name)
        command = folder / "it's $HOME; \"shoal\""
        command.symlink_to(SHOAL)
        findings = via.findings("$(touch${IFS}gone)", "a;b", words=["--shoal", str(command)],
                                via=f"env -C {shlex.quote(str(folder))} {shlex.quote(str(via.path))}")
        expect(len(of_host(findings, "a;b", "version")) == 1 and not (folder / "gone").exists(), *findings)
        expect(has(findings, "error", "towards", '"$(touch${IFS}gone)"'), *findings)


def files_of_hosts_that_make_no_sense_are_refused():
    for lines, about in ((["n1", "-oProxyCommand=x"], ":2: that is not the name"), (["n1", "", "n1"], ":3: that host is there already"),
                         (["n1 slots=0"], "slots=N"), (["n1 slots=4097"], "N from 1 to 4096"), (["n1 slots=2 gpus=3"], "slots=N"), (["n1 cores=3"], "slots=N"),
                         (["# none"], "names no host"), (["n\x1b1"], ":1: that is not the name")):
        with hosts_in(*lines) as file:
            code, out, err = call(SHOAL, "doctor", "--hosts", file.name, "--via", "true")
            expect(code == 2 and not out and len(err.splitlines()) == 1 and about in err, lines, code, out, err)
    code, out, err = call(SHOAL, "doctor", "--hosts", "/no/such/file")
    expect(code == 2 and "cannot open /no/such/file" in err, err)


def options_that_make_no_sense_are_refused():
    for words, about in ((["--via", "ssh"], "--hosts FILE"), (["--shoal", "x"], "--hosts FILE"), (["here"], "'here' is not expected"),
                         (["--hosts", "x", "--towards", "n1"], "cannot be combined"), (["--ranks", "0"], "a number from 1"),
                         (["--ranks", "4097"], "1 to 4096"),
                         (["--hosts", "x", "--ranks", "2"], "cannot be combined"), (["--timeout", "0"], "more than 0"),
                         (["--jsno"], "did you mean --json?")):
        code, out, err = call(SHOAL, "doctor", *words)
        expect(code == 2 and not out and len(err.splitlines()) == 1 and about in err, words, code, out, err)


run_cases([a_table_begins_with_the_version_and_ends_with_the_sum, every_wrong_setting_is_told,
           kernels_that_the_processor_lacks_are_told, variables_of_launchers_are_checked, libraries_that_cannot_be_loaded_are_told,
           secrets_are_told_and_not_shown, more_ranks_than_cores_are_told, memory_that_does_not_suffice_is_told,
           limits_of_a_container_are_told, limits_of_the_process_are_told, memory_that_a_provider_locks_is_told, system_calls_that_are_forbidden_are_told,
           names_that_mean_nothing_are_told, names_that_hide_rank_0_are_told, name_servers_that_are_slow_or_silent_are_told,
           ports_in_use_are_told, interfaces_that_do_not_fit_are_told, hosts_without_a_network_are_told,
           providers_that_cannot_be_taken_are_told, what_is_the_same_is_told_once, hosts_are_asked_about_the_first_one,
           hosts_that_do_not_answer_are_told_with_the_reason, more_hosts_than_descriptors_are_asked_in_turn,
           what_a_host_leaves_running_does_not_spoil_its_answer,
           greetings_are_passed_over, versions_and_mtus_that_differ_are_told, words_reach_the_shell_there_as_they_are,
           files_of_hosts_that_make_no_sense_are_refused, options_that_make_no_sense_are_refused])
