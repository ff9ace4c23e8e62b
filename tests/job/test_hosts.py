#!/usr/bin/env python3
"""The engine "hosts": `shoal job run` once on each machine. Here all of them are this machine, but their agents do not know
that."""
import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import time

from shoal.job import processes
from shoal.job.document import Job, Where
from shoal.job.document.folder import HostState
from shoal.job.engines import hosts, liveness
from shoal.job.engines.shared import folder_create
from jobs import DATA_PARALLEL, RUN_S, SHOAL, Jobs, Machines, names_in, where
from tap import expect, run_cases

WAIT = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"
RANKS = """
    import os
    print("I am", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "SM_CURRENT_HOST")))
    open(os.path.join(os.environ["SM_MODEL_DIR"], "of-" + os.environ["RANK"]), "w").write("x")
"""


def long_ago(folder):
    """As if the folder had had no sign of life for an hour."""
    os.utime(folder.path / "status.json", (time.time() - 3600, time.time() - 3600))


def machines_are_joined_in_a_shared_folder():
    with Jobs() as jobs:
        document = jobs.document(RANKS, instance_count=2, workers_per_host=2, distribution=DATA_PARALLEL, where=where())
        done = Machines(jobs, document, 2).wait()
        expect([code for code, _, _ in done] == [0, 0], done, jobs.told())
        for index, (_, out, _) in enumerate(done):  # each shows its own host's
            lines = sorted(re.findall(r"I am (.*)", out))
            expect(lines == [f"{2 * index + rank} 4 {index} algo-{index + 1}" for rank in range(2)], done)
        expect(jobs.status()["status"] == "Completed" and jobs.status()["model"], jobs.told())
        expect(names_in(jobs.folder() / "model.tar.gz") == ["of-0", "of-1", "of-2", "of-3"])
        states = [json.loads((jobs.folder() / f"hosts/algo-{number}.json").read_text()) for number in (1, 2)]
        expect([state["status"] for state in states] == ["Completed", "Completed"], states)


def machines_find_their_place_in_variables():
    ways = {"slurm": ("SLURM_STEP_NUM_NODES", "SLURM_NODEID"), "openmpi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
            "kubeflow": ("PET_NNODES", "PET_NODE_RANK")}
    with Jobs() as jobs:
        for name, (count, index) in ways.items():
            document = jobs.document("import os; print('I am', os.environ['SM_CURRENT_HOST'])", name, instance_count=2, where=where())
            done = Machines(jobs, document, 2, lambda _: [], lambda number: {count: "2", index: str(number)}).wait()
            expect([code for code, _, _ in done] == [0, 0] and ["I am algo-1" in done[0][1], "I am algo-2" in done[1][1]] == [True, True], done)
        code, out, err = jobs.call("run", document, "--name", "other", **{"SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "0"})
        expect(code == 1 and "SLURM_STEP_NUM_NODES is 3, but instance_count is 2" in err, code, out, err)
        code, out, err = jobs.call("run", document, "--name", "other")
        expect(code == 1 and "nothing says which of the 2 hosts this is" in err and not jobs.folder("other").exists(), code, out, err)


def a_machine_finds_its_name_in_the_document():
    own = platform.node()
    for names, place in ((["first.example", own], 1), ([own, "second.example"], 0), ([f"not-{own}", f"{own}-too", own.split(".")[0]], 2)):
        job = Job("train.py", instance_count=len(names), where=Where("hosts", hosts=names, options={"port": 1234}))
        expect(hosts.index_find(job, {}) == place and hosts.address_find(job, {}) == (names[0], 1234), names, place)
        expect(hosts.index_find(job, {"SLURM_NNODES": str(len(names)), "SLURM_NODEID": "0"}) == 0, "what started it knows better")
    with Jobs() as jobs:
        document = jobs.document(RANKS, instance_count=2, distribution=DATA_PARALLEL,
                                 where={"engine": "hosts", "hosts": [own, "second.example"], "options": {"address": "127.0.0.1"}})
        done = Machines(jobs, document, 2, lambda index: [] if index == 0 else ["--host-index", "1"]).wait()
        expect([code for code, _, _ in done] == [0, 0] and "I am 0 2 0 algo-1" in done[0][1], done, jobs.told())


def machines_without_a_shared_folder_keep_their_own():
    with Jobs() as jobs:
        document = jobs.document(RANKS, instance_count=2, distribution=DATA_PARALLEL, where={"engine": "hosts", "options": {"shared": False}})
        port = str(processes.free_port())
        done = Machines(jobs, document, 2, of_machine=lambda index: {
            "SHOAL_JOBS": str(jobs.root / f"of-{index}"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SHOAL_SECRET": "s" * 32}).wait()
        expect([code for code, _, _ in done] == [0, 0], done)
        for index in range(2):
            expect(names_in(jobs.root / f"of-{index}/job/model.tar.gz") == [f"of-{index}"])


def a_machine_with_a_folder_of_its_own_is_not_lost_for_want_of_others():
    """It hears nothing of the first host, however long the job runs."""
    with Jobs() as jobs:
        folder = folder_create(Job("train.py", name="own", instance_count=2, where=Where("hosts", options={"shared": False})), jobs.jobs)
        long_ago(folder)
        expect(hosts.refresh(folder, folder.status()).failure_reason == "the process that runs the job was never started")
        status = dataclasses.replace(folder.status(), pid=os.getpid(), process=processes.identity(os.getpid()), machine="own")
        folder.status_write(status)
        long_ago(folder)
        expect(hosts.refresh(folder, status) == status, "it runs, whatever its signs of life")
        status = dataclasses.replace(status, process=status.process + "1")
        folder.status_write(status)
        expect("is gone: it was killed" in (hosts.refresh(folder, status).failure_reason or ""), hosts.refresh(folder, status))


def elsewhere(status):
    """As of a process in another pid namespace of a machine of our name, where the pid is another's."""
    return dataclasses.replace(status, status="Training", machine=platform.node(), pid=1, process="boot pid:[1] time:[1] 1 7")


def readers_report_a_loss_and_write_nothing():
    with Jobs() as jobs:
        for name, options, is_lost in (("usual", {}, True), ("patient", {"silence": 600}, False)):
            folder = folder_create(Job("train.py", name=name, where=Where("hosts", options=options)), jobs.jobs)
            folder.status_write(elsewhere(folder.status()))
            expect(jobs.status(name)["status"] == "Training", jobs.told(name))
            os.utime(folder.path / "status.json", (time.time() - 90, time.time() - 90))
            before = jobs.told(name)
            status = jobs.status(name)
            expect(status["status"] == ("Failed" if is_lost else "Training"), status)
            expect(jobs.told(name) == before and folder.status().status == "Training", jobs.told(name))
            if is_lost:
                expect(re.match(r"seems lost since [\d -]+:\d\d:\d\d: the process that runs the job \(pid 1 on \S+\) has given no sign of life "
                                r"for (9\d|1\d\d) s$", status["failure_reason"]), status)
            os.utime(folder.path / "status.json")
            expect(jobs.status(name)["status"] == "Training", "it speaks again")


def a_host_gives_signs_of_life_while_it_packs():
    with Jobs() as jobs:
        document = jobs.document("""
            import os
            open(os.environ["SM_MODEL_DIR"] + "/model", "w").write("x")
            os.mkfifo("../../../.model.tar.gz.unfinished")  # whoever packs waits for a reader
        """, where=where())
        machines = Machines(jobs, document, 1)
        path = jobs.folder() / "status.json"
        jobs.wait_for(lambda: path.exists() and json.loads(path.read_text())["status"] == "Uploading", "packing")
        for file in (path, jobs.folder() / "hosts/algo-1.json"):
            first = file.stat().st_mtime
            jobs.wait_for(lambda: file.stat().st_mtime > first, f"a sign of life by {file}")
        expect(json.loads(path.read_text())["status"] == "Uploading", jobs.told())
        with open(jobs.folder() / ".model.tar.gz.unfinished", "rb") as packed:
            packed.read()
        expect([code for code, _, _ in machines.wait()] == [0], jobs.told())


def an_unreadable_state_ends_no_job():
    """As a shared folder shows it for a moment. What is right comes with the next change, and a touch is a sign of life until then."""
    with Jobs() as jobs:
        document = jobs.document("""
            import os, pathlib, time
            print("begun", flush=True)
            while not pathlib.Path("../../../go").exists():
                time.sleep(0.05)
        """, instance_count=2, where=where(silence=20))
        machines = Machines(jobs, document, 2)
        for host in ("algo-1", "algo-2"):
            jobs.wait_for_line("begun", host=host)
        path = jobs.folder() / "hosts/algo-2.json"
        jobs.wait_for(lambda: json.loads(path.read_text())["status"] == "Training", "the state of a host that trains")
        path.write_text("")
        for touch in ("first", "second"):
            before = path.stat().st_mtime_ns
            jobs.wait_for(lambda: path.stat().st_mtime_ns > before, f"the {touch} touch")
        status = (jobs.folder() / "status.json").read_text()
        (jobs.folder() / "status.json").write_text("")
        code, out, err = jobs.call("status", "job")
        expect(code == 2 and "status.json holds no status of a job" in err and len(err.splitlines()) == 1, code, out, err)
        (jobs.folder() / "status.json").write_text(status)
        (jobs.folder() / "go").touch()
        done = machines.wait()
        expect([code for code, _, _ in done] == [0, 0] and all("Traceback" not in err for _, _, err in done), done, jobs.told())


def a_touch_of_an_unreadable_state_is_a_sign_of_life():
    with Jobs() as jobs:
        folder = folder_create(Job("train.py", name="touched", instance_count=2, where=Where("hosts")), jobs.jobs)
        member = hosts.Member(folder, 0)
        other, = member.others
        path = folder.host_state(other.name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(HostState(other.name, status="Training"))))
        member._other_look(other)
        path.write_text("")
        for number, is_touched in enumerate((True, True, False)):
            other.heard_at = time.monotonic() - 2 * liveness.SILENCE_S
            if is_touched:
                os.utime(path, (number + 1, number + 1))
            member._other_look(other)
            expect(other.is_lost != is_touched and (other.ending is None) == is_touched, number, other)


def failure_of_one_machine_ends_all():
    with Jobs() as jobs:
        document = jobs.document("""
            import os, sys, time
            if os.environ["SM_CURRENT_HOST"] == "algo-2":
                raise ValueError("no such column")
            time.sleep(600)
        """, instance_count=2, where=where())
        done = Machines(jobs, document, 2).wait()
        expect([code for code, _, _ in done] == [1, 1], done, jobs.told())
        for _, _, err in done:
            expect("job failed: algo-2: train.py exited with code 1: ValueError: no such column" in err, done)
        expect(jobs.status()["failure_reason"] == "algo-2: train.py exited with code 1: ValueError: no such column", jobs.told())
        jobs.wait_for_silence()


def host_missing_at_the_start_is_named():
    with Jobs() as jobs:
        document = jobs.document(WAIT, instance_count=2, where=where(start_timeout=1))
        code, out, err = jobs.call("run", document, "--host-index", "0")
        said = "algo-2 was not there within 1 s: start `shoal job run` on each of the 2 machines"
        expect(code == 1 and f"job failed: {said}" in err and not out, code, out, err)
        expect(jobs.status()["failure_reason"] == said, jobs.told())
        code, out, err = jobs.call("run", document, "--host-index", "1", "--name", "second")
        expect(code == 1 and "the first host has not made" in err and "within 1 s" in err and not jobs.folder("second").exists(), code, out, err)
        jobs.wait_for_silence()


def host_lost_in_the_middle_is_named():
    with Jobs() as jobs:
        document = jobs.document(WAIT, instance_count=2, stop_grace=1, where=where(silence=10))
        machines = Machines(jobs, document, 2)
        for host in ("algo-1", "algo-2"):
            jobs.wait_for_line("begun", host=host)
        lost = json.loads((jobs.folder() / "hosts/algo-2.json").read_text())["pid"]
        os.kill(lost, signal.SIGKILL)
        done = machines.wait()
        expect([code for code, _, _ in done] == [1, 1], done, jobs.told())
        expect(re.match(r"algo-2 \(\S+\) was lost: no sign of life for \d+ s$", jobs.status()["failure_reason"]), jobs.told())
        jobs.wait_for_silence()


def first_host_lost_is_found_out():
    with Jobs() as jobs:
        document = jobs.document(WAIT, instance_count=2, stop_grace=1, where=where(silence=10))
        machines = Machines(jobs, document, 2)
        for host in ("algo-1", "algo-2"):
            jobs.wait_for_line("begun", host=host)
        lost = json.loads((jobs.folder() / "hosts/algo-1.json").read_text())["pid"]
        os.kill(lost, signal.SIGKILL)
        done = machines.wait()
        expect([code for code, _, _ in done] == [1, 1], done, jobs.told())
        expect(jobs.status()["failure_reason"].startswith(f"the process that ran the job (pid {lost}) is gone"), jobs.told())
        jobs.wait_for_silence()


# Each rank writes a checkpoint. The first time, rank 1 then fails while the others wait for it.
FAILS_ONCE = """
    import os, pathlib, time
    rank = os.environ.get("RANK") or str(os.environ["SM_CURRENT_HOST"] == "algo-2" and 1 or 0)
    checkpoint = pathlib.Path("../checkpoints", "of-" + rank)
    is_first = not checkpoint.exists()
    checkpoint.write_text("epoch 1")
    print("rank", rank, "begins" if is_first else "goes on from " + checkpoint.read_text(), flush=True)
    if is_first and rank == "1":
        raise ValueError("not this time")
    if is_first and "RANK" in os.environ:
        time.sleep(600)
    open(os.path.join(os.environ["SM_MODEL_DIR"], "of-" + rank), "w").close()
"""


def workers_of_all_machines_start_again():
    with Jobs() as jobs:
        document = jobs.document(FAILS_ONCE, instance_count=2, restarts=2, distribution=DATA_PARALLEL, where=where())
        done = Machines(jobs, document, 2).wait()
        expect([code for code, _, _ in done] == [0, 0], done, jobs.told())
        for rank, host in enumerate(("algo-1", "algo-2")):
            lines = re.findall(r"^\d\| rank (\d .*)", jobs.log(host=host), re.MULTILINE)
            expect(lines == [f"{rank} begins", f"{rank} goes on from epoch 1"], jobs.told())
        expect(jobs.status()["status"] == "Completed", jobs.told())
        expect(names_in(jobs.folder() / "model.tar.gz") == ["of-0", "of-1"], jobs.told())
        jobs.wait_for_silence()


def a_plain_script_starts_again_on_its_machine():
    with Jobs() as jobs:
        document = jobs.document(FAILS_ONCE, instance_count=2, restarts=1, where=where())
        done = Machines(jobs, document, 2).wait()
        expect([code for code, _, _ in done] == [0, 0], done, jobs.told())
        expect(re.findall(r"rank (\d .*)", jobs.log()) == ["0 begins"], jobs.told())
        expect(re.findall(r"rank (\d .*)", jobs.log(host="algo-2")) == ["1 begins", "1 goes on from epoch 1"], jobs.told())


def a_lost_host_is_not_waited_for_by_restarts():
    with Jobs() as jobs:
        document = jobs.document(WAIT, instance_count=2, stop_grace=1, restarts=3, distribution=DATA_PARALLEL, where=where(silence=10))
        machines = Machines(jobs, document, 2)
        for host in ("algo-1", "algo-2"):
            jobs.wait_for_line("begun", host=host)
        lost = json.loads((jobs.folder() / "hosts/algo-2.json").read_text())["pid"]
        os.kill(lost, signal.SIGKILL)
        done = machines.wait()
        expect([code for code, _, _ in done] == [1, 1], done, jobs.told())
        expect("algo-2" in jobs.status()["failure_reason"] and "lost" in jobs.status()["failure_reason"], jobs.told())
        jobs.wait_for_silence()


def signal_on_one_machine_stops_all():
    with Jobs() as jobs:
        document = jobs.document(WAIT, instance_count=2, distribution=DATA_PARALLEL, where=where())
        machines = Machines(jobs, document, 2)
        for host in ("algo-1", "algo-2"):
            jobs.wait_for_line("begun", host=host)
        machines.commands[1].send_signal(signal.SIGTERM)
        done = machines.wait()
        expect([code for code, _, _ in done] == [3, 3], done, jobs.told())
        expect(jobs.status()["status"] == "Stopped", jobs.told())
        jobs.wait_for_silence()


def what_a_job_writes_for_itself_is_for_no_other_eyes():
    with Jobs() as jobs:
        old = os.umask(0)
        try:
            done = Machines(jobs, jobs.document("pass", instance_count=2, where=where(), environment={"TOKEN": "x"}), 2).wait()
        finally:
            os.umask(old)
        expect([code for code, _, _ in done] == [0, 0], done)
        for name in ("job.json", "status.json", "hosts/meet.json", "hosts/algo-1.json", "hosts/algo-1/input/config/hyperparameters.json"):
            expect((jobs.folder() / name).stat().st_mode & 0o777 == 0o600, name)


def name_is_used_once_on_all_machines():
    with Jobs() as jobs:
        document = jobs.document("pass", instance_count=2, where=where())
        expect([code for code, _, _ in Machines(jobs, document, 2).wait()] == [0, 0], jobs.told())
        before = jobs.told()
        done = Machines(jobs, document, 2).wait()
        expect([code for code, _, _ in done] == [2, 2] and all("there is a job named job already" in err for _, _, err in done), done)
        expect(jobs.told() == before)


run_cases([machines_are_joined_in_a_shared_folder, machines_find_their_place_in_variables,
           a_machine_finds_its_name_in_the_document, machines_without_a_shared_folder_keep_their_own,
           a_machine_with_a_folder_of_its_own_is_not_lost_for_want_of_others, readers_report_a_loss_and_write_nothing,
           a_host_gives_signs_of_life_while_it_packs, an_unreadable_state_ends_no_job,
           a_touch_of_an_unreadable_state_is_a_sign_of_life, failure_of_one_machine_ends_all,
           host_missing_at_the_start_is_named, host_lost_in_the_middle_is_named, first_host_lost_is_found_out,
           workers_of_all_machines_start_again, a_plain_script_starts_again_on_its_machine,
           a_lost_host_is_not_waited_for_by_restarts, signal_on_one_machine_stops_all,
           what_a_job_writes_for_itself_is_for_no_other_eyes, name_is_used_once_on_all_machines])
