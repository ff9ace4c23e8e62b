#!/usr/bin/env python3
"""Emulated hosts: network namespaces with their own host names, connected by a bridge, with an optional rate for each link.

  cluster.py run --layout 2x2 [--rate 1gbit] [--rails 2] [--ipv6] [--timeout S] -- PROGRAM ARGUMENTS
      starts PROGRAM once per rank with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT
      and SHOAL_SECRET. If all succeed: prints rank 0's output, and exits with 0. Otherwise prints each rank's lines after
      [host.rank], and exits with the code of the first rank that failed, 124 after a timeout, 77 if hosts cannot be emulated.
      Nothing remains.

Layouts: 1x4, 2x1, 3x2 (hosts x ranks of each), 3+1 (ranks of each host), 4x2:rr (numbered in turns over the hosts).

Host i is h<i>, 10.77.0.<i> and fd77::<i>, its interface eth0. With several rails, interface eth<r> is on a bridge of its own,
with 10.77.<r>.<i> and fd77:0:0:<r>::<i>. Namespaces have no names: processes hold them, and end when
this process does, however it ends. So runs do not interfere, and none leaves anything behind. A user who is not root becomes
root in a new user namespace, if the kernel allows it.
"""
import argparse
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRACE_S = 15  # for the other ranks after one has failed: they learn of it through the library
PORT = 29500  # the namespaces are ours, so every port is free
INTERFACE = "eth0"
BURST_BYTES = 72 << 10  # of the token bucket of a shaped link, in each direction: one of TCP's largest packets must fit
IS_INSIDE = "SHOAL_TEST_USER_NAMESPACE"  # set when this program is root of a user namespace
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
                  "SHOAL_SECRET", "SHOAL_SECRET_FILE", "PMIX_RANK", "PMI_RANK", "MPI_LOCALNRANKS")
LAUNCHER_PREFIXES = ("PMIX_", "PMI_", "OMPI_", "TORCHELASTIC_", "SLURM_", "PET_", "SM_", "DSTACK_")


class Impossible(Exception):
    """Hosts cannot be emulated here; the text is the reason."""


# ---- Permission ------------------------------------------------------------------------------------------------------------

def tried(*command):
    """Returns None if the command succeeds, else the reason why not."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return str(fault)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


HOST_OF_OUR_OWN = ("unshare", "--net", "--uts", "ip", "link", "add", "try", "type", "veth", "peer", "name", "try1")


def require():
    """Returns if hosts can be emulated. If that needs a user namespace, restarts this program as its root. Raises
    Impossible."""
    why = tried(*HOST_OF_OUR_OWN)
    if why is None:
        return
    as_root = ("unshare", "--user", "--map-root-user")
    if os.environ.get(IS_INSIDE) or (own := tried(*as_root, *HOST_OF_OUR_OWN)):
        raise Impossible(f"no network namespaces: {why}" + ("" if os.environ.get(IS_INSIDE) else f"; as a user: {own}"))
    sys.stdout.flush()
    os.execvpe(as_root[0], [*as_root, sys.executable, *sys.argv], {**os.environ, IS_INSIDE: "1"})


# ---- Layouts ---------------------------------------------------------------------------------------------------------------

class Layout:
    """host_of[rank] is the number of a rank's host, from 0."""

    def __init__(self, word):
        shape, _, order = word.partition(":")
        if match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape):
            self.sizes = [int(match[2])] * int(match[1])
        elif re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)+", shape):
            self.sizes = [int(part) for part in shape.split("+")]
        else:
            raise ValueError(f"no layout: {word!r}; such are 2x2, 3+1, 4x2:rr")
        if order not in ("", "rr") or len(self.sizes) > 250:
            raise ValueError(f"no layout: {word!r}; rr is the only order, 250 the most hosts")
        self.word = word
        places = [(host, local) for host, size in enumerate(self.sizes) for local in range(size)]
        self.host_of = [host for host, local in sorted(places, key=lambda place: place[::-1] if order else place)]

    @property
    def size(self):
        return len(self.host_of)

    def local_of(self, rank):
        return self.host_of[:rank].count(self.host_of[rank])

    def ranks_on(self, host):
        return [rank for rank in range(self.size) if self.host_of[rank] == host]


# ---- Hosts -----------------------------------------------------------------------------------------------------------------

class Host:
    """A process that holds namespaces. It reads a pipe of this process, and so ends with it."""

    def __init__(self, name):
        self.name = name
        self.keeper = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c",
                                        'hostname "$1" && ip link set lo up && echo up && exec cat', "sh", name],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        if self.keeper.stdout.readline() != b"up\n":
            raise Impossible(f"the namespaces of {name} could not be set up")
        self.pid = self.keeper.pid
        self.namespace = os.readlink(f"/proc/{self.pid}/ns/net")

    def enter(self):
        """Returns the words that precede a command, so that it runs on this host and ends with this process."""
        return ["nsenter", "-t", str(self.pid), "--net", "--uts", "setpriv", "--pdeathsig", "KILL", "--"]

    def run(self, *command):
        """Runs a command to its end and returns its output; raises an exception if it fails."""
        return subprocess.run([*self.enter(), *command], check=True, stdout=subprocess.PIPE, text=True, timeout=20).stdout

    def processes(self):
        """Yields all processes in this host's network namespace, except the keeper."""
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{name}/ns/net") == self.namespace and int(name) != self.pid:
                    yield int(name)
            except OSError:
                continue

    def close(self):
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.keeper.kill()
        self.keeper.wait()
        self.keeper.stdin.close()
        self.keeper.stdout.close()


class Cluster:
    """Hosts on a bridge for each rail. rate: of each link, in both directions, in tc's notation; "": no limit. rails: the
    number of each host's interfaces, or a list of them."""

    def __init__(self, count, rate="", ipv6=False, rails=1):
        self.rate, self.ipv6, self.hosts, self.switch = rate, ipv6, [], None
        self.rails = rails if isinstance(rails, list) else [rails] * count
        try:
            self.switch = Host("switch")
            for rail in range(max(self.rails)):
                self.switch.run("ip", "link", "add", f"bridge{rail}", "type", "bridge", "mcast_snooping", "0")
                self.switch.run("ip", "link", "set", f"bridge{rail}", "up")
            for number in range(1, count + 1):
                self.hosts.append(Host(f"h{number}"))
                for rail in range(self.rails[number - 1]):
                    self.join(number, rail)
            if max(self.rails) > 1:
                self.wait_running()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for host in [*self.hosts, self.switch]:
            if host:
                host.close()

    def join(self, number, rail):
        host, port, interface = self.hosts[number - 1], f"p{rail}.{number}", f"eth{rail}"
        self.switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", interface, "netns", str(host.pid))
        self.switch.run("ip", "link", "set", port, "master", f"bridge{rail}")
        self.switch.run("ip", "link", "set", port, "up")
        if not self.ipv6:
            host.run("ip", "address", "add", f"10.77.{rail}.{number}/24", "dev", interface)
        self.join_ipv6(host, number, rail)
        host.run("ip", "link", "set", interface, "up")
        if self.rate:
            for place, device in ((self.switch, port), (host, interface)):
                place.run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", self.rate, "burst",
                          str(BURST_BYTES), "latency", "20ms")

    def wait_running(self):
        """The kernel reports a carrier a moment after the link is up. Ranks leave out an interface without one."""
        end = time.monotonic() + 20
        for host in self.hosts:
            while any(" UP " not in line for line in host.run("ip", "-brief", "link", "show", "type", "veth").splitlines()):
                if time.monotonic() > end:
                    raise Impossible(f"{host.name} has an interface without a carrier")
                time.sleep(0.02)

    def join_ipv6(self, host, number, rail):
        """Adds IPv6 addresses. A kernel without IPv6 is not an error if IPv4 works."""
        address = f"fd77:0:0:{rail}::{number}/64"  # fd77::<number> on rail 0
        why = tried(*host.enter(), "ip", "address", "add", address, "dev", f"eth{rail}", "nodad")
        if why and self.ipv6:
            raise Impossible(f"no IPv6 addresses: {why}")

    def address(self, number):
        """Returns the address of the host with this number, from 0."""
        return f"fd77::{number + 1}" if self.ipv6 else f"10.77.0.{number + 1}"

    def unplug(self, number, rail=0):
        """Cuts the host off from a rail, as if its cable were pulled out."""
        self.switch.run("ip", "link", "set", f"p{rail}.{number + 1}", "down")

    def environment(self):
        """Returns the environment that `cluster.py rsh` reads."""
        return {"SHOAL_TEST_HOSTS": " ".join(f"{self.address(i)}={host.pid}" for i, host in enumerate(self.hosts))}


# ---- Jobs ------------------------------------------------------------------------------------------------------------------

def threads_of(pid):
    """Returns the state of each thread of a process and, if it can be read, where it sleeps in the kernel."""
    told = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            status = (task / "stat").read_text().rpartition(")")[2].split()[0]
            place = (task / "wchan").read_text()
            seconds = sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
            told.append(f"{(task / 'comm').read_text().strip()} {status} {place} {seconds:.1f} s")
        except OSError:
            continue
    return ", ".join(told)


class Rank:
    """A process on a host. output: what it has written to both streams."""

    def __init__(self, number, host, command, environment):
        self.number, self.host, self.code, self.ended_at = number, host, None, None
        self.file = tempfile.TemporaryFile()
        self.process = subprocess.Popen([*host.enter(), *command], env=environment, stdin=subprocess.DEVNULL, stdout=self.file,
                                        stderr=subprocess.STDOUT, start_new_session=True)
        self.pid = self.process.pid  # nsenter and setpriv become the program

    def poll(self):
        """Returns true if the process has ended; records when that was first seen."""
        if self.code is None and self.process.poll() is not None:
            self.code, self.ended_at = self.process.returncode, time.monotonic()
        return self.code is not None

    def output(self):
        size = os.fstat(self.file.fileno()).st_size
        return os.pread(self.file.fileno(), size, 0).decode(errors="replace")

    def state(self):
        return f"(still running: {threads_of(self.pid)})" if self.code is None else f"(ended with {self.code})"

    def signal(self, number):
        if not self.poll():
            os.killpg(self.pid, number)

    def close(self):
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.file.close()


def clean_environment():
    return {name: value for name, value in os.environ.items()
            if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)}


class Job:
    """A program's ranks, distributed over hosts. environment: of all ranks; of_rank(rank): additions for one rank (None:
    none); a value of None removes the variable."""

    def __init__(self, cluster, layout, command, environment=None, of_rank=None):
        self.cluster, self.layout, self.command, self.ranks = cluster, layout, command, []
        self.common = {"SHOAL_SECRET": secrets.token_hex(16), **(environment or {})}
        self.of_rank = of_rank or (lambda rank: None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def environment(self, rank):
        host = self.layout.host_of[rank]
        own = {"RANK": rank, "WORLD_SIZE": self.layout.size, "LOCAL_RANK": self.layout.local_of(rank), "GROUP_RANK": host,
               "LOCAL_WORLD_SIZE": self.layout.sizes[host], "MASTER_ADDR": self.cluster.address(self.layout.host_of[0]),
               "MASTER_PORT": PORT, **self.common, **(self.of_rank(rank) or {})}
        return {**clean_environment(), **{name: str(value) for name, value in own.items() if value is not None}}

    def start(self, ranks=None):
        """Starts these ranks (None: all)."""
        for rank in range(self.layout.size) if ranks is None else ranks:
            host = self.cluster.hosts[self.layout.host_of[rank]]
            self.ranks.append(Rank(rank, host, self.command, self.environment(rank)))
        return self

    def poll(self):
        """Returns true if all ranks have ended."""
        return all([rank.poll() for rank in self.ranks])

    def failed(self):
        """Returns the ranks that ended with another code than 0, in the order of their ends."""
        self.poll()
        return sorted((rank for rank in self.ranks if rank.code), key=lambda rank: rank.ended_at)

    def wait(self, seconds, grace=None):
        """Waits until all have ended; returns False after a timeout, or `grace` seconds after the first failure."""
        end = time.monotonic() + seconds
        while not self.poll():
            failed = self.failed()
            limit = min(end, failed[0].ended_at + grace) if failed and grace is not None else end
            if time.monotonic() > limit:
                return False
            time.sleep(0.005)
        return True

    def told(self):
        """Returns all output, each line after [host.rank]."""
        return "".join(f"[{rank.host.name}.{rank.number}] {line}\n" for rank in sorted(self.ranks, key=lambda one: one.number)
                       for line in [*rank.output().splitlines(), rank.state()])

    def close(self):
        for rank in self.ranks:
            rank.close()


# ---- The command -----------------------------------------------------------------------------------------------------------

def exit_code(job, is_over):
    failed = job.failed()
    if failed:
        return failed[0].code if failed[0].code > 0 else 128 - failed[0].code
    return 0 if is_over else 124


def run(options):
    with Cluster(len(options.layout.sizes), options.rate, options.ipv6, options.rails) as cluster:
        with Job(cluster, options.layout, options.program) as job:
            job.start()
            code = exit_code(job, job.wait(options.timeout, GRACE_S))
            if code == 0:
                print(job.ranks[0].output(), end="", flush=True)
            else:
                print(job.told(), end="", file=sys.stderr, flush=True)
            return code


def rsh(words):
    """For launchers that reach hosts by a command such as ssh: executes the shell command on the host with that address."""
    pids = dict(pair.split("=") for pair in os.environ.get("SHOAL_TEST_HOSTS", "").split())
    if len(words) < 2 or words[0] not in pids:
        sys.exit(f"cluster.py rsh: no host {words[:1]}; there are {list(pids)}")
    os.execvp("nsenter", ["nsenter", "-t", pids[words[0]], "--net", "--uts", "sh", "-c", " ".join(words[1:])])


def arguments():
    parser = argparse.ArgumentParser(usage="cluster.py run --layout LAYOUT [options] -- PROGRAM ARGUMENTS",
                                     description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run"])
    parser.add_argument("--layout", type=Layout, required=True, help="such as 2x2, 3+1, 4x2:rr")
    parser.add_argument("--rate", default="", help="of each link, both ways, such as 1gbit (as fast as it goes)")
    parser.add_argument("--rails", type=int, default=1, help="interfaces of each host, each in a network of its own (1)")
    parser.add_argument("--ipv6", action="store_true", help="no IPv4 addresses")
    parser.add_argument("--timeout", type=float, default=120, metavar="S", help="then all ranks are killed (120)")
    parser.add_argument("program", nargs="+", metavar="PROGRAM")
    return parser.parse_args()


def stop(number, frame):
    raise KeyboardInterrupt


def main():
    if sys.argv[1:2] == ["rsh"]:
        rsh(sys.argv[2:])
    options = arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        require()
        return run(options)
    except Impossible as why:
        print(f"skipped: {why}", file=sys.stderr)
        return 77
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
