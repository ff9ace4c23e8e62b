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

from shoal.job import hosts, processes
from shoal.job.document import Job, Where
from shoal.job.folder import HostState, file_replace
from shoal.job.places import folder_create
from jobs import DATA_PARALLEL, RUN_S, SHOAL, Jobs, Machines, names_in, where
from tap import expect, run_cases

WAIT = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"
RANKS = """
    import os
    print("I am", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "SM_CURRENT_HOST")))
    open(os.path.join(os.environ["SM_MODEL_DIR"], "of-" + os.environ["RANK"]), "w").write("x")
"""


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
        expect(code == 1 and "SLURM_STEP_NUM_NODES is 3, and instance_count is 2" in err, code, out, err)
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
        status = dataclasses.replace(folder.status(), created=time.time() - 3600)
        expect(hosts.lost_reason(folder, status) == "its host on this machine was never started")
        state = HostState("algo-2", machine=platform.node(), pid=os.getpid(), pid_start=processes.start_time(os.getpid()))
        file_replace(folder.host_state("algo-2"), json.dumps(dataclasses.asdict(state)))
        expect(hosts.lost_reason(folder, status) is None, hosts.lost_reason(folder, status))
        file_replace(folder.host_state("algo-2"), json.dumps(dataclasses.asdict(dataclasses.replace(state, pid_start=1))))
        expect("the process of its host on this machine" in (hosts.lost_reason(folder, status) or ""), hosts.lost_reason(folder, status))


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
        document = jobs.document(WAIT, instance_count=2, stop_grace=1, where=where(silence=5))
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
        document = jobs.document(WAIT, instance_count=2, stop_grace=1, where=where(silence=5))
        machines = Machines(jobs, document, 2)
        for host in ("algo-1", "algo-2"):
            jobs.wait_for_line("begun", host=host)
        lost = json.loads((jobs.folder() / "hosts/algo-1.json").read_text())["pid"]
        os.kill(lost, signal.SIGKILL)
        done = machines.wait()
        expect([code for code, _, _ in done] == [1, 1], done, jobs.told())
        expect(jobs.status()["failure_reason"].startswith(f"the process of its first host (pid {lost}) is gone"), jobs.told())
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
        document = jobs.document(WAIT, instance_count=2, stop_grace=1, restarts=3, distribution=DATA_PARALLEL, where=where(silence=5))
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
           a_machine_with_a_folder_of_its_own_is_not_lost_for_want_of_others, failure_of_one_machine_ends_all,
           host_missing_at_the_start_is_named, host_lost_in_the_middle_is_named, first_host_lost_is_found_out,
           workers_of_all_machines_start_again, a_plain_script_starts_again_on_its_machine,
           a_lost_host_is_not_waited_for_by_restarts, signal_on_one_machine_stops_all, name_is_used_once_on_all_machines])
