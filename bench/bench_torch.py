#!/usr/bin/env python3
"""Measures PyTorch's back-end "shoal" and Gloo from Python, in turn, size by size, round by round. `make bench-torch` runs
this.

Each round starts the ranks of all contestants anew. Contestants run in rotated order, size by size, and the others sleep
meanwhile. Ranks have one thread for PyTorch. Ranks of trainings, and ranks that outnumber the cores, are pinned for every
contestant: rank r to core r, modulo the cores. Other ranks are not pinned, because Gloo's threads are faster so. The ratio
of a size in a round is Gloo's time divided by Shoal's. Virtual cores sometimes share a cache and sometimes do not. So each
run first times a bare cache-line exchange, and only ratios of the same machine state are combined. Every run verifies a
result element by element before it measures. A size is the number of bytes of the larger operand.

DeepSpeed's all-reduce through shared memory takes part in torch-all_reduce-* if its Python can import it and build its
kernel (pip install deepspeed; a compiler). Otherwise it is left out, and the reason is printed.

The trainings time steps of DistributedDataParallel with the gradients of GPT-2 small and ResNet-50, in turns with steps that
do not communicate: the difference is the communication that is not hidden. They also time steps of examples/torch/gpt
(FSDP2). See bench/torch_training.py.

Suites whose names begin with torch-hosts run over emulated hosts, like those of bench/bench.py.

Writes docs/figures/bench-SUITE.jsonl (see bench/bench_record.py), and prints the targets that are met and missed.
"""
import argparse
import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import bench
import bench_hosts
import bench_report as report
from bench import K, M, ROOT, say

WORKER = ROOT / "bench/torch_worker.py"
SIZES = (64, 512, 4 * K, 32 * K, 64 * K, 256 * K, 2 * M, 16 * M, 64 * M, 256 * M)
HOSTS_SIZES = (64, 512, 4 * K, 32 * K, 256 * K, 2 * M, 16 * M, 64 * M)
RUN_TIMEOUT_S = 300
GRACE_S = 2
AREA_BYTES = 8192  # as in bench/torch_worker.py
TITLES = {"shoal": "Shoal", "gloo": "Gloo"}
COLLECTIVES = {"all_reduce": "float32, sum", "all_gather_into_tensor": "float32", "reduce_scatter_tensor": "float32, sum"}


# ---- Suites ----------------------------------------------------------------------------------------------------------------

@dataclass
class Suite(bench.Suite):
    """kind: curve, hosts, or one of CASES. words: for bench/torch_worker.py."""
    words: list = field(default_factory=list)
    peer: str = "gloo"


def curve(collective, ranks, memory="ordinary"):
    name = f"torch-{collective}-{ranks}" + ("-zero-copy" if memory == "zero-copy" else "")
    return Suite(name, f"{collective} from PyTorch, {bench.place(ranks)}, {memory} tensors", ranks, ["--memory", memory],
                 collective=collective, seconds=1, sizes=SIZES, rounds=5 if ranks == 2 else 3)


def hosts(collective, ranks):
    return Suite(f"torch-hosts-{ranks}-{collective}", f"{collective} from PyTorch, {ranks} emulated hosts, 1gbit", ranks,
                 kind="hosts", collective=collective, seconds=2, sizes=HOSTS_SIZES, rounds=3, layout=f"{ranks}x1", rate="1gbit")


def training(name, model, title):
    return Suite(f"torch-{name}", title, kind="training", collective="", rounds=3, words=["--model", model])


SUITES = {suite.name: suite for suite in [
    *[curve(collective, ranks, memory)
      for ranks in (2, 4) for collective in COLLECTIVES for memory in ("ordinary", "zero-copy")],
    Suite("torch-latency", "64 B all_reduce from PyTorch, 2 ranks", kind="latency", collective="all_reduce", seconds=2),
    training("ddp-gpt2", "gpt2", "DistributedDataParallel, gradients of GPT-2 small, 2 ranks"),
    training("ddp-resnet50", "resnet50", "DistributedDataParallel, gradients of ResNet-50, 2 ranks"),
    training("fsdp-gpt", "gpt", "FSDP2, steps of examples/torch/gpt, 2 ranks"),
    *[hosts(collective, ranks) for ranks in (2, 4) for collective in COLLECTIVES],
]}


# ---- Contestants -----------------------------------------------------------------------------------------------------------

@dataclass
class Contestant:
    """name: as in the figures. contestant: its name for bench/torch_worker.py, which differs only with --null."""
    name: str
    contestant: str
    options: object
    environment: dict

    def command(self, suite, words):
        mine = suite.shoal if self.contestant == "shoal" else []
        return [self.options.python, WORKER, self.contestant, *mine, *suite.words, "--seconds", suite.seconds, *words]


def environment(options):
    """Returns the environment of all contestants."""
    paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "SHOAL_LIBRARY": str(options.library), "OMP_NUM_THREADS": "1"}


def why_not(command, environment):
    """Returns None if the command succeeds, else its last line of output."""
    try:
        done = subprocess.run(list(map(str, command)), env={**bench.clean_environment(), **environment}, cwd=ROOT,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return str(fault)
    told = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
    return told[-1] if done.returncode else None


def contestants_open(options):
    """Returns Shoal, Gloo and, if it runs, DeepSpeed; and the reason if it does not."""
    own = environment(options)
    if why := why_not([options.python, "-c", "import torch.distributed"], own):
        sys.exit(f"bench: no PyTorch: {why}\n--python names the Python that has it; `make bench-torch` makes one")
    if not options.null and (why := why_not([options.python, "-c", "import shoal.torch; shoal.torch.shim()"], own)):
        sys.exit(f"bench: shoal.torch cannot be imported: {why}")
    made = [Contestant("shoal", "gloo" if options.null else "shoal", options, own), Contestant("gloo", "gloo", options, own)]
    left_out = {}
    if any(name.startswith("torch-all_reduce") for name in options.suites):
        alone = {**own, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(bench.free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        left_out["deepspeed"] = why_not([options.python, WORKER, "deepspeed", "all_reduce", 64], alone)
        if left_out["deepspeed"]:
            say(f"bench: DeepSpeed is left out: {left_out['deepspeed']}")
        else:
            made.append(Contestant("deepspeed", "deepspeed", options, own))
    return made, {name: why for name, why in left_out.items() if why}


def contestants_of(suite, contestants):
    """Returns the contestants of a suite. DeepSpeed has only an all-reduce, and uses only its own memory."""
    is_there = suite.kind == "curve" and suite.collective == "all_reduce" and "zero-copy" not in suite.name
    return [one for one in contestants if one.name != "deepspeed" or is_there]


def is_pinned(suite):
    """Returns true for trainings and for ranks that outnumber the cores. A collective with a core per rank is faster
    unpinned with Gloo, whose threads can then use the other rank's core."""
    return suite.ranks > bench.CORES or suite.kind == "training"


class Ranks:
    """The ranks of one contestant on this host. They live for one round, and sleep between measurements."""

    def __init__(self, contestant, suite, scene, words):
        area = scene.area_make()
        self.name, self.told, self.workers = contestant.name, [], []
        command = [*contestant.command(suite, words), *(["--pin"] if is_pinned(suite) else []), "--area", area, "--probe",
                   scene.probe]
        common = {"WORLD_SIZE": suite.ranks, "LOCAL_WORLD_SIZE": suite.ranks, "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": bench.free_port(), "SHOAL_SECRET": secrets.token_hex(16), "GLOO_SOCKET_IFNAME": "lo",
                  **contestant.environment}
        for rank in range(suite.ranks):
            own = {**common, "RANK": rank, "LOCAL_RANK": rank}
            self.told.append(tempfile.TemporaryFile("w+"))
            self.workers.append(subprocess.Popen(
                list(map(str, command)), env=bench.clean_environment() | {name: str(value) for name, value in own.items()},
                cwd=ROOT, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE if rank == 0 else self.told[rank],
                stderr=self.told[rank]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            worker.kill()
            worker.wait()
            worker.stdin.close()
        self.workers[0].stdout.close()
        for file in self.told:
            file.close()

    def fail(self, why):
        told = []
        for rank, file in enumerate(self.told):
            file.seek(0)
            told += [f"[{rank}] {line}" for line in file.read().splitlines()]
        sys.exit("\n".join([f"bench: {self.name}: {why}", *told]))

    def measure(self, suite, size=None):
        """Returns rank 0's result of a size, which all ranks measure; without a size, of the only measurement."""
        for worker in self.workers if size else []:
            try:
                worker.stdin.write(f"{size}\n".encode())
            except BrokenPipeError:
                self.fail("a rank has ended")
        end = time.monotonic() + RUN_TIMEOUT_S
        while time.monotonic() < end:
            if select.select([self.workers[0].stdout], [], [], 0.2)[0]:
                line = self.workers[0].stdout.readline()
                if line.startswith(b"{"):
                    return json.loads(line)
                if not line:
                    self.fail("rank 0 ended without a figure")
            elif any(worker.poll() for worker in self.workers):
                time.sleep(GRACE_S)  # the other ranks may still print errors
                self.fail("a rank failed")
        return self.fail(f"no figure after {RUN_TIMEOUT_S} s")


class ShoalRanks(Ranks):
    """Measures Shoal through the interface that bench.curve_point uses."""

    def measure(self, suite, ranks, size, options):
        return super().measure(suite, size)


class Scene:
    """What the ranks of this host need besides their command: the cache-line exchange as a library, and areas to meet in."""

    def __init__(self, options):
        self.folder = tempfile.TemporaryDirectory(prefix="shoal-bench-")
        self.probe = Path(self.folder.name) / "bench_probe.so"
        subprocess.run(["cc", "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'include'}",
                        "-o", self.probe, ROOT / "tools/bench/bench_probe.c"], check=True)
        self.areas = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.folder.cleanup()

    def area_make(self):
        self.areas += 1
        area = Path(self.folder.name) / f"area-{self.areas}"
        area.write_bytes(bytes(AREA_BYTES))
        return area


# ---- Curves ----------------------------------------------------------------------------------------------------------------

def points_judge(points):
    """Adds ratios: the point's is against Gloo; the one against DeepSpeed is separate."""
    for one in points:
        if "deepspeed" in one["results"]:
            one["ratio_deepspeed"] = one["results"]["deepspeed"]["median_us"] / one["results"]["shoal"]["median_us"]
    return points


def curve_round(suite, options, number, scene, contestants):
    with contextlib.ExitStack() as stack:
        runners = [stack.enter_context((ShoalRanks if one.name == "shoal" else Ranks)(one, suite, scene, [suite.collective]))
                   for one in contestants_of(suite, contestants)]
        return points_judge(bench.curve_round(suite, bench.sizes_of(suite, options), number, runners[0], runners[1:]))


# ---- Curves over emulated hosts --------------------------------------------------------------------------------------------

def hosts_runner(hosts, contestant):
    def command(suite, size):
        return contestant.command(suite, [suite.collective, size])
    kind = bench.HostsShoal if contestant.name == "shoal" else bench_hosts.Launched
    return kind(contestant.name, hosts, command, {**contestant.environment, **bench_hosts.GLOO_ENVIRONMENT}, RUN_TIMEOUT_S)


def hosts_run(suite, options, contestants):
    why = bench_hosts.why_impossible()
    if why:
        say(f"bench: {suite.name} is left out: {why}")
        return []
    with bench_hosts.Hosts(suite.layout, suite.rate) as hosts:
        runners = [hosts_runner(hosts, one) for one in contestants_of(suite, contestants)]
        return bench.rounds_run(suite, options, lambda number: bench.curve_round(
            suite, bench.sizes_of(suite, options), number, runners[0], runners[1:]))


# ---- Cases -----------------------------------------------------------------------------------------------------------------

def case(number, state, text, value):
    return {"round": number, "case": text, "state": state, "value": value}


def results_of(suite, number, scene, contestants, *words):
    """Returns the results of each contestant, in turn."""
    turn, results = number % len(contestants), {}
    for one in contestants[turn:] + contestants[:turn]:
        with Ranks(one, suite, scene, words) as ranks:
            results[one.name] = ranks.measure(suite)
    return results


def latency_round(suite, options, number, scene, contestants):
    quiet, busy = (results_of(suite, number, scene, contestants, "all_reduce", 64, *words) for words in ((), ("--busy",)))
    for name in quiet:
        state = bench.state_of([quiet[name]])
        yield case(number, state, f"{TITLES[name]}, median, us", quiet[name]["median_us"])
        yield case(number, state, f"{TITLES[name]}, 99th percentile, us", quiet[name]["p99_us"])
        state = bench.state_of([busy[name]])
        yield case(number, state, f"{TITLES[name]}, median beside a busy thread, us", busy[name]["median_us"])
        yield case(number, state, f"{TITLES[name]}, 99th percentile beside a busy thread, us", busy[name]["p99_us"])


def training_round(suite, options, number, scene, contestants):
    """A step takes as long as its slowest rank. Only DistributedDataParallel can leave out the communication."""
    results = results_of(suite, number, scene, contestants, "train", "--steps", 3 if options.quick else 10)
    mine, gloo, state = results["shoal"], results["gloo"], bench.state_of(results.values())
    if "exposed_us" in mine:
        yield case(number, state, "step over Gloo's", mine["median_us"] / gloo["median_us"])
        floor = gloo["median_us"] / 100  # smaller values are noise, and may be negative
        exposed = [max(result["exposed_us"], floor) for result in (mine, gloo)]
        yield case(number, state, "communication not hidden over Gloo's", exposed[0] / exposed[1])
    else:
        yield case(number, state, "steps per second over Gloo's", gloo["median_us"] / mine["median_us"])
    for name, result in results.items():
        yield case(number, state, f"{TITLES[name]}, step, ms", result["median_us"] / 1e3)
        if "exposed_us" in result:
            yield case(number, state, f"{TITLES[name]}, step without communication, ms", result["alone_us"] / 1e3)


CASES = {"latency": latency_round, "training": training_round}


def cases_round(suite, options, number, scene, contestants):
    points = list(CASES[suite.kind](suite, options, number, scene, contestants_of(suite, contestants)))
    for one in points:
        say(f"  round {number + 1}  {one['case']}: {one['value']:.3g} ({one['state']})")
    return points


# ---- Main ------------------------------------------------------------------------------------------------------------------

def suite_run(suite, options, scene, contestants):
    if suite.kind == "hosts":
        return hosts_run(suite, options, contestants)
    one_round = curve_round if suite.kind == "curve" else cases_round
    return bench.rounds_run(suite, options, lambda number: one_round(suite, options, number, scene, contestants))


def record_make(suite, options, points, versions, left_out):
    of = COLLECTIVES.get(suite.collective, "")
    null = " --null" if options.null else ""
    what = f"{suite.collective} of {of}" if of else "medians of the slowest rank"
    return {"suite": suite.name, "kind": "curve" if suite.kind in ("curve", "hosts") else "cases", "title": suite.title,
            "what": f"{what}; {versions}", "machine": bench.machine(), "left_out": left_out, "is_judged": True,
            "command": bench.command_text(suite, options, "bench/bench_torch.py") + null, "shoal_command": "", "points": points}


def versions_of(options):
    """Returns PyTorch's version, and which of Shoal's shims is loaded."""
    code = "import torch; print('PyTorch', torch.__version__, end='')"
    code += "" if options.null else "; import shoal.torch; print(', shim', shoal.torch.shim(), end='')"
    return subprocess.run([options.python, "-c", code], env=bench.clean_environment() | environment(options), cwd=ROOT,
                          capture_output=True, text=True, check=True).stdout


def arguments():
    listed = "suites:\n" + "\n".join(f"  {name:42} {suite.title}{f', {suite.rounds} rounds at most' if suite.rounds else ''}"
                                    for name, suite in SUITES.items())
    parser = argparse.ArgumentParser(description=__doc__, epilog=listed, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.arguments_add(parser, "'torch-ddp-*' is all whose names begin so; all without one")
    parser.add_argument("--python", type=Path,
                        help="a Python with PyTorch (build/torch/bin/python3 if it is there, else this one)")
    parser.add_argument("--library", type=Path, default=ROOT / "build/libshoal.so", help="Shoal's (build/libshoal.so)")
    parser.add_argument("--null", action="store_true",
                        help="run Gloo also in Shoal's place, to see how figures look if nothing differs")
    options = parser.parse_args()
    options.suites = bench.suites_named(parser, options.suites, SUITES) if options.suites else list(SUITES)
    options.python = options.python or (bench_hosts.TORCH_PYTHON if bench_hosts.TORCH_PYTHON.exists() else Path(sys.executable))
    options.library = options.library.resolve()
    return options


def main():
    options = arguments()
    if options.targets:
        return report.targets_print(options.out, options.suites)
    if not options.null and not options.library.exists():
        say(f"bench: there is no {options.library}; make build makes it")
        return 2
    if any(SUITES[name].kind == "hosts" for name in options.suites):
        bench_hosts.why_impossible()  # called now, because it may start this program anew
    contestants, left_out = contestants_open(options)
    versions = versions_of(options)
    with Scene(options) as scene:
        for number, name in enumerate(options.suites, 1):
            say(f"suite {number} of {len(options.suites)}: {name}: {SUITES[name].title}")
            points = suite_run(SUITES[name], options, scene, contestants)
            if points:
                record = record_make(SUITES[name], options, points, versions, left_out)
                report.record_write(options.out, record)
                print(report.markdown(record))
    report.targets_print(options.out, options.suites)
    return 0


if __name__ == "__main__":
    sys.exit(main())
