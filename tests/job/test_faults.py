#!/usr/bin/env python3
"""Jobs that fail on this machine. Each fault has one clear error and a true status, and leaves neither a process nor a
partial file behind."""
import json
import os
import pathlib
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import unittest.mock
import zipfile

from jobs import DATA_PARALLEL, SHOAL, Jobs, expect_failed, names_in
from shoal.job import processes
from shoal.job.document import Job
from shoal.job.engines import agent
from tap import Skip, call, expect, run_cases

WAIT = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT


def script_that_raises_is_named_with_its_rank():
    with Jobs() as jobs:
        jobs.run("""
            import os, time
            open(os.environ["SM_MODEL_DIR"] + "/half", "w").write("of a model")
            if os.environ["RANK"] == "3":
                raise ValueError("no such column")
            time.sleep(600)
        """, instance_count=2, workers_per_host=2, distribution=DATA_PARALLEL, code=1)
        expect_failed(jobs, r"^algo-2: rank 3 exited with code 1: ValueError: no such column$", 1)
        expect("shoal job: job failed: algo-2: rank 3 exited with code 1: ValueError: no such column (exit code 1;" in jobs.err, jobs.err)
        failure = (jobs.folder() / "hosts/algo-2/output/failure").read_text()
        expect(failure == "rank 3 exited with code 1: ValueError: no such column\n", failure)


def script_that_is_killed_is_named():
    with Jobs() as jobs:
        jobs.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", code=1)
        expect_failed(jobs, r"^train.py was killed by signal 9 \(SIGKILL\)$", 137)
        jobs.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", distribution=DATA_PARALLEL, name="ranks", code=1)
        expect_failed(jobs, r"^rank 0 killed by signal 11 \(Segmentation fault\)", 139, "ranks")


def words_of_a_script_are_not_those_of_the_launcher():
    """Alone and as a rank, and when the script writes to every descriptor that it has."""
    script = """
        import os, sys
        line = "shoal run: rank 0 failed first: killed by aliens\\n"
        event = '{"event": "cause", "kind": "worker", "rank": 0, "at_host": 0, "text": "killed by aliens"}\\n'
        for fd in range(1, 100):
            try:
                os.write(fd, (event if fd > 2 else line).encode())
            except OSError:
                pass
        sys.exit(7)
    """
    with Jobs() as jobs:
        jobs.run(script, code=1)
        expect_failed(jobs, r"^train.py exited with code 7$", 7)
        jobs.run(script, distribution=DATA_PARALLEL, name="ranks", code=1)
        expect_failed(jobs, r"^rank 0 exited with code 7$", 7, "ranks")


def own_failure_file_of_a_script_is_the_reason():
    with Jobs() as jobs:
        jobs.run("import os, sys; open('../output/failure', 'w').write('the disk of rank 7' + '!' * 2000); sys.exit(9)", code=1)
        expect_failed(jobs, r"^the disk of rank 7!+\.\.\.$", 9)


def script_that_hangs_is_ended_at_the_time_limit():
    with Jobs() as jobs:
        jobs.run(WAIT, max_run=1, code=1)
        expect_failed(jobs, r"^time limit: the script ran longer than max_run, 1 s$", 124)


def script_that_ignores_the_end_is_killed():
    with Jobs() as jobs:
        jobs.run(DEAF, max_run=1, stop_grace=0, distribution=DATA_PARALLEL, code=1)
        expect_failed(jobs, r"^time limit", 124)


def script_without_a_model_is_told():
    with Jobs() as jobs:
        status = jobs.run("print('nothing')")
        expect(status["status"] == "Completed" and status["model"] is None, status)
        expect("job wrote no model: its script left nothing in the folder that SM_MODEL_DIR names" in jobs.err, jobs.err)
        expect(not (jobs.folder() / "model.tar.gz").exists() and not (jobs.folder() / "output.tar.gz").exists())


def stop_gives_the_script_its_time():
    with Jobs() as jobs:
        jobs.start("""
            import os, signal, sys, time
            def save(*_):
                time.sleep(0.2)
                open("../checkpoints/last", "w").write("step 7")
                open(os.environ["SM_MODEL_DIR"] + "/model", "w").write("step 7")
                sys.exit(0)
            signal.signal(signal.SIGTERM, save)
            print("begun", flush=True)
            time.sleep(600)
        """, distribution=DATA_PARALLEL, instance_count=2)
        for host in ("algo-1", "algo-2"):
            jobs.wait_for_line("begun", host=host)
        code, out, err = jobs.call("stop", "job", "--wait")
        expect(code == 0 and "job: Stopped" in err, code, out, err)
        status = jobs.status()
        expect(status["status"] == "Stopped" and status["failure_reason"] is None and status["model"], status, jobs.told())
        expect((jobs.folder() / "checkpoints/last").read_text() == "step 7")
        expect(names_in(jobs.folder() / "model.tar.gz") == ["model"])
        expect(jobs.call("status", "job")[0] == 3)
        expect("has ended already: Stopped" in jobs.call("stop", "job")[2])
        jobs.wait_for_silence()


def stop_gives_the_program_behind_a_shell_its_time():
    """The shell ends at SIGTERM at once. Alone, and as a worker of `shoal run`."""
    with Jobs() as jobs:
        jobs.write("train.sh", '#!/bin/sh\npython3 save.py "$@"\necho "not reached"\n').chmod(0o755)
        jobs.write("save.py", """
            import os, signal, sys, time
            def save(*_):
                time.sleep(3)
                open(os.environ["SM_MODEL_DIR"] + "/../checkpoints/last", "w").write("step 7")
                print("saved", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, save)
            print("begun", flush=True)
            time.sleep(600)
        """)
        for name, fields in (("alone", {}), ("ranks", {"distribution": DATA_PARALLEL})):
            jobs.start(entry_point="train.sh", name=name, **fields)
            jobs.wait_for_line("begun", name)
            code, out, err = jobs.call("stop", name, "--wait")
            expect(code == 0 and f"{name}: Stopped" in err, code, out, err)
            expect("saved" in jobs.log(name), jobs.told(name))
            expect((jobs.folder(name) / "checkpoints/last").read_text() == "step 7")
            jobs.wait_for_silence(name)


def interrupted_command_stops_the_job():
    with Jobs() as jobs:
        command = subprocess.Popen([SHOAL, "job", "run", jobs.document(WAIT)], env=jobs.environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        expect(command.stdout.readline() == "begun\n")
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=100)
        expect(command.returncode == 3 and "stopping job" in err, command.returncode, out, err)
        expect(jobs.status()["status"] == "Stopped", jobs.told())
        jobs.wait_for_silence()


def killed_runner_is_found_out():
    with Jobs() as jobs:
        jobs.start(WAIT, distribution=DATA_PARALLEL, stop_grace=1)
        jobs.wait_for_line("begun")
        pid = jobs.status()["pid"]
        os.kill(pid, signal.SIGKILL)
        jobs.wait_for(lambda: jobs.status()["status"] == "Failed", "a status of Failed")
        expect_failed(jobs, rf"^the process that ran the job \(pid {pid}\) is gone: it was killed, or the machine was restarted$", 1)


def pid_of_another_process_is_no_runner():
    """As after a restart of the machine: the number is there, the process is another."""
    with Jobs() as jobs:
        jobs.run("pass")
        path = jobs.folder() / "status.json"
        status = json.loads(path.read_text())
        path.write_text(json.dumps({**status, "status": "Training", "ended": None, "pid": os.getpid(),
                                    "process": status["process"].replace(f" {status['pid']} ", f" {os.getpid()} ")}))
        told = jobs.status()
        expect(told["status"] == "Failed" and "is gone" in told["failure_reason"], told)


def a_job_of_the_version_before_is_followed():
    """Its records have pid_start and no `process`, and nobody touches them. On this machine the kernel knows the process; on
    another one it never counts as lost."""
    with Jobs() as jobs:
        jobs.run("pass")
        path = jobs.folder() / "status.json"
        status = json.loads(path.read_text())
        started = int(processes.identity(os.getpid()).split()[-1])
        for pid_start, machine, seen in ((started, platform.node(), "Training"), (started - 1, platform.node(), "Failed"), (started - 1, "elsewhere", "Training")):
            path.write_text(json.dumps({**{name: value for name, value in status.items() if name != "process"}, "status": "Training", "ended": None,
                                        "pid": os.getpid(), "pid_start": pid_start, "machine": machine}))
            os.utime(path, (1, 1))
            told = jobs.status()
            expect(told["status"] == seen and (seen == "Training" or "is gone" in told["failure_reason"]), told)


def one_job_that_cannot_be_asked_about_leaves_the_list_whole():
    with Jobs() as jobs:
        jobs.run("pass")
        good = json.loads((jobs.folder() / "status.json").read_text())
        for name, text in (("empty", ""), ("list", "[]"), ("elsewhere", json.dumps({**good, "engine": "later"})),
                           ("newer", json.dumps({**good, "name": "newer", "mood": "fine"})),
                           ("aws", json.dumps({**good, "status": "Training", "engine": "sagemaker", "engine_id": "x"})),
                           ("queued", json.dumps({**good, "status": "Starting", "engine": "slurm", "engine_id": "7", "pid": None}))):
            jobs.folder(name).mkdir()
            (jobs.folder(name) / "status.json").write_text(text)
        code, out, err = jobs.call("list", PATH="/nowhere")
        expect(code == 0 and not err and len(out.splitlines()) == 7, code, out, err)
        for line in (r"Completed +1 host +job", r"Completed +1 host +newer", r"Unknown +0 hosts +empty: .* holds no status of a job",
                     r"Unknown +0 hosts +list: .* holds no status of a job", r"Unknown +1 host +elsewhere: there is no engine 'later'",
                     r"Unknown +1 host +aws: (ModuleNotFoundError: No module named 'boto3'|SageMaker does not answer)",
                     r"Unknown +1 host +queued: there is no squeue on PATH"):
            expect(re.search(line, out), line, out)


def the_group_of_an_ended_runner_is_no_other():
    """While what it left running holds the pipe, its number must not be given to a stranger, whom our signal would meet. The child
    that is left writes down the state of the script until it is killed."""
    with Jobs() as jobs:
        jobs.run("""
            import os, subprocess
            loop = r"while :; do sed 's/.*) \\(.\\).*/\\1/' /proc/$0/stat || echo gone; sleep 0.05; done > ../../../states"
            subprocess.Popen(["sh", "-c", loop, str(os.getpgrp())])
            print("group", os.getpgrp(), flush=True)
        """)
        states = (jobs.folder() / "states").read_text().split()
        expect(states[-1] == "Z" and "gone" not in states, states)
        expect(_state(re.search(r"group (\d+)", jobs.out)[1]) is None)
        jobs.wait_for_silence()


def _state(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        return None


def host_lost_in_the_middle_ends_the_job():
    with Jobs() as jobs:
        jobs.start(WAIT, distribution=DATA_PARALLEL, instance_count=2)
        for host in ("algo-1", "algo-2"):
            jobs.wait_for_line("begun", host=host)
        agent, = [pid for pid in jobs.processes("shoal.job.engines.local") if '"index": 1' in open(f"/proc/{pid}/cmdline").read()]
        os.kill(agent, signal.SIGKILL)
        jobs.wait_for_end()
        expect_failed(jobs, rf"^algo-2: the agent of algo-2 \(pid {agent}\) was killed by signal 9 \(SIGKILL\)$", 137)


def host_that_cannot_begin_ends_the_job():
    with Jobs() as jobs:
        jobs.run("import os, sys, time; time.sleep(600 if os.environ['SM_CURRENT_HOST'] == 'algo-1' else 0); sys.exit(3)",
                 instance_count=2, code=1)
        expect_failed(jobs, r"^algo-2: train.py exited with code 3$", 3)


def a_user_without_a_home_is_told_what_to_set():
    with Jobs() as jobs:
        python = "/usr/bin/python3"
        if os.getuid() or not os.path.exists(python):
            raise Skip("needs root, who can become another user, and a Python that all may use")
        setpriv = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", "env", "-i", f"PATH={os.environ['PATH']}",
                   f"SHOAL_PYTHON={python}", f"PYTHONPATH={os.environ['PYTHONPATH']}"]
        locked = jobs.root / "locked"
        locked.mkdir(mode=0o700)
        jobs.root.chmod(0o755)
        for variables, word, said in (([], "list", "user 12345 has no home folder: let SHOAL_JOBS name the folder of jobs"),
                                      ([f"SHOAL_JOBS={locked}/jobs"], "list", "Permission denied"),
                                      ([f"HOME={locked}"], "run", "SHOAL_JOBS names another folder")):
            document = jobs.document("pass")
            document.chmod(0o644)
            code, out, err = call(*setpriv, *variables, SHOAL, "job", word, *([document] if word == "run" else []), cwd="/")
            expect(code and said in err and len(err.splitlines()) == 1 and "SHOAL_JOBS" in err, word, code, out, err)


def a_log_that_the_terminal_cannot_show_ends_nobody():
    with Jobs() as jobs:
        code, out, err = jobs.call("run", jobs.document("import sys; sys.stdout.buffer.write('\u2588 done\\n'.encode())"), PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
        expect(code == 0 and "\\u2588 done" in out, code, out, err)


def jobs_below_the_source_are_not_copied_with_it():
    with Jobs() as jobs:
        jobs.write("more.py", "")
        for name in ("first", "second"):
            code, out, err = jobs.call("run", jobs.document("import os; print(sorted(os.listdir('.')))", name), SHOAL_JOBS=str(jobs.root / "source/jobs"))
            expect(code == 0 and "'jobs', 'more.py', 'train.py']" in out, code, out, err)
            expect(not any((jobs.root / f"source/jobs/{name}/hosts/algo-1/code/jobs").iterdir()), "jobs in the copy")


def name_is_used_once():
    with Jobs() as jobs:
        jobs.run("print('first')")
        before = jobs.told()
        code, out, err = jobs.call("run", jobs.document("print('second')"))
        expect(code == 2 and "there is a job named job already" in err and len(err.splitlines()) == 1, code, out, err)
        expect(jobs.told() == before)


def port_in_use_is_told_and_leaves_nothing():
    with Jobs() as jobs, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = jobs.call("run", jobs.document("pass", where={"engine": "local", "options": {"port": port}}))
        expect(code == 1 and f"port {port} is in use on this machine" in err and len(err.splitlines()) == 1, code, out, err)
        expect(list(jobs.jobs.iterdir()) == [])


def missing_data_is_told():
    with Jobs() as jobs:
        data = jobs.root / "data"
        data.mkdir()
        path = jobs.document("pass", channels={"training": str(data)})
        data.rename(jobs.root / "moved")
        code, out, err = jobs.call("run", path)
        expect(code == 2 and "channels.training" in err and str(data) in err, code, out, err)


def wheel_make(path):
    """Makes a wheel with one module, with the parts that pip needs."""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("shoal_test_extra.py", "A = 'installed'")
        wheel.writestr("shoal_test_extra-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: shoal-test-extra\nVersion: 1.0\n")
        wheel.writestr("shoal_test_extra-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
                                                               "Tag: py3-none-any\n")
        wheel.writestr("shoal_test_extra-1.0.dist-info/RECORD", "")


def requirements_are_installed_for_the_job_alone():
    with Jobs() as jobs:
        if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
            raise Skip(f"{sys.executable} has no pip")
        wheel_make(jobs.write("requirements.txt", "./shoal_test_extra-1.0-py3-none-any.whl\n").with_name(
            "shoal_test_extra-1.0-py3-none-any.whl"))
        jobs.environment["PIP_NO_INDEX"] = "1"
        jobs.run("""
            import shoal, shoal_test_extra, sys
            print(shoal_test_extra.A, sys.prefix, shoal.__name__)
        """, distribution=DATA_PARALLEL)
        place = jobs.folder() / "hosts/algo-1/environment"
        expect(f"installed {place} shoal\n" in jobs.log(), jobs.told())
        expect(subprocess.run([sys.executable, "-c", "import shoal_test_extra"], capture_output=True).returncode, "it stays there")


def requirements_are_built_as_they_ask():
    """The option for the package of setup.py does not hold for the requirements."""
    with tempfile.TemporaryDirectory() as place:
        code, folder, calls = pathlib.Path(place), pathlib.Path(place) / "environment", []
        (code / "setup.py").write_text("")
        (code / "requirements.txt").write_text("six\n")
        with unittest.mock.patch.object(agent, "_isolation", lambda code: ["--no-build-isolation"]):
            packages = agent.packages_of(Job(entry_point="train.py", source_dir=place), code)
        failing = []

        def run(command, cwd):
            (folder / "lib/python3.0/site-packages").mkdir(parents=True, exist_ok=True)
            calls.append(" ".join(command))
            return int(any(word in command for word in failing)), "ERROR: none"

        agent.packages_install(packages, code, folder, run)
        expect(["--requirement" in one for one in calls] == [False, True, False], calls)
        expect(["--no-build-isolation" in one for one in calls] == [False, False, True], calls)
        failing.append("--requirement")
        try:
            agent.packages_install(packages, code, folder, run)
            raise AssertionError("no error")
        except agent.AgentError as error:
            expect(str(error).startswith("cannot install requirements.txt: -m pip") and not folder.exists(), error)


def requirements_that_cannot_be_installed_are_told():
    with Jobs() as jobs:
        if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
            raise Skip(f"{sys.executable} has no pip")
        jobs.write("requirements.txt", "# what it needs\n./missing-1.0-py3-none-any.whl\n")
        jobs.run("print('not reached')", code=1)
        expect_failed(jobs, r"^cannot install requirements.txt: -m pip --python exited with code 1: ERROR: .*missing", 125)
        expect(not jobs.log() and not (jobs.folder() / "hosts/algo-1/environment").exists(), jobs.log())


def requirements_are_read_as_pip_reads_them():
    with tempfile.TemporaryDirectory() as place:
        code = pathlib.Path(place)
        job = Job(entry_point="train.py", source_dir=place)
        for text, coding in (("# made by pip freeze\r\nsix\r\n", "utf-16"), ("\ufeffsix\n", "utf-8"), ("# coding: latin-1\n# f\u00fcr alle\nsix\n", "latin-1"),
                             ("six # \u2588\n", "utf-8"), ("six\n", "utf-32")):
            (code / "requirements.txt").write_bytes(text.encode(coding))
            expect(agent.requirements_of(job, code) == code / "requirements.txt", text, coding)
        for text in ("# only this\n", "\n"):
            (code / "requirements.txt").write_text(text, encoding="utf-16")
            expect(agent.requirements_of(job, code) is None, text)
        for data, wanted in (("six\n# f\u00fcr alle\n".encode("latin-1"), "requirements.txt, line 2, is not text in utf-8 (byte 0xfc): save the file as UTF-8"),
                             (b"# coding: klingon\nsix\n", "requirements.txt names a coding that Python does not know: klingon")):
            (code / "requirements.txt").write_bytes(data)
            try:
                agent.requirements_of(job, code)
                raise AssertionError("no error")
            except agent.AgentError as error:
                expect(str(error) == wanted, error)


def shell_script_of_windows_is_told():
    with Jobs() as jobs:
        jobs.write("go.sh", "").write_bytes(b"#!/bin/bash\r\necho ran\r\n")
        jobs.run(entry_point="go.sh", code=1)
        expect_failed(jobs, r"^go.sh has Windows line endings, .*: save it with Unix line endings, as `sed -i 's/\\r\$//' go.sh` does$", 125)


FULL = """
mount -t tmpfs -o size=300k none "$SHOAL_JOBS" || exit 77
"$1" job run "$2"; code=$?
"$1" job status job --format json
find "$SHOAL_JOBS/job" -name '*.tar.gz*' -o -name '*unfinished*' -o -name '.*'
exit $code
"""


def run_on_full_disk(jobs, document):
    """Runs a job on a disk of 300 KiB that only this job sees."""
    jobs.jobs.mkdir()
    code, out, err = call("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL, "sh", SHOAL, document, env=jobs.environment,
                          timeout=100)
    if code == 77 or err.startswith("unshare:"):
        raise Skip("no mount of our own: " + err.strip())
    return code, out, err


def full_disk_while_packing_is_told():
    with Jobs() as jobs:
        code, out, err = run_on_full_disk(jobs, jobs.document("""
            import os
            open(os.environ["SM_MODEL_DIR"] + "/model", "wb").write(os.urandom(130_000))
            print("trained", flush=True)
        """))
        reason = r"cannot write \S+/model.tar.gz: No space left on device \(\S+ has \d+ KiB free of \d+ KiB\)"
        expect(code == 1 and re.search(f"job failed: {reason}", err), code, out, err)
        _, _, told = out.partition("trained\n")
        status, end = json.JSONDecoder().raw_decode(told)
        expect(status["status"] == "Failed" and re.match(reason, status["failure_reason"]) and not told[end:].strip(), out)


def full_disk_at_the_start_is_told():
    with Jobs() as jobs:
        jobs.write("large", "x" * 400_000)
        code, out, err = run_on_full_disk(jobs, jobs.document("print('not reached')"))
        status, end = json.JSONDecoder().raw_decode(out)
        expect(code == 1 and status["status"] == "Failed" and not out[end:].strip(), code, out, err)
        expect(re.match(r"cannot bring the source to \S+/code: .*No space left on device", status["failure_reason"]), status)


run_cases([script_that_raises_is_named_with_its_rank, script_that_is_killed_is_named,
           words_of_a_script_are_not_those_of_the_launcher, own_failure_file_of_a_script_is_the_reason,
           script_that_hangs_is_ended_at_the_time_limit, script_that_ignores_the_end_is_killed,
           script_without_a_model_is_told, stop_gives_the_script_its_time,
           stop_gives_the_program_behind_a_shell_its_time, interrupted_command_stops_the_job, killed_runner_is_found_out,
           a_job_of_the_version_before_is_followed,
           one_job_that_cannot_be_asked_about_leaves_the_list_whole, the_group_of_an_ended_runner_is_no_other,
           a_user_without_a_home_is_told_what_to_set, a_log_that_the_terminal_cannot_show_ends_nobody,
           jobs_below_the_source_are_not_copied_with_it,
           pid_of_another_process_is_no_runner, host_lost_in_the_middle_ends_the_job, host_that_cannot_begin_ends_the_job,
           name_is_used_once, port_in_use_is_told_and_leaves_nothing, missing_data_is_told,
           requirements_are_installed_for_the_job_alone, requirements_are_built_as_they_ask,
           requirements_are_read_as_pip_reads_them, shell_script_of_windows_is_told,
           requirements_that_cannot_be_installed_are_told, full_disk_while_packing_is_told, full_disk_at_the_start_is_told])
