"""Cases of a test program in Python: each prints one TAP line."""
import collections
import os
import secrets
import socket
import subprocess
import sys
import traceback


class Skip(Exception):
    pass


def costs():
    """Returns wall-clock seconds and CPU seconds, of this process and of its children that have ended."""
    times = os.times()
    return times.elapsed, sum(times[:4])


def run_cases(cases):
    """Runs functions, then exits. A case passes if it returns, fails if it raises, and is skipped if it raises Skip."""
    print(f"1..{len(cases)}")
    failed = 0
    for number, case in enumerate(cases, 1):
        name = case.__name__
        began_s, began_cpu_s = costs()
        try:
            case()
            print(f"ok {number} - {name}", flush=True)
        except Skip as reason:
            print(f"ok {number} - {name} # SKIP {reason}", flush=True)
        except Exception:
            failed += 1
            print(f"not ok {number} - {name}")
            print("# " + traceback.format_exc().replace("\n", "\n# "), flush=True)
        ended_s, ended_cpu_s = costs()
        print(f"# {name} took {ended_s - began_s:.1f} s, CPU {ended_cpu_s - began_cpu_s:.1f} s", flush=True)
    sys.exit(1 if failed else 0)


def call(*command, timeout=180, env=None, cwd=None):
    """Runs a command; returns (exit code, stdout, stderr)."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd,
                            stdin=subprocess.DEVNULL)
    return result.returncode, result.stdout, result.stderr


def handles(pid, number):
    """Returns true if a signal no longer ends the process by itself: it catches the signal, or blocks it to read it."""
    with open(f"/proc/{pid}/status") as status:
        masks = dict(line.split(":") for line in status if line.startswith("Sig"))
    return bool((int(masks["SigCgt"], 16) | int(masks["SigBlk"], 16)) >> (number - 1) & 1)


# The ports among which `shoal run` also chooses (tools/run/run_spawn.c): below those that the kernel assigns to connections.
PORT_FIRST, PORT_STEP, PORT_SLOTS = 20000, 17, 750
PORTS_HELD = 8
_slots = collections.deque(maxlen=PORTS_HELD)  # locks of the newest; the oldest is dropped, and so released


def free_port():
    """Returns a free port with 16 free ports after it. No other test, and no `shoal run`, gets it until this process and its
    children have ended or it has taken PORTS_HELD others: all of them lock a slot by the same name."""
    for _ in range(10 * PORT_SLOTS):
        port = PORT_FIRST + PORT_STEP * secrets.randbelow(PORT_SLOTS)
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0shoal-run-port-{port}")
            for each in range(port, port + PORT_STEP):
                with socket.socket() as probe:
                    probe.bind(("", each))
        except OSError:
            lock.close()
            continue
        _slots.append(lock)
        return port
    raise AssertionError(f"no {PORT_STEP} free ports in a row from {PORT_FIRST} on")


# Replaces the cgroups that the process sees by an empty tree of both versions, then runs the arguments.
COUNTED = """mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && cd /sys/fs/cgroup || exit 77
echo 0 | tee memory.current memory/memory.usage_in_bytes > /dev/null; echo oom_kill 0 | tee memory.events memory/memory.oom_control > /dev/null
cd / && exec "$@" """
# Counts a kill as the kernel does when it kills a process for lack of memory.
COUNT_A_KILL = "cd /sys/fs/cgroup && echo oom_kill 1 | tee memory.events memory/memory.oom_control > /dev/null"


def call_counted(*words, env=None):
    """Like call(), but the command sees only the counters that COUNT_A_KILL writes, not the kernel's."""
    code, out, err = call("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", COUNTED, "sh", *words, env=env)
    if code == 77 or err.startswith("unshare:"):
        raise Skip("no mount of our own: " + err.strip())
    return code, out, err


def expect(condition, *told):
    if not condition:
        raise AssertionError("\n".join(str(word) for word in told))
