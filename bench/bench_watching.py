#!/usr/bin/env python3
"""Measures what the metrics of a job cost its steps.

  bench_watching.py [--steps N] [--rounds N] [--quick]

In turn, in rotated order, round by round, a job of one host and two workers (watched_worker.py) is run by its agent, in a process of
its own:

  with      as always: the sampler looks at the ranks each second, and each line goes through two metric definitions
  without   the agent keeps the log and looks at nothing

The value of a round is the mean step with metrics over the mean step without. The mean, as the sampler's work falls on few steps,
which a median would not see. The job runs on this Python's cores, all of them: where each worker has a core and no other is free,
the sampler takes its time from a worker.

Writes docs/figures/bench-watching.jsonl (see bench/bench_record.py). Needs build/torch (`make test` makes it)."""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

OUT = ROOT / "docs/figures/bench-watching.jsonl"
PYTHON = ROOT / "build/torch/bin/python3"
WORKERS = 2
WAYS = ("with", "without")
PROMISED = 1.005
DEFINITIONS = {"loss": r"loss=(.*?);", "images_per_s": r"images_per_s=(.*?);"}


# ---- The child: an agent ----------------------------------------------------------------------------------------------------

class Unwatched:
    """As shoal.job.metrics.Watching, and does nothing."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def line(self, text):
        pass

    def look_at(self, pid):
        pass


def agent_run(path, way):
    """Runs the job of this folder to its end, and prints how much processor time that took the agent itself."""
    from shoal.job import agent, metrics, places, processes
    from shoal.job.folder import JobFolder
    if way == "without":
        metrics.Watching = Unwatched
    folder = JobFolder(path.name, path.parent)
    place = agent.Place(0, folder.status().hosts, ("127.0.0.1", processes.free_port()))
    ending = agent.Agent(folder, places.job_read(folder), place, lambda **report: None, lambda: True).run()
    if ending.status != "Completed":
        sys.exit(f"{ending.reason}\n{folder.log(place.host).read_text()[-2000:]}")
    print(json.dumps({"agent_cpu_s": round(time.process_time(), 3)}))


# ---- One run ----------------------------------------------------------------------------------------------------------------

def measure(way, steps, jobs):
    """How long the steps took, in one job."""
    from shoal.job import places
    from shoal.job.document import Job, Metric
    job = Job(str(ROOT / "bench/watched_worker.py"), name=way, workers_per_host=WORKERS,
              distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
              metric_definitions=[Metric(name, expression) for name, expression in DEFINITIONS.items()],
              environment={"OMP_NUM_THREADS": "1", "WATCHED_STEPS": str(steps)})
    folder = places.folder_create(job, jobs)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "SHOAL_COMMAND": str(ROOT / "build/shoal"),
                   "SHOAL_LIBRARY": str(ROOT / "build/libshoal.so")}
    done = subprocess.run([PYTHON, __file__, "--agent", folder.path, way], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench: the job {way} metrics failed:\n{done.stderr[-4000:]}")
    told = json.loads((folder.base("algo-1") / "output/data/steps.json").read_text())
    numbers = folder.metrics.read_text().count("\n") if folder.metrics.exists() else 0
    if (numbers > 0) != (way == "with"):
        sys.exit(f"bench: the job {way} metrics has {numbers} numbers in {folder.metrics}")
    return {**told, **json.loads(done.stdout), "numbers": numbers}


# ---- All of them ------------------------------------------------------------------------------------------------------------

def round_measure(number, steps):
    ways = WAYS if number % 2 == 0 else WAYS[::-1]
    with tempfile.TemporaryDirectory(prefix="shoal-watching-") as jobs:
        runs = {way: measure(way, steps, Path(jobs)) for way in ways}
    return {"round": number, "case": "mean step with metrics, over that without", "state": "unknown",
            "value": round(runs["with"]["mean_ms"] / runs["without"]["mean_ms"], 5), "runs": runs}


def summary_print(points):
    values = [point["value"] for point in points]
    print(f"a step with metrics takes {median(values):.4f} of one without ({min(values):.4f} .. {max(values):.4f}); promised: {PROMISED}")
    for way in WAYS:
        runs = [point["runs"][way] for point in points]
        print(f"    {way:8}", *(f"{name} {median(run[name] for run in runs)}" for name in runs[0]), sep="  ")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 300 steps, no record")
    parser.add_argument("--agent", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = arguments()
    if options.agent:
        return agent_run(Path(options.agent[0]), options.agent[1])
    import bench
    import bench_record
    if not PYTHON.exists():
        sys.exit(f"bench: there is no {PYTHON}: `make test` makes it")
    rounds, steps = (1, 300) if options.quick else (options.rounds, options.steps)
    points = []
    for number in range(rounds):
        points.append(round_measure(number, steps))
        bench.say(f"  round {number + 1}: {points[-1]}")
    if not options.quick:
        bench_record.write(OUT, {"suite": "watching", "kind": "cases", "title": "What the metrics of a job cost its steps", "what":
                                 f"{WORKERS} workers on one host", "machine": bench.machine(), "command":
                                 f"bench/bench_watching.py --steps {steps} --rounds {rounds}", "shoal_command": "shoal run",
                                 "points": points})
    summary_print(points)


if __name__ == "__main__":
    main()
