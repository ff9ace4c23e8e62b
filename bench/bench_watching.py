#!/usr/bin/env python3
"""Measures how much the metrics of a job slow its steps.

  bench_watching.py [--step-ms MS] [--steps N] [--rounds N] [--quick]

An agent, in its own process, runs a job of one host and two workers (watched_worker.py), in turn, in rotated order, round by
round:

  with      the sampler reads the ranks each second, and each line goes through two metric definitions
  without   the agent keeps the log and reads nothing

Each worker prints a line in every step. A step computes for about --step-ms: 98 ms, like a step with ResNet-50's gradients
and busy ranks (docs/figures/steps.md, "Through PyTorch"). 0: one small batch, some 5 ms.

The value of a round is the mean step with metrics divided by the mean step without. It is the mean because the sampler works
during few steps, which a median would not show. The job runs on all cores of this Python: if each worker has a core and no
other core is free, the sampler takes its time from a worker.

The report also contains processor time: of a line alone, and of a copy of the flight recorders. The steps contain no copies:
copies are made 5, 15 and 35 s after the start and so on, later every 300 s, so that a run of seconds would have more of them
than a real job.

Writes docs/figures/bench-watching.jsonl (see bench/bench_record.py), and keeps the rows of other cases in it. Needs
build/torch (`make test` makes it)."""
import argparse
import json
import os
import resource
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
STEP_MS = 98
RUN_S = 10
COPY_S = 8  # the first copy is made after 5 s
LINES = 20000
DEFINITIONS = {"loss": r"loss=(.*?);", "images_per_s": r"images_per_s=(.*?);"}


# ---- The child: an agent ----------------------------------------------------------------------------------------------------

class Unwatched:
    """Has the interface of shoal.job.watching.metrics.Watching, and does nothing."""

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


def cpu_s():
    """Returns the processor seconds of this thread and of the children that have ended."""
    both = map(resource.getrusage, (resource.RUSAGE_THREAD, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def copies_timed(copy, took):
    def timed(sampler):
        began = cpu_s()
        copy(sampler)
        took.append(round(cpu_s() - began, 3))
    return timed


def agent_run(path, way):
    """Runs the job of this folder to its end, and prints the processor time of the agent itself and of its copies of the
    flight recorders."""
    from shoal.job import processes
    from shoal.job.document.folder import JobFolder
    from shoal.job.engines import agent, shared
    from shoal.job.watching import metrics
    copies = []
    if way == "without":
        metrics.Watching = Unwatched
    metrics.Sampler._dump = copies_timed(metrics.Sampler._dump, copies) if way == "copies" else lambda sampler: None
    folder = JobFolder(path.name, path.parent)
    position = agent.Position(0, folder.status().hosts, ("127.0.0.1", processes.free_port()))
    ending = agent.Agent(folder, shared.job_read(folder), position, lambda **report: None, lambda: True).run()
    if ending.status != "Completed":
        sys.exit(f"{ending.reason}\n{folder.log(position.host).read_text()[-2000:]}")
    print(json.dumps({"agent_cpu_s": round(time.process_time(), 3), **({"copies_cpu_s": copies} if way == "copies" else {})}))


# ---- One run ----------------------------------------------------------------------------------------------------------------

def measure(way, steps, batches, jobs):
    """Returns how long the steps took, in one job."""
    from shoal.job.document import Job, Metric
    from shoal.job.engines import shared
    job = Job(str(ROOT / "bench/watched_worker.py"), name=way, workers_per_host=WORKERS,
              distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
              metric_definitions=[Metric(name, expression) for name, expression in DEFINITIONS.items()],
              environment={"OMP_NUM_THREADS": "1", "WATCHED_STEPS": str(steps), "WATCHED_BATCHES": str(batches)})
    folder = shared.folder_create(job, jobs)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "SHOAL_COMMAND": str(ROOT / "build/shoal"),
                   "SHOAL_LIBRARY": str(ROOT / "build/libshoal.so")}
    done = subprocess.run([PYTHON, __file__, "--agent", folder.path, way], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench: the job {way} metrics failed:\n{done.stderr[-4000:]}")
    told = json.loads((folder.base("algo-1") / "output/data/steps.json").read_text())
    numbers = folder.metrics.read_text().count("\n") if folder.metrics.exists() else 0
    if (numbers > 0) != (way != "without"):
        sys.exit(f"bench: the job {way} metrics has {numbers} numbers in {folder.metrics}")
    return {**told, **json.loads(done.stdout), "numbers": numbers}


# ---- All of them ------------------------------------------------------------------------------------------------------------

def jobs_folder():
    return tempfile.TemporaryDirectory(prefix="shoal-watching-")


def batches_of(step_ms):
    """Returns the number of batches whose step takes about that long, from a measured step of 20."""
    with jobs_folder() as jobs:
        return max(round(20 * step_ms / measure("without", 20, 20, Path(jobs))["median_ms"]), 1) if step_ms else 1


def round_measure(number, case, steps, batches):
    ways = WAYS if number % 2 == 0 else WAYS[::-1]
    with jobs_folder() as jobs:
        runs = {way: measure(way, steps, batches, Path(jobs)) for way in ways}
    ratio = runs["with"]["mean_ms"] / runs["without"]["mean_ms"]
    return {"round": number, "case": case, "state": "unknown", "value": round(ratio, 5), "runs": runs}


def line_us():
    """Returns the agent's processor time for a line with two numbers."""
    from shoal.job.document import Metric
    from shoal.job.document.folder import JobFolder
    from shoal.job.watching import metrics
    with jobs_folder() as jobs:
        folder = JobFolder("lines", Path(jobs))
        folder.create()
        with metrics.Watching([Metric(*one) for one in DEFINITIONS.items()], folder, "algo-1") as watching:
            began = time.process_time()
            for step in range(LINES):
                watching.line(f"{step % WORKERS}| step {step} loss=2.3026; images_per_s=12345;")
            return round((time.process_time() - began) / LINES * 1e6, 1)


def costs_measure(batches, step_ms):
    """Returns points: the processor time of lines and of copies of the flight recorders."""
    with jobs_folder() as jobs:
        copies = measure("copies", round(COPY_S * 1e3 / step_ms), batches, Path(jobs))["copies_cpu_s"]
    found = {"processor time of a line with two numbers, us": line_us(),
             "processor time of a copy of the flight recorders, s": median(copies)}
    return [{"round": 0, "case": case, "state": "unknown", "value": value} for case, value in found.items()]


def summary_print(points, costs):
    values = [point["value"] for point in points]
    print(f"a step with metrics takes {median(values):.4f} of one without ({min(values):.4f} .. {max(values):.4f}); promised: {PROMISED}")
    for way in WAYS:
        runs = [point["runs"][way] for point in points]
        print(f"    {way:8}", *(f"{name} {median(run[name] for run in runs)}" for name in runs[0]), sep="  ")
    for cost in costs:
        print(f"{cost['case']}: {cost['value']}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=STEP_MS, help=f"computation of a step ({STEP_MS})")
    parser.add_argument("--steps", type=int, help=f"steps of a run (as many as take {RUN_S} s; 10000 of one batch)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 20 steps, no record")
    parser.add_argument("--agent", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    usual = round(RUN_S * 1e3 / options.step_ms) if options.step_ms else 10000
    options.steps = 20 if options.quick else options.steps or usual
    return options


def record_write(options, points):
    import bench
    import bench_record
    cases = {point["case"] for point in points}
    kept = [point for point in (bench_record.read(OUT)["points"] if OUT.exists() else []) if point["case"] not in cases]
    command = f"bench/bench_watching.py --step-ms {options.step_ms:g} --steps {options.steps} --rounds {options.rounds}"
    bench_record.write(OUT, {"suite": "watching", "kind": "cases", "title": "What the metrics of a job cost its steps", "what":
                             f"{WORKERS} workers on one host", "machine": bench.machine(), "command": command,
                             "shoal_command": "shoal run", "points": kept + points})


def main():
    options = arguments()
    if options.agent:
        return agent_run(Path(options.agent[0]), options.agent[1])
    if not PYTHON.exists():
        sys.exit(f"bench: there is no {PYTHON}: `make test` makes it")
    batches = batches_of(options.step_ms)
    length = f"about {options.step_ms:g} ms" if options.step_ms else "one small batch"
    case = f"mean step of {length} with metrics, over that without"
    points = []
    for number in range(1 if options.quick else options.rounds):
        points.append(round_measure(number, case, options.steps, batches))
        print(f"  round {number + 1}: {points[-1]}", file=sys.stderr, flush=True)
    costs = costs_measure(batches, points[0]["runs"]["without"]["mean_ms"])
    if not options.quick:
        record_write(options, points + costs)
    summary_print(points, costs)


if __name__ == "__main__":
    main()
