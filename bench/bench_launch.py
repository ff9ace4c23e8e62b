#!/usr/bin/env python3
"""Measures how long a launcher takes: from the command to the first collective, and from the last worker's exit to its own.

  bench_launch.py [--hosts 2 8] [--rounds N] [--quick]

Runs one worker on each of several emulated hosts (tests/hosts/cluster.py), in turn, in rotated order, round by round:

  shoal           `shoal run` on each host, all at once
  torchrun        torchrun on each host, all at once, with --node-rank and --master-addr; from build/torch
  openmpi, mpich  one mpirun, which reaches the other hosts by a shell script instead of ssh
  openmpi-own, mpich-own   the same with a program of that MPI

All start the same program that uses Shoal (launch_worker.c), except the last two. Those start one that uses MPI
(launch_mpi_worker.c), which sums one number and prints when that was done. Emulated hosts share one clock. A host's command
ends when the last of its processes that was started here ends. The value of a case is Shoal's time divided by the time of
the fastest other launcher in the same round.

In one more run of `shoal run` the ranks log how long they loaded libfabric and asked it for its providers (SHOAL_LOG=info).
The result is the slowest rank's share of the time from the command to the first collective.

Writes docs/figures/bench-launch.jsonl (see bench/bench_record.py). A launcher that is missing is left out, and the reason is
printed."""
import argparse
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import bench
import bench_hosts
import bench_record
from bench import ROOT, say

from cluster import INTERFACE, Cluster, clean_environment  # in tests/hosts, which bench_hosts adds to the path

PORT = 29500
LIMIT_S = 120
OUT = ROOT / "docs/figures/bench-launch.jsonl"
BUILD = ROOT / "build"
WORKER = BUILD / "bench/launch_worker"
TORCHRUN = BUILD / "torch/bin/torchrun"
AS_ROOT = ["--allow-run-as-root"] if os.getuid() == 0 else []


# ---- Launchers: the commands of a job, each with the host that runs it -------------------------------------------------------

def by_shoal(cluster, program, folder):
    meet = f"{cluster.address(0)}:{PORT}"
    return [(host, [BUILD / "shoal", "run", "--hosts", len(cluster.hosts), "--host-index", index, "--meet", meet, "-n", 1, program])
            for index, host in enumerate(cluster.hosts)]


def by_torchrun(cluster, program, folder):
    return [(host, [TORCHRUN, "--nnodes", len(cluster.hosts), "--node-rank", index, "--nproc-per-node", 1, "--master-addr",
                    cluster.address(0), "--master-port", PORT, "--local-addr", cluster.address(index), "--no-python", program])
            for index, host in enumerate(cluster.hosts)]


def shell_agent(cluster, folder):
    """Writes the shell script that mpirun runs instead of ssh, so that no Python interpreter adds its start time."""
    agent = Path(folder, "agent")
    places = "".join(f"{cluster.address(index)}) pid={host.pid};; " for index, host in enumerate(cluster.hosts))
    agent.write_text(f'#!/bin/sh\ncase "$1" in {places}esac\nshift\nexec nsenter -t "$pid" --net --uts sh -c "$*"\n')
    agent.chmod(0o755)
    return agent


def addresses(cluster):
    return ",".join(f"{cluster.address(index)}:1" for index in range(len(cluster.hosts)))


def by_openmpi(cluster, program, folder):
    subnet = f"{cluster.address(0).rpartition('.')[0]}.0/24"
    words = {"plm_rsh_agent": shell_agent(cluster, folder), "plm_rsh_no_tree_spawn": 1, "btl": "tcp,self", "pml": "ob1",
             "btl_tcp_if_include": subnet, "oob_tcp_if_include": subnet}
    return [(cluster.hosts[0], ["mpirun.openmpi", *AS_ROOT, "--bind-to", "none", "-x", "SHOAL_SECRET",
                                *(word for pair in words.items() for word in ("--mca", *pair)), "--host", addresses(cluster),
                                "-n", len(cluster.hosts), program])]


def by_mpich(cluster, program, folder):
    return [(cluster.hosts[0], ["mpirun.mpich", "-launcher", "rsh", "-iface", INTERFACE, "-launcher-exec",
                                shell_agent(cluster, folder), "--host", addresses(cluster), "-n", len(cluster.hosts), program])]


def mpi_program(name, folder):
    """Compiles the worker with that MPI's compiler; returns None if the MPI has none."""
    compiler, program = shutil.which(f"mpicc.{name}"), Path(folder, f"launch_mpi_worker.{name}")
    if compiler:
        subprocess.run([compiler, "-O2", str(ROOT / "bench/launch_mpi_worker.c"), "-o", str(program)], check=True)
    return program if compiler else None


def contestants_find(folder):
    """Returns the commands and the program of each launcher, by name, and the reasons why others are left out."""
    found, left_out = {"shoal": (by_shoal, WORKER)}, {}
    if TORCHRUN.exists():
        found["torchrun"] = (by_torchrun, WORKER)
    else:
        left_out["torchrun"] = f"{TORCHRUN} is not here"
    for name, commands in (("openmpi", by_openmpi), ("mpich", by_mpich)):
        if not shutil.which(f"mpirun.{name}"):
            left_out[name] = f"mpirun.{name} is not here"
            continue
        found[name] = (commands, WORKER)
        if program := mpi_program(name, folder):
            found[f"{name}-own"] = (commands, program)
    return found, left_out


# ---- One run ---------------------------------------------------------------------------------------------------------------

class Command:
    """A command on a host. A thread of its own waits for the end, so that the end is noticed at once."""

    def __init__(self, host, words, environment):
        self.file = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([*host.enter(), *map(str, words)], env=environment, stdin=subprocess.DEVNULL,
                                        stdout=self.file, stderr=subprocess.STDOUT, start_new_session=True)
        self.ended_at = None
        self.thread = threading.Thread(target=self.wait, daemon=True)
        self.thread.start()

    def wait(self):
        self.process.wait()
        self.ended_at = time.monotonic()

    def output(self):
        self.file.seek(0)
        return self.file.read()


def measure(name, contestant, cluster, folder, **variables):
    """Returns seconds from the command to the first collective and from the last exit to the return, and the programs'
    reports."""
    commands, program = contestant
    environment = {**clean_environment(), "SHOAL_SECRET": secrets.token_hex(16), "OMP_NUM_THREADS": "1",
                   "TORCH_CPP_LOG_LEVEL": "ERROR", **variables}
    begun_at = time.monotonic()
    started = [Command(host, words, environment) for host, words in commands(cluster, program, folder)]
    for one in started:
        one.thread.join(LIMIT_S)
    told = "\n".join(one.output() for one in started)
    times = [tuple(map(float, pair)) for pair in re.findall(r"launch (\S+) (\S+)", told)]
    if any(one.process.returncode != 0 for one in started) or len(times) != len(cluster.hosts):
        sys.exit(f"bench: {name} failed on {len(cluster.hosts)} hosts:\n{told}")
    return {"start": max(first for first, _ in times) - begun_at,
            "end": max(one.ended_at for one in started) - max(last for _, last in times), "told": told}


TOLD_MS = {"libfabric loaded": r"libfabric was loaded in ([\d.]+) ms",
           "its providers found": r"libfabric found its providers in ([\d.]+) ms",
           "ranks together": r"ranks? came together in ([\d.]+) ms"}


def parts_measure(number, contestant, cluster, folder):
    """Returns a point: the slowest rank's report about its own time in one run."""
    run = measure("shoal", contestant, cluster, folder, SHOAL_LOG="info")
    parts = {name: max(map(float, re.findall(line, run["told"]))) for name, line in TOLD_MS.items()}
    start = round(run["start"] * 1e3, 2)
    share = (parts["libfabric loaded"] + parts["its providers found"]) / start
    return {"round": number, "case": f"{len(cluster.hosts)} hosts, libfabric's share of the time to the first collective",
            "state": "unknown", "value": round(share, 4), "times_ms": {"shoal": start, **parts}}


# ---- All of them -----------------------------------------------------------------------------------------------------------

CASES = {"start": "from the command to the first collective", "end": "from the last exit to the return"}


def round_measure(number, hosts, contestants, folder):
    """Returns one point for each case. Each contestant takes each position in the order once."""
    names = list(contestants)
    names = names[number % len(names):] + names[:number % len(names)]
    with Cluster(hosts) as cluster:
        times = {name: measure(name, contestants[name], cluster, folder) for name in names}
        points = [parts_measure(number, contestants["shoal"], cluster, folder)]
    for case, text in CASES.items():
        ms = {name: round(times[name][case] * 1e3, 2) for name in contestants}
        fastest = min(value for name, value in ms.items() if name != "shoal")
        points.append({"round": number, "case": f"{hosts} hosts, {text}, time over the fastest other's", "state": "unknown",
                       "value": round(ms["shoal"] / fastest, 4), "times_ms": ms})
    return points


def summary_print(points):
    for case in dict.fromkeys(point["case"] for point in points):
        mine = [point for point in points if point["case"] == case]
        values = [point["value"] for point in mine]
        print(f"{case}: {median(values):.2f} ({min(values):.2f} .. {max(values):.2f})")
        for name in mine[0]["times_ms"]:
            times = [point["times_ms"][name] for point in mine]
            print(f"    {name:19} {median(times):9.1f} ms ({min(times):.1f} .. {max(times):.1f})")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="launchers to leave out")
    parser.add_argument("--quick", action="store_true", help="one round, no record")
    return parser.parse_args()


def main():
    if why := bench_hosts.why_impossible():
        sys.exit(f"bench: hosts cannot be emulated: {why}")
    options = arguments()
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        contestants, left_out = contestants_find(folder)
        contestants = {name: one for name, one in contestants.items() if name not in options.without}
        for name, why in left_out.items():
            say(f"bench: {name} is left out: {why}")
        points = []
        for hosts in options.hosts:
            for number in range(rounds):
                points += round_measure(number, hosts, contestants, folder)
                say(f"  {hosts} hosts, round {number + 1}: {[point['times_ms'] for point in points[-3:]]}")
    if not options.quick:
        words = " ".join(map(str, options.hosts))
        bench_record.write(OUT, {"suite": "launch", "kind": "cases", "title": "Starting and ending a job on emulated hosts", "what":
                                 "one worker on each host", "machine": bench.machine(), "left_out": left_out, "command":
                                 f"bench/bench_launch.py --hosts {words} --rounds {rounds}", "shoal_command": "shoal run",
                                 "points": points})
    summary_print(points)


if __name__ == "__main__":
    main()
