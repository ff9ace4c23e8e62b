#!/usr/bin/env python3
"""Measures Shoal, Intel MPI, Open MPI and MPICH in turn, size by size, round by round. `make bench` runs this.

Each measurement is a separate process and has one size. A round measures every size with every library, in rotated order.
The ratio of a size in a round is the fastest peer's time divided by Shoal's. Virtual cores sometimes share a cache and
sometimes do not. So each run first times a bare cache-line exchange, and only ratios of the same machine state are combined.
Every run verifies a result element by element before it measures.

Intel MPI is measured, never shipped: it is proprietary. pip installs it in build/impi. If pip cannot, Intel MPI is left out,
and the table names the peers that were measured.

A size is the number of bytes of the larger operand, over all parts if the operand has one part per rank. Peers use ordinary
memory. In place, peers use MPI_IN_PLACE. MPI_Bcast has one buffer, so a broadcast is in place for all.

Suites whose names begin with hosts run only if they are named (`make bench-hosts`). They run Shoal, Open MPI and, if
build/torch contains PyTorch, Gloo over emulated hosts, and report the share of the wire that each uses; see
bench/bench_hosts.py.

Writes bench-SUITE.jsonl (see bench/bench_record.py) into docs/figures, or into bench/records for suites that find regressions
(cliffs*, four*), and prints the targets that are met and missed.
"""
import argparse
import fnmatch
import json
import math
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import bench_hosts
import bench_report as report

ROOT = Path(__file__).resolve().parent.parent
K, M = 1 << 10, 1 << 20
SIZES = [8, 64, 512, 4 * K, 32 * K, 256 * K, 2 * M, 16 * M, 64 * M, 256 * M]
QUICK_SIZES = [8, 4 * K, 256 * K, 16 * M, 64 * M]
HOSTS_SIZES = [64, 512, 4 * K, 32 * K, 256 * K, 2 * M, 16 * M, 64 * M]
RUN_TIMEOUT_S = 300
TRIES = 3
CORES = len(os.sched_getaffinity(0))
QUOTA_PERIOD_US = 100000
MISSING_DEBIAN = "apt-get install openmpi-bin libopenmpi-dev mpich libmpich-dev"
MISSING = {"impi": "make bench installs it at build/impi, where pip has it"}
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")


@dataclass
class Collective:
    """switch: the largest number of bytes that the direct algorithm carries with 2 ranks."""
    title: str
    switch: int = 16 * K
    of: str = "float32"


COLLECTIVES = {
    "allreduce": Collective("all-reduce", 8 * K, "float32, sum"),
    "reducescatter": Collective("reduce-scatter", of="float32, sum"),
    "allgather": Collective("all-gather"),
    "broadcast": Collective("broadcast"),
    "reduce": Collective("reduce", of="float32, sum"),
    "alltoall": Collective("all-to-all"),
    "gather": Collective("gather"),
    "scatter": Collective("scatter"),
}


@dataclass
class Memory:
    """The kind of memory of Shoal's operands."""
    text: str
    options: list
    in_place: bool = False


PLAIN = Memory("plain memory, out of place", ["--memory", "plain"])
PLAIN_INPLACE = Memory("plain memory, in place", ["--memory", "plain", "--in-place"], True)
SHARED = Memory("shared memory, out of place", ["--memory", "shared"])
SHARED_INPLACE = Memory("shared memory, in place", ["--memory", "shared", "--in-place"], True)


@dataclass
class Suite:
    """kind: a curve over sizes, a curve over emulated hosts, or one of CASES. rounds: at most this number; 0: the number
    from --rounds. seconds: for one size, see shoal bench --help. sizes: of a curve; empty: the usual ones. layout, rate: of
    hosts. peer: the library that Shoal's time is compared with; "": the fastest."""
    name: str
    title: str
    ranks: int = 2
    shoal: list = field(default_factory=list)
    in_place: bool = False
    kind: str = "curve"
    collective: str = "allreduce"
    rounds: int = 0
    seconds: int = 4
    sizes: tuple = ()
    layout: str = ""
    rate: str = ""
    peer: str = ""


def place(ranks):
    return f"{ranks} ranks on {CORES} cores" if ranks > 2 else f"{ranks} ranks"


def curve(name, collective, ranks, memory, probe=()):
    """A second per size is enough if ranks outnumber cores, because one operation of a peer may then take 10 ms."""
    title = f"{COLLECTIVES[collective].title}, {place(ranks)}, {memory.text}"
    is_long = ranks > 2 and collective != "allreduce"
    return Suite(name, title[0].upper() + title[1:], ranks, [*memory.options, *probe], memory.in_place, "curve", collective,
                 rounds=3 if is_long else 0, seconds=1 if ranks > 2 else 4)


def cliffs(collective):
    title = COLLECTIVES[collective].title
    name, rounds = ("cliffs", 0) if collective == "allreduce" else (f"cliffs-{title}", 3)
    return Suite(name, f"Shoal against its own smooth curve, {title}", kind="cliffs", collective=collective, rounds=rounds)


def sixteen(name, ranks):
    title = f"bfloat16 and float16: time over that of float32 of the same bytes, {place(ranks)}"
    return Suite(name, title, ranks, kind="sixteen", rounds=3, seconds=1 if ranks > 2 else 4)


def hosts(name, collective, layout, rate="", sizes=()):
    """Pins no ranks: Shoal's bench cannot pin ranks that another program starts, and all libraries are measured alike."""
    ranks = bench_hosts.emulated.Layout(layout).size
    title = f"{COLLECTIVES[collective].title}, emulated hosts {layout}, {rate or 'unshaped'}, {PLAIN.text}"
    return Suite(f"hosts-{name}", title[0].upper() + title[1:], ranks, PLAIN.options, False, "hosts", collective, 3, 2,
                 sizes or tuple(HOSTS_SIZES), layout, rate)


OTHERS = [("reduce-scatter", "reducescatter", PLAIN), ("all-gather", "allgather", PLAIN),
          ("all-gather-shared", "allgather", SHARED), ("all-gather-inplace", "allgather", SHARED_INPLACE),
          ("broadcast", "broadcast", PLAIN_INPLACE), ("reduce", "reduce", PLAIN), ("all-to-all", "alltoall", PLAIN),
          ("gather", "gather", PLAIN), ("scatter", "scatter", PLAIN)]

SUITES = {suite.name: suite for suite in [
    curve("plain", "allreduce", 2, PLAIN),
    curve("inplace", "allreduce", 2, SHARED_INPLACE, ["--probe", "memory"]),
    curve("shared", "allreduce", 2, SHARED),
    *[curve(name, collective, 2, memory) for name, collective, memory in OTHERS],
    sixteen("sixteen", 2),
    curve("four", "allreduce", 4, PLAIN),
    curve("four-inplace", "allreduce", 4, SHARED_INPLACE),
    *[curve(f"four-{name}", collective, 4, memory) for name, collective, memory in OTHERS],
    sixteen("four-sixteen", 4),
    *[cliffs(collective) for collective in COLLECTIVES],
    Suite("late", "8 B with a peer 20 ms late, counted from its arrival", kind="late"),
    Suite("quota", "4 ranks, 8 B, each rank held to half a core", 4, kind="quota"),
    Suite("busy", "Beside a process that computes all the time", kind="busy"),
    *[hosts(f"{layout}-{COLLECTIVES[collective].title}", collective, layout, "1gbit")
      for layout in ("4x1", "2x2") for collective in ("allreduce", "allgather")],
    hosts("2x1-unshaped", "allreduce", "2x1", sizes=(64 * M,)),
]}


def say(text):
    print(text, file=sys.stderr, flush=True)


def clean_environment():
    """Returns the environment without the variables of a launcher that started this program: the commands start ranks
    themselves."""
    return {name: value for name, value in os.environ.items()
            if name not in LAUNCHER_NAMES and not name.startswith(("PMIX_", "PMI_", "OMPI_", "I_MPI_"))}


def json_lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run(command, environment=None, limit_s=RUN_TIMEOUT_S):
    """Runs a command and returns the JSON objects that it prints. Exits if the command fails, so that no figure lacks a
    value."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s,
                              env=environment or clean_environment(), cwd=ROOT)
    except subprocess.TimeoutExpired:
        sys.exit(f"bench: no end after {limit_s:.0f} s: {' '.join(map(str, command))}")
    lines = json_lines(done.stdout)
    if done.returncode or not lines:
        sys.exit(f"bench: exit code {done.returncode} from: {' '.join(map(str, command))}\n{done.stderr.strip()}")
    return lines


def pin(ranks):
    """Pins each rank to its core, as `shoal bench --pin` does, for peers with more ranks than cores. Otherwise the kernel
    places ranks three to one or two to two for a while, and that placement decides the time of small operations."""
    own = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
    return ["sh", "-c", f'exec taskset -c $(({own} % {CORES})) "$@"', "pin"] if ranks > CORES else []


class Shoal:
    name = "shoal"

    def __init__(self, program, environment=None, limit_s=RUN_TIMEOUT_S):
        self.program, self.environment, self.limit_s = program, environment, limit_s

    def measure(self, suite, ranks, size, options):
        """Returns the JSON object of the collective; with --probe memory it also contains probe_us."""
        lines = run([str(self.program), "bench", suite.collective, "-n", str(ranks), "--min", str(size), "--max", str(size),
                     "--seconds", str(suite.seconds), "--format", "json", *(["--pin"] if ranks > CORES else []), *options],
                    self.environment, self.limit_s)
        result = next(line for line in lines if line["collective"] == suite.collective)
        for line in lines:
            if line["collective"] == "probe":
                result["probe_us"] = line["median_us"]
        return result


class Peer:
    """An MPI library. Finds the best of several settings once per size and then uses it, so each peer is measured at its
    best. wrapper(ranks): the words before its program. compiler: the command, and the words after the source file."""

    def __init__(self, name, build, launch, settings, wrapper=pin, compiler=None):
        self.name, self.launch, self.settings, self.wrapper, self.best = name, launch, settings, wrapper, {}
        self.program, self.compiler = build / f"mpi_bench.{name}", compiler or ([f"mpicc.{name}"], [])

    def is_here(self):
        return shutil.which(self.compiler[0][0]) and shutil.which(self.launch[0])

    def build(self):
        compiler, libraries = self.compiler
        subprocess.run([*compiler, "-O3", "-std=gnu11", "-o", self.program, ROOT / "bench/mpi_bench.c", *libraries], check=True)

    def command(self, suite, size, setting, wrapper=()):
        return [*self.launch, *setting, "-n", str(suite.ranks), *wrapper, str(self.program), suite.collective, str(size),
                str(size), "2", "in-place" if suite.in_place else "out-of-place", str(suite.seconds)]

    def measure(self, suite, size):
        key = (suite.collective, suite.ranks, suite.in_place, size)
        settings = self.settings(suite.ranks)
        if key not in self.best:
            commands = [self.command(suite, size, setting, self.wrapper(suite.ranks)) for setting in settings]
            times = [run(command)[0]["median_us"] for command in commands] if len(settings) > 1 else [0]
            self.best[key] = settings[times.index(min(times))]
        result = run(self.command(suite, size, self.best[key], self.wrapper(suite.ranks)))[0]
        result["setting"] = " ".join(self.best[key])
        return result


def openmpi_settings(ranks):
    unbound = ["--bind-to", "none"]
    if ranks <= CORES:
        return [[], unbound]
    return [[*unbound, "--mca", "mpi_yield_when_idle", "1"], [*unbound, "--mca", "mpi_yield_when_idle", "0"]]


def impi_settings(ranks):
    """Like openmpi_settings(): with or without binding; if ranks outnumber cores, with or without yielding while a rank
    waits."""
    unbound = ["-genv", "I_MPI_PIN", "0"]
    if ranks <= CORES:
        return [[], unbound]
    return [[*unbound, "-genv", "I_MPI_THREAD_YIELD", way] for way in ("0", "2", "3")]


def impi_open(build):
    """Opens Intel MPI from the wheels. They keep the layout of an installation; their compiler wrapper only adds wrong
    paths."""
    root = build / "impi"
    launch = [str(root / "bin/mpiexec.hydra"), "-hosts", "localhost", "-genv", "I_MPI_FABRICS", "shm",
              "-genv", "LD_LIBRARY_PATH", str(root / "lib")]
    compiler = ["gcc", f"-I{root}/include"], [f"-L{root}/lib", "-lmpi", f"-Wl,-rpath,{root}/lib"]
    return Peer("impi", build, launch, impi_settings, compiler=compiler)


def peers_open(build):
    peers = [Peer("openmpi", build, ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"], openmpi_settings),
             Peer("mpich", build, ["mpirun.mpich"], lambda ranks: [[]]), impi_open(build)]
    present = [peer for peer in peers if peer.is_here()]
    for peer in peers:
        if peer not in present:
            way = MISSING.get(peer.name, MISSING_DEBIAN)
            say(f"bench: {report.TITLES[peer.name]} is missing ({way}); the ratios do without it")
    if not present:
        sys.exit(2)
    for peer in present:
        peer.build()
    return present


def state_of(results):
    """Returns near, far or crowded if all runs saw the same state; mixed if the state changed in between; unknown if no run
    timed an exchange."""
    seen = {report.exchange_state(result.get("exchange_ns")) for result in results}
    return seen.pop() if len(seen) == 1 else "mixed"


# ---- Curves: Shoal and the peers over sizes --------------------------------------------------------------------------------

def curve_point(suite, size, number, shoal, peers):
    """Measures one size with every library. The point's bytes are those measured: with parts, a size below one element per
    part is raised to one element per part."""
    runners = [(shoal.name, lambda: shoal.measure(suite, suite.ranks, size, suite.shoal))]
    runners += [(peer.name, lambda peer=peer: peer.measure(suite, size)) for peer in peers]
    turn = number % len(runners)
    results = {name: measure() for name, measure in runners[turn:] + runners[:turn]}
    sizes = {result["bytes"] for result in results.values()}
    if len(sizes) > 1:
        sys.exit(f"bench: {suite.name}: for {size} bytes the libraries measured {sizes}")
    against = [suite.peer] if suite.peer else [peer.name for peer in peers]
    fastest = min(results[name]["median_us"] for name in against)
    one = {"round": number, "bytes": sizes.pop(), "state": state_of(results.values()),
           "ratio": fastest / results["shoal"]["median_us"], "results": results}
    return one | ({"peer": suite.peer} if suite.peer else {})


def curve_point_clean(suite, size, number, shoal, peers):
    """Repeats a point if its runs saw different states. It looks only at the states, never at the times."""
    for _ in range(TRIES):
        one = curve_point(suite, size, number, shoal, peers)
        if one["state"] in ("near", "far") or suite.ranks > CORES or suite.layout:
            break
    return one


def curve_round(suite, sizes, number, shoal, peers):
    points = []
    for size in sizes:
        points.append(curve_point_clean(suite, size, number, shoal, peers))
        say(f"  round {number + 1}  {report.size_text(size):>9}  {points[-1]['state']:8} ratio {points[-1]['ratio']:.2f}")
    return points


# ---- Curves over emulated hosts --------------------------------------------------------------------------------------------

class HostsShoal(bench_hosts.Launched):
    """Measures as the class Shoal does."""

    def measure(self, suite, ranks, size, options):
        return super().measure(suite, size)


def hosts_shoal(hosts, program):
    def command(suite, size):
        return [program, "bench", suite.collective, "--min", size, "--max", size, "--seconds", suite.seconds, "--format",
                "json", *suite.shoal]
    return HostsShoal("shoal", hosts, command, {}, RUN_TIMEOUT_S)


def hosts_peers(hosts, suite, build, folder):
    settings = bench_hosts.openmpi_settings(suite.collective, hosts.layout, CORES)
    openmpi = Peer("openmpi", build, hosts.openmpi_launch(folder), lambda ranks: settings, lambda ranks: [])
    openmpi.build()
    return [openmpi, *([bench_hosts.gloo_open(hosts, RUN_TIMEOUT_S)] if bench_hosts.gloo_is_here() else [])]


def hosts_round(suite, sizes, number, hosts, runners):
    wire = hosts.wire()
    say(f"  round {number + 1}  iperf3: one stream {wire['one_gb_s']:.3f} GB/s, beside an opposite one {wire['both_gb_s']:.3f}")
    points = curve_round(suite, sizes, number, *runners)
    for one in points:
        hosts.judge(one, suite.collective, wire)
        results = one["results"]
        one["ratio_openmpi"] = results["openmpi"]["median_us"] / results["shoal"]["median_us"]
        say(f"  round {number + 1}  {report.size_text(one['bytes']):>9}  of the wire: "
            + ", ".join(f"{name} {result['share']:.3f}" for name, result in results.items()))
    return points


# ---- Cases: single points, each with its own measure -----------------------------------------------------------------------

@dataclass
class Case:
    """A run of Shoal, and the runs that define the smooth curve around it: (x, ranks, bytes, options), with x as the
    abscissa."""
    text: str
    at: tuple
    beside: list


def point(ranks, size, options, x=None):
    return (x or size, ranks, size, options)


def cliff_cases_in(memory, options, switches):
    cases = []
    for size in (8, 4 * K, 256 * K, 16 * M):
        # Every curve has a step at the number of ranks that begin to share cores. On fewer than 4 cores, 3 ranks are compared
        # with 4.
        beside = [point(ranks, size, options, ranks) for ranks in ((4,) if CORES < 4 else (2, 4))]
        cases.append(Case(f"3 ranks, {report.size_text(size)}, {memory}", point(3, size, options, 3), beside))
    cases.append(Case(f"12,345,678 bytes, {memory}", point(2, 12345678, options),
                      [point(2, 8 * M, options), point(2, 16 * M, options)]))
    for size in (4 * K, 256 * K, 16 * M):
        cases.append(Case(f"pointers 4 bytes off, {report.size_text(size)}, {memory}",
                          point(2, size, [*options, "--offset", "4"]), [point(2, size, options)]))
    for switch in switches:
        for size in (switch * 95 // 100 // 4 * 4, switch * 105 // 100 // 4 * 4):
            cases.append(Case(f"{report.size_text(switch)} {'-' if size < switch else '+'} 5 %, {memory}",
                              point(2, size, options), [point(2, switch // 2, options), point(2, switch * 2, options)]))
    return cases


CLIFF_MEMORIES = {
    "allreduce": [("plain", PLAIN), ("shared in place", SHARED_INPLACE)],
    "allgather": [("plain", PLAIN), ("shared in place", SHARED_INPLACE)],
    "broadcast": [("plain in place", PLAIN_INPLACE)],
}


def cliff_cases(collective):
    switches = (COLLECTIVES[collective].switch, 256 * K, 512 * K, M, 4 * M)
    cases = []
    for text, memory in CLIFF_MEMORIES.get(collective, [("plain", PLAIN)]):
        cases += cliff_cases_in(text, memory.options, switches)
    for memory in ("plain", "shared") if collective == "allreduce" else ():
        for size in (256 * K, 16 * M):
            options = ["--memory", memory]
            cases.append(Case(f"buffers 256 MiB apart, {report.size_text(size)}, {memory}",
                              point(2, size, [*options, "--gap", "256M"]), [point(2, size, options)]))
    return cases


def interpolate(x, points):
    """Interpolates the points around x on a straight line in logarithms."""
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = points
    part = (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0))
    return math.exp(math.log(y0) + part * (math.log(y1) - math.log(y0)))


def cliff_point(suite, case, number, shoal):
    results = [shoal.measure(suite, *place[1:]) for place in [case.at, *case.beside]]
    smooth = interpolate(case.at[0], [(place[0], result["median_us"]) for place, result in zip(case.beside, results[1:])])
    return {"round": number, "case": case.text, "state": state_of(results), "value": results[0]["median_us"] / smooth,
            "median_us": results[0]["median_us"], "smooth_us": smooth}


def cliffs_round(suite, number, shoal, peers, quick):
    for case in cliff_cases(suite.collective):
        if not quick or "shared" not in case.text:
            yield cliff_point(suite, case, number, shoal)


SIXTEEN_MEMORIES = [("plain", PLAIN), ("shared", SHARED), ("shared in place", SHARED_INPLACE)]


def sixteen_points(suite, number, shoal, size, memory):
    text, options = memory[0], memory[1].options
    names = ["float32", "bfloat16", "float16"]
    turn = number % len(names)
    results = {name: shoal.measure(suite, suite.ranks, size, [*options, "--type", name])
               for name in names[turn:] + names[:turn]}
    times = {name: result["median_us"] for name, result in results.items()}
    return [{"round": number, "case": f"{name}, {report.size_text(size)}, {text}", "state": state_of(results.values()),
             "value": times[name] / times["float32"], "median_us": times[name], "float32_us": times["float32"]}
            for name in names[1:]]


def sixteen_round(suite, number, shoal, peers, quick):
    for memory in SIXTEEN_MEMORIES:
        for size in QUICK_SIZES if quick else SIZES:
            yield from sixteen_points(suite, number, shoal, size, memory)


def late_round(suite, number, shoal, peers, quick):
    result = shoal.measure(suite, 2, 8, ["--late", "20", "--iterations", "50"])
    return [{"round": number, "case": f"{which}, us", "state": state_of([result]), "value": result[key]}
            for which, key in (("median", "median_us"), ("99th percentile", "p99_us"))]


# ---- Quota: each rank in its own control group -----------------------------------------------------------------------------

def quota_base():
    """Returns a directory for our control groups and the shell line that sets a limit there, or (None, None) if that is not
    allowed."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    half = QUOTA_PERIOD_US // 2
    if (first / "cpu.cfs_quota_us").exists() or (first / "cpu.shares").exists():
        base, limit = first, f"echo {QUOTA_PERIOD_US} >$g/cpu.cfs_period_us; echo {half} >$g/cpu.cfs_quota_us"
    else:
        base, limit = second, f"echo {half} {QUOTA_PERIOD_US} >$g/cpu.max"
    base = base / f"shoal-bench-{os.getpid()}"
    try:
        base.mkdir()
        if base.parent == second:
            (base / "cgroup.subtree_control").write_text("+cpu")
    except OSError:
        base.is_dir() and base.rmdir()
        return None, None
    return base, ["sh", "-c", f'g={base}/$$; set -e; mkdir $g; {limit}; echo $$ >$g/cgroup.procs; exec "$@"', "quota"]


def free_port():
    """Returns a port that no other program gets, although the ranks that meet there still have to start."""
    sys.path.insert(0, str(ROOT / "python"))
    from shoal.job import processes
    return processes.free_port()


def shoal_launched(shoal, ranks, size, wrapper):
    """Starts every rank separately, as a launcher would, so that each can be in its own group."""
    names = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
             "SHOAL_SECRET": secrets.token_hex(16)}
    command = [*wrapper, str(shoal.program), "bench", "allreduce", "--min", str(size), "--max", str(size), "--format", "json"]
    workers = []
    for rank in range(ranks):
        environment = clean_environment() | {name: str(value) for name, value in names.items()}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        workers.append(subprocess.Popen(command, env=environment, cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        told = [worker.communicate(timeout=RUN_TIMEOUT_S) for worker in workers]
    except subprocess.TimeoutExpired:
        told = None
    finally:
        for worker in workers:
            worker.poll() is None and worker.kill()
    if told is None or any(worker.returncode for worker in workers):
        sys.exit("bench: shoal failed under the quota: " + (told[0][1].strip() if told else f"no end after {RUN_TIMEOUT_S} s"))
    return json_lines(told[0][0])[0]


def quota_round(suite, number, shoal, peers, quick):
    openmpi = next((peer for peer in peers if peer.name == "openmpi"), None)
    base, wrapper = quota_base()
    if not openmpi or not base:
        say("bench: the quota suite needs Open MPI and the right to make control groups; left out")
        return []
    try:
        mine = shoal_launched(shoal, suite.ranks, 8, wrapper)["median_us"]
        times = [run(openmpi.command(suite, 8, setting, wrapper))[0]["median_us"]
                 for setting in openmpi.settings(suite.ranks)]
    finally:
        for group in [*base.glob("*/"), base]:
            group.rmdir()
    return [{"round": number, "case": "time over Open MPI's under the same quota", "state": "unknown",
             "value": mine / min(times), "shoal_us": mine, "openmpi_us": min(times)}]


# ---- Busy: with a process that computes all the time -------------------------------------------------------------------------

def busy_point(suite, number, shoal, peers, size):
    """Compares bound and unbound ranks on a busy machine. The MPIs and Shoal's command bind their ranks; ranks under
    torchrun are unbound and leave each other's core."""
    names = (shoal.name, f"{shoal.name} unbound")
    runners = [(name, lambda more=more: shoal.measure(suite, suite.ranks, size, [*PLAIN.options, *more]))
               for name, more in zip(names, ([], ["--bind", "none"]))]
    runners += [(peer.name, lambda peer=peer: peer.measure(suite, size)) for peer in peers]
    turn = number % len(runners)
    times = {name: measure()["median_us"] for name, measure in runners[turn:] + runners[:turn]}
    fastest = min(time for name, time in times.items() if name not in names)
    return [{"round": number, "case": f"{report.size_text(size)}{name[len(shoal.name):]}, time over the fastest MPI's", "state": "unknown",
             "value": times[name] / fastest, "times_us": times} for name in names]


def busy_round(suite, number, shoal, peers, quick):
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return [row for size in (8, 4 * K) for row in busy_point(suite, number, shoal, peers, size)]
    finally:
        busy.kill()
        busy.wait()


CASES = {"cliffs": cliffs_round, "sixteen": sixteen_round, "late": late_round, "quota": quota_round, "busy": busy_round}


def cases_round(suite, number, shoal, peers, quick):
    points = []
    for one in CASES[suite.kind](suite, number, shoal, peers, quick):
        points.append(one)
        say(f"  round {number + 1}  {one['case']}: {one['value']:.2f} ({one['state']})")
    return points


# ---- Main ------------------------------------------------------------------------------------------------------------------

def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": CORES, "kernel": platform.release()}


def command_text(suite, options, program="bench/bench.py"):
    sizes = f" --sizes {','.join(map(str, options.sizes))}" if options.sizes else ""
    return f"{program} {suite.name} --rounds {options.rounds}" + (" --quick" if options.quick else sizes)


def sizes_of(suite, options):
    usual = list(suite.sizes) or SIZES
    quick = [size for size in usual if size in (64, *QUICK_SIZES)]
    return options.sizes or (quick if options.quick else usual)


def rounds_run(suite, options, round_run):
    """Runs at least one round, then more while the time allows."""
    points, start = [], time.monotonic()
    for number in range(min(options.rounds, suite.rounds or options.rounds)):
        if number and time.monotonic() - start > options.limit:
            say(f"bench: {suite.name} ends after {number} rounds: --limit {options.limit} s")
            break
        points += round_run(number)
    return points


def hosts_run(suite, options):
    why = bench_hosts.why_impossible()
    if why:
        say(f"bench: {suite.name} is left out: {why}")
        return []
    with bench_hosts.Hosts(suite.layout, suite.rate) as hosts, bench_hosts.scratch() as folder:
        runners = hosts_shoal(hosts, options.shoal), hosts_peers(hosts, suite, options.shoal.parent, folder)
        return rounds_run(suite, options, lambda number: hosts_round(suite, sizes_of(suite, options), number, hosts, runners))


def suite_run(suite, options, shoal, peers):
    if suite.kind == "hosts":
        points = hosts_run(suite, options)
    elif suite.kind == "curve":
        points = rounds_run(suite, options, lambda number: curve_round(suite, sizes_of(suite, options), number, shoal, peers))
    else:
        points = rounds_run(suite, options, lambda number: cases_round(suite, number, shoal, peers, options.quick))
    return record_make(suite, options, points)


def shoal_command_text(suite):
    start = f"tests/hosts/cluster.py run --layout {suite.layout}" + (f" --rate {suite.rate}" if suite.rate else "") + " -- "
    ranks = "" if suite.layout else f" -n {suite.ranks}"
    return f"{start if suite.layout else ''}shoal bench {suite.collective}{ranks} {' '.join(suite.shoal)}"


def record_make(suite, options, points):
    collective, is_curve = COLLECTIVES[suite.collective], suite.kind in ("curve", "hosts")
    of = "16 and 32 bits, sum" if suite.kind == "sixteen" else collective.of
    return {"suite": suite.name, "kind": "curve" if is_curve else "cases", "title": suite.title,
            "what": f"{collective.title} of {of}", "machine": machine(), "command": command_text(suite, options),
            "shoal_command": shoal_command_text(suite) if is_curve else "",
            "points": points}


def sizes_parse(text):
    """Parses sizes. Raises ValueError on other text, which argparse turns into its one-line error."""
    units = {"K": K, "M": M, "G": K * M}
    return [int(word[:-1]) * units[word[-1]] if word[-1:] in units else int(word) for word in text.upper().split(",")]


def rounds_parse(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("it takes a number from 1 on")
    return int(text)


def arguments_add(parser, which):
    """Adds the options that bench/bench_torch.py shares."""
    parser.add_argument("suites", nargs="*", metavar="SUITE",
                        help=f"suites to run (see the list below); {which}")
    parser.add_argument("--rounds", type=rounds_parse, default=5, metavar="N",
                        help="rounds of each suite (5, or fewer as listed below)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and cases")
    parser.add_argument("--sizes", type=sizes_parse, metavar="LIST", help="sizes of the curves, such as 8,64K,16M")
    parser.add_argument("--limit", type=int, default=900, metavar="S",
                        help="start no further round of a suite after S seconds (900)")
    parser.add_argument("--out", type=Path, help="folder for the figures (docs/figures; bench/records for cliffs* and four*)")
    parser.add_argument("--targets", action="store_true", help="measure nothing; judge the figures on record")


def suites_named(parser, words, suites):
    """Returns the suites whose names match one of the words, in their order."""
    for word in words:
        if not fnmatch.filter(suites, word):
            parser.error(f"there is no suite {word}; there are {', '.join(suites)}")
    return [name for name in suites if any(fnmatch.fnmatchcase(name, word) for word in words)]


def arguments():
    listed = "suites:\n" + "\n".join(f"  {name:24} {suite.title}{f', {suite.rounds} rounds at most' if suite.rounds else ''}"
                                    for name, suite in SUITES.items())
    parser = argparse.ArgumentParser(description=__doc__, epilog=listed,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments_add(parser, "'four-*' is all whose names begin so (all but hosts-*)")
    parser.add_argument("--shoal", type=Path, default=ROOT / "build/shoal",
                        help="the command (build/shoal); the peers' programs are built next to it")
    options = parser.parse_args()
    usual = [name for name in SUITES if options.targets or SUITES[name].kind != "hosts"]
    options.suites = suites_named(parser, options.suites, SUITES) if options.suites else usual
    options.shoal = options.shoal.resolve()
    return options


def main():
    options = arguments()
    if options.targets:
        return report.targets_print(options.out, options.suites)
    if not os.access(options.shoal, os.X_OK):
        say("bench: there is no build/shoal; make build makes it")
        return 2
    if any(SUITES[name].kind == "hosts" for name in options.suites):
        bench_hosts.why_impossible()  # called now, because it may start this program anew
    peers = peers_open(options.shoal.parent)
    start = time.monotonic()
    for number, name in enumerate(options.suites, 1):
        so_far = f"suite {number} of {len(options.suites)}, {(time.monotonic() - start) / 60:.0f} min so far"
        say(f"{so_far}: {name}: {SUITES[name].title}")
        record = suite_run(SUITES[name], options, Shoal(options.shoal), peers)
        if record["points"]:
            report.record_write(options.out, record)
            print(report.markdown(record))
    report.targets_print(options.out, options.suites)
    return 0


if __name__ == "__main__":
    sys.exit(main())
