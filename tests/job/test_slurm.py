"""The engine "slurm": real daemons over two emulated hosts (tests/hosts). Prints TAP."""
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "hosts"))

from cluster import Cluster, Impossible, require  # noqa: E402
from jobs import DATA_PARALLEL, RUN_S, SHOAL, Jobs, names_in  # noqa: E402
from slurm import Slurm  # noqa: E402
from tap import Skip, expect, run_cases  # noqa: E402

RANKS = """
    import os
    print("I am", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "SM_CURRENT_HOST", "SLURM_NODEID")))
    open(os.path.join(os.environ["SM_MODEL_DIR"], "of-" + os.environ["RANK"]), "w").write("x")
"""
WAIT = """
    import os, signal, sys, time
    def save(*_):
        open("../checkpoints/of-" + os.environ["RANK"], "w").write("x")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("begun", flush=True)
    time.sleep(600)
"""


class SlurmJobs(Jobs):
    """Jobs of one Slurm. Their commands run on the first host."""

    def __init__(self, slurm):
        super().__init__()
        self.slurm = slurm

    def call(self, *words, **environment):
        variables = {name: self.environment[name] for name in ("SHOAL_JOBS", "SHOAL_PYTHON", "PYTHONPATH")}
        done = self.slurm.call(SHOAL, "job", *map(str, words), timeout=RUN_S, **{**variables, **environment})
        return done.returncode, done.stdout, done.stderr

    def document(self, script="", name="job", **fields):
        return super().document(script, name, **{"instance_count": 2, "distribution": DATA_PARALLEL, "where": {"engine": "slurm"}, **fields})


def with_slurm(case):
    """Runs a case on its own cluster."""
    def run():
        try:
            with Cluster(2) as cluster, Slurm(cluster) as slurm, SlurmJobs(slurm) as jobs:
                case(jobs)
        except Impossible as reason:
            raise Skip(str(reason)) from None
    run.__name__ = case.__name__
    return run


@with_slurm
def jobs_on_slurm_end_as_they_should(jobs):
    """Several cases in one, because Slurm's daemons take seconds to start."""
    status = jobs.run(RANKS, workers_per_host=2)
    expect(status["status"] == "Completed" and status["engine"] == "slurm" and status["engine_id"].isdigit(), status, jobs.told())
    lines = sorted(re.findall(r"I am (.*)", jobs.out))
    expect(lines == [f"{rank} 4 {rank // 2} algo-{rank // 2 + 1} {rank // 2}" for rank in range(4)], jobs.out, jobs.err)
    expect(names_in(jobs.folder() / "model.tar.gz") == ["of-0", "of-1", "of-2", "of-3"])

    status = jobs.run("raise ValueError('no such column')", name="raises", code=1)
    expect(re.fullmatch(r"algo-[12]: rank [01] exited with code 1: ValueError: no such column", status["failure_reason"]), status)

    jobs.start(WAIT, name="stopped")
    for host in ("algo-1", "algo-2"):
        jobs.wait_for_line("begun", "stopped", host)
    code, out, err = jobs.call("stop", "stopped", "--wait")
    expect(code == 0 and jobs.status("stopped")["status"] == "Stopped", code, out, err, jobs.told("stopped"))
    expect(sorted(path.name for path in (jobs.folder("stopped") / "checkpoints").iterdir()) == ["of-0", "of-1"])

    jobs.start(RANKS, name="waits", where={"engine": "slurm", "options": {"sbatch": ["--hold"]}})
    expect(jobs.status("waits")["status"] == "Starting", jobs.told("waits"))
    jobs.call("stop", "waits")
    expect(jobs.status("waits")["status"] == "Stopped", jobs.told("waits"))

    jobs.start(RANKS, name="cancelled", where={"engine": "slurm", "options": {"sbatch": ["--hold"]}})
    jobs.slurm.call("scancel", jobs.status("cancelled")["engine_id"])
    jobs.wait_for(lambda: jobs.status("cancelled")["status"] == "Failed", "the end of a cancelled job", "cancelled")
    reason = jobs.status("cancelled")["failure_reason"]
    expect(re.match(r"Slurm's job \d+ has ended without a word of its own: CANCELLED", reason), reason)

    code, out, err = jobs.call("run", jobs.document(RANKS, "refused", where={"engine": "slurm", "options": {"partition": "none"}}))
    expect(code == 1 and "sbatch exited with code 1" in err and "partition" in err and len(err.splitlines()) == 1, code, out, err)
    expect(not jobs.folder("refused").exists())


def machine_without_slurm_is_told():
    with Jobs() as jobs:
        code, out, err = jobs.call("run", jobs.document("pass", where={"engine": "slurm"}), PATH="/nowhere")
        expect(code == 1 and "there is no sbatch on PATH" in err and len(err.splitlines()) == 1, code, out, err)
        code, out, err = jobs.call("run", jobs.document("pass", where={"engine": "slurm", "options": {"partitoin": "x"}}))
        expect(code == 1 and "where.options.partitoin is not known" in err and not jobs.folder().exists(), code, out, err)


if __name__ == "__main__":
    try:
        require()
    except Impossible as reason:
        print(f"1..0 # SKIP {reason}")
        sys.exit(0)
    run_cases([jobs_on_slurm_end_as_they_should, machine_without_slurm_is_told])
