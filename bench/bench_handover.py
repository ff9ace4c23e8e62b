#!/usr/bin/env python3
"""Measures how long a pipeline takes to hand a message over inside a host, compared with MPI_Send and MPI_Recv of Open MPI and
MPICH.

  bench/bench_handover.py                       16 MiB, seven rounds
  bench/bench_handover.py --bytes 1048576 --rounds 3

Needs `ninja -C build bench/handover_shoal` and the peers' compilers; a peer whose compiler is missing is left out. Rank 0 writes
a message, hands it over to rank 1, which reads it and answers. Each round runs each library once, in rotated order. `handed` is
from the last byte written to the message being there; `whole` also has reading and the answer; `least` is the shortest `handed`
of a run, which other programs on the machine disturb least. Of Open MPI's two ways to wait the faster one counts. Prints the
medians over the rounds, and the ratio to the fastest peer in the same round: median, least and most.
"""
import argparse
import json
import shutil
import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
OPENMPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", "--mca", "mpi_yield_when_idle"]
LAUNCH = {"shoal": [[str(BUILD / "shoal"), "run", "--bind", "none", "-n", "2"]], "openmpi": [[*OPENMPI, "0"], [*OPENMPI, "1"]],
          "mpich": [["mpirun.mpich", "-n", "2"]]}
KEYS = ("handed_us", "whole_us", "least_handed_us")
RUN_S = 120


def programs():
    """Returns the programs by library, after building those of the peers."""
    found = {"shoal": BUILD / "bench/handover_shoal"}
    for name in ("openmpi", "mpich"):
        compiler, program = f"mpicc.{name}", BUILD / f"handover_{name}"
        if shutil.which(compiler) and shutil.which(LAUNCH[name][0][0]):
            subprocess.run([compiler, "-O3", "-std=gnu11", "-o", program, ROOT / "bench/handover_mpi.c"], check=True)
            found[name] = program
    return found


def measure(name, program, arguments):
    """Returns each figure of a library's better setting."""
    found = []
    for launch in LAUNCH[name]:
        command = [*launch, str(program), str(arguments.bytes), str(arguments.turns)]
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=RUN_S).stdout
        line = next(line for line in out.splitlines() if "handed_us" in line)
        found.append(json.loads(line[line.index("{"):]))
    return {key: min(each[key] for each in found) for key in KEYS}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="Exit codes: 0 success, 1 a program failed, 2 invalid arguments.")
    parser.add_argument("--bytes", type=int, default=16 << 20, help="of the message (default 16 MiB)")
    parser.add_argument("--turns", type=int, default=40, help="messages of a run (default 40)")
    parser.add_argument("--rounds", type=int, default=7, help="(default 7)")
    arguments = parser.parse_args()
    found, rounds = programs(), []
    for number in range(arguments.rounds):
        names = list(found)
        names = names[number % len(names):] + names[:number % len(names)]
        rounds.append({name: measure(name, found[name], arguments) for name in names})
    print(f"{arguments.bytes} bytes, {arguments.turns} messages, {arguments.rounds} rounds; microseconds, medians")
    for name in found:
        handed, whole, least = (statistics.median(each[name][key] for each in rounds) for key in KEYS)
        print(f"{name:8} handed {handed:9.1f}   whole {whole:9.1f}   least {least:9.1f}")
    for key in KEYS:
        ratios = sorted(each["shoal"][key] / min(each[name][key] for name in found if name != "shoal") for each in rounds) \
            if len(found) > 1 else []
        if ratios:
            print(f"shoal / fastest peer, {key[:-3]}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
