"""The engine "slurm": real daemons over two emulated hosts (tests/hosts). Prints TAP."""
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "hosts"))

from cluster import Cluster, Impossible, require  # noqa: E402
from jobs import DATA_PARALLEL, RUN_S, SHOAL, Jobs, names_in  # noqa: E402
from shoal.job.document import Job, Where  # noqa: E402
from shoal.job.document.folder import JobFolder  # noqa: E402
from shoal.job.engines import slurm  # noqa: E402
from shoal.job.engines.shared import EngineError  # noqa: E402
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

    def variables(self):
        return {name: self.environment[name] for name in ("SHOAL_JOBS", "SHOAL_PYTHON", "PYTHONPATH")}

    def call(self, *words, **environment):
        done = self.slurm.call(SHOAL, "job", *map(str, words), timeout=RUN_S, **{**self.variables(), **environment})
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

    expect("--cpus-per-task=2" in (jobs.folder() / "slurm.sh").read_text(), "a core for each worker")

    status = jobs.run("raise ValueError('no such column')", name="raises", code=1)
    expect(re.fullmatch(r"algo-[12]: rank [01] exited with code 1: ValueError: no such column", status["failure_reason"]), status)

    jobs.start(WAIT, name="stopped")
    for host in ("algo-1", "algo-2"):
        jobs.wait_for_line("begun", "stopped", host)
    code, out, err = jobs.call("stop", "stopped", "--wait")
    expect(code == 0 and jobs.status("stopped")["status"] == "Stopped", code, out, err, jobs.told("stopped"))
    expect(sorted(path.name for path in (jobs.folder("stopped") / "checkpoints").iterdir()) == ["of-0", "of-1"])

    jobs.start(RANKS, name="waits", where={"engine": "slurm", "options": {"sbatch": ["--hold"]}})
    status = jobs.status("waits")
    expect((status["status"], status["waits_for"]) == ("Pending", "JobHeldUser"), status)
    expect("status        Pending (JobHeldUser)" in jobs.call("status", "waits")[1])
    jobs.call("stop", "waits")
    expect(jobs.status("waits")["status"] == "Stopped", jobs.told("waits"))

    jobs.start(RANKS, name="cancelled", where={"engine": "slurm", "options": {"sbatch": ["--hold"]}})
    jobs.slurm.call("scancel", jobs.status("cancelled")["engine_id"])
    jobs.wait_for(lambda: jobs.status("cancelled")["status"] == "Failed", "the end of a cancelled job", "cancelled")
    reason = jobs.status("cancelled")["failure_reason"]
    expect(re.match(r"Slurm's job \d+ has ended without a message: CANCELLED", reason), reason)

    code, out, err = jobs.call("run", jobs.document(RANKS, "refused", where={"engine": "slurm", "options": {"partition": "none"}}))
    expect(code == 1 and "sbatch exited with code 1" in err and "partition" in err and len(err.splitlines()) == 1, code, out, err)
    expect(not jobs.folder("refused").exists())


# The first run waits to be ended; the next one completes with what the first has left.
TWICE = """
    import os, pathlib, time
    kept = pathlib.Path("../checkpoints/of-" + os.environ["RANK"])
    print("begun", flush=True)
    if not kept.exists():
        kept.write_text("x")
        time.sleep(600)
    open(os.path.join(os.environ["SM_MODEL_DIR"], "of-" + os.environ["RANK"]), "w").write("x")
"""


@with_slurm
def a_job_that_slurm_begins_anew_is_followed_and_a_time_limit_is_named(jobs):
    """Slurm sends SIGTERM up to a minute earlier than it was asked, so that a minute's limit comes soon."""
    jobs.start(WAIT, name="limited", where={"engine": "slurm", "options": {"time": 1}})
    jobs.wait_for_line("begun", name="limited")
    command = subprocess.Popen([*jobs.slurm.cluster.hosts[0].enter(), SHOAL, "job", "run", jobs.document(TWICE)], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env={**jobs.slurm.environment, **jobs.variables()})
    for host in (1, 2):
        jobs.wait_for_line("begun", host=f"algo-{host}")
        jobs.wait_for(lambda: (jobs.folder() / f"checkpoints/of-{host - 1}").exists(), "a checkpoint")
    number = jobs.status()["engine_id"]
    done = jobs.slurm.call("scontrol", "requeue", number)
    expect(done.returncode == 0, done)
    jobs.wait_for(lambda: jobs.status()["status"] == "Requeued", "the status Requeued")
    done = jobs.slurm.call("scontrol", "update", f"jobid={number}", "StartTime=now")
    out, err = command.communicate(timeout=RUN_S)
    status = jobs.status()
    expect((command.returncode, status["status"], status["run"]) == (0, "Completed", 1), command.returncode, out, err, jobs.told())
    expect("job: Completed" in err and "job: Stopped" not in err and "job: Failed" not in err, err)
    expect(status["ended"] - status["started"] < 60, "the time in the queue is no training", status)
    expect(names_in(jobs.folder() / "model.tar.gz") == ["of-0", "of-1"])
    jobs.wait_for(lambda: jobs.status("limited")["status"] == "Failed", "the time limit", "limited")
    status = jobs.status("limited")
    expect((status["failure_reason"], status["exit_code"]) == ("Slurm's time limit of 1:00 has come", 124), status, jobs.told("limited"))


def the_script_says_what_the_document_means():
    def script(**fields):
        options = fields.pop("options", {})
        job = Job("train.py", name="job", where=Where("slurm", options=options), **fields)
        return slurm.script_text(job, JobFolder("job", pathlib.Path("/jobs")))
    text = script(workers_per_host=4, max_run=3600)
    expect("#SBATCH --signal=TERM@180\n" in text and "#SBATCH --time=73\n" in text and "#SBATCH --cpus-per-task=4\n" in text, text)
    text = script(workers_per_host=4, options={"time": "0:10", "cpus_per_task": 8})
    expect("#SBATCH --signal=TERM@5\n" in text and text.count("--time") == 1 and "--cpus-per-task=4" not in text, text)
    expect("--cpus-per-task=4" not in script(workers_per_host=4, options={"sbatch": ["--cpus-per-gpu=2"]}))
    expect("--time" not in script(), "a partition's own limit holds")
    for text, seconds in (("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-2", 93600), ("1-0:30", 88200), ("UNLIMITED", None), ("", None)):
        expect(slurm.seconds_of(text) == seconds, text, slurm.seconds_of(text))
    for word in ("--array=1-2", "-a1-2", "-a"):
        try:
            expect(not script(options={"sbatch": [word]}), word)
        except EngineError as error:
            expect("where.options.sbatch has --array" in str(error), error)


def a_member_may_begin_before_sbatch_has_returned():
    """Here sbatch lets the job write its status first."""
    with Jobs() as jobs:
        commands(jobs, sbatch=f"""sed -i 's/"pid": null/"pid": 7/; s/"Starting"/"Training"/' {jobs.folder()}/status.json; echo 42""")
        jobs.start("pass", where={"engine": "slurm"})
        status = jobs.status()
        expect((status["engine_id"], status["pid"], status["status"]) == ("42", 7, "Training"), status)
        expect((jobs.folder() / "slurm.sh").stat().st_mode & 0o777 == 0o600, "setup may hold a token")


def a_failure_is_final_once_slurm_has_ended_the_job():
    """After a node failure the members write long before Slurm begins the job anew."""
    with Jobs() as jobs:
        commands(jobs, sbatch="echo 42")
        jobs.start("pass", where={"engine": "slurm"})
        folder = JobFolder("job", jobs.jobs)
        folder.status_write(dataclasses.replace(folder.status(), status="Failed", failure_reason="algo-2 is lost", exit_code=1, ended=time.time()))
        for state, seen in (("RUNNING|None", "Stopping"), ("COMPLETING|None", "Stopping"), ("PENDING|BeginTime", "Requeued"), ("NODE_FAIL|None", "Failed")):
            commands(jobs, squeue=f"echo '{state}'")
            status = jobs.status()
            expect(status["status"] == seen and (status["failure_reason"] == "algo-2 is lost") == (seen != "Requeued"), state, status)
        commands(jobs, squeue="exit 1")
        expect(jobs.status()["status"] == "Failed", "Slurm is asked no more")


def a_host_that_does_not_answer_does_not_hold_a_job_for_ever():
    """Slurm calls its job COMPLETING until an operator mends the host. A job that ended long ago costs no question."""
    with Jobs() as jobs:
        commands(jobs, sbatch="echo 42", squeue=f"echo asked >> {jobs.root}/asked; echo 'COMPLETING|None'")
        jobs.start("pass", where={"engine": "slurm"})
        folder = JobFolder("job", jobs.jobs)
        started = dataclasses.replace(folder.status(), status="Training", pid=1, process="boot pid:[1] time:[1] 1 7", machine="elsewhere")
        failed = dataclasses.replace(started, status="Failed", failure_reason="algo-2 is lost", exit_code=1)
        for ago, seen, is_asked in ((1, "Stopping", True), (600, "Failed", True), (90000, "Failed", False)):
            folder.status_write(dataclasses.replace(failed, ended=time.time() - ago))
            (jobs.root / "asked").unlink(missing_ok=True)
            expect(jobs.status()["status"] == seen and (jobs.root / "asked").exists() == is_asked, ago, jobs.told())
        for ago, seen in ((60, "Training"), (600, "Failed")):
            folder.status_write(started)
            os.utime(folder.path / "status.json", (time.time() - ago, time.time() - ago))
            expect(jobs.status()["status"] == seen, ago, jobs.told())
        expect(folder.status().status == "Training" and not (folder.path / slurm.OVER).exists(), "Slurm may start it again")


def commands(jobs, **texts):
    """Stand-ins for Slurm's commands, first on PATH."""
    place = jobs.root / "bin"
    if not place.exists():
        place.mkdir()
        jobs.environment["PATH"] = f"{place}:{jobs.environment['PATH']}"
    for name, text in {"squeue": "echo 'RUNNING|None'", **texts}.items():
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)


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
    run_cases([jobs_on_slurm_end_as_they_should, a_job_that_slurm_begins_anew_is_followed_and_a_time_limit_is_named,
               the_script_says_what_the_document_means, a_member_may_begin_before_sbatch_has_returned,
               a_failure_is_final_once_slurm_has_ended_the_job, a_host_that_does_not_answer_does_not_hold_a_job_for_ever,
               machine_without_slurm_is_told])
