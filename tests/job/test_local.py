#!/usr/bin/env python3
"""Jobs on this machine, from the document to the model: a script's environment and its results, by `shoal job run` and
other commands."""
import io
import json
import os
import re
import subprocess
import sys
import tracemalloc

from jobs import DATA_PARALLEL, SHOAL, TOP, Jobs, content, names_in
from tap import Skip, call, expect, run_cases

SAVE = """
    import os, sys
    open(os.path.join(os.environ["SM_MODEL_DIR"], "model-" + os.environ.get("RANK", "0")), "w").write("weights")
    open(os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], "notes"), "w").write(os.environ["SM_CURRENT_HOST"])
    print("trained with", *sys.argv[1:])
"""
RANKS = """
    import os
    print("I am", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "SM_CURRENT_HOST")))
    if os.environ["LOCAL_RANK"] == "0":
        open(os.path.join(os.environ["SM_MODEL_DIR"], "of-" + os.environ["RANK"]), "w").write("x")
        open(os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], "same-name"), "w").write(os.environ["RANK"])
"""
CONTRACT = """
    import json, os, sys
    base = os.environ["SAGEMAKER_BASE_DIR"]
    files = {name: json.load(open(f"{base}/input/config/{name}.json"))
             for name in ("hyperparameters", "resourceconfig", "inputdataconfig")}
    data = open(os.environ["SM_CHANNEL_TRAINING"] + "/numbers").read()
    told = {"files": files, "environment": dict(os.environ), "arguments": sys.argv[1:], "data": data, "folder": os.getcwd()}
    json.dump(told, open(os.environ["SM_MODEL_DIR"] + "/told-" + os.environ["SM_CURRENT_HOST"], "w"))
"""


def job_runs_from_document_to_model():
    with Jobs() as jobs:
        status = jobs.run(SAVE, hyperparameters={"lr": 0.1, "b": 2, "name": "a b", "flag": True})
        expect(status["status"] == "Completed" and status["exit_code"] == 0 and not status["failure_reason"], status)
        expect("trained with -b 2 --flag True --lr 0.1 --name a b\n" in jobs.out, jobs.out, jobs.err)
        expect(jobs.log() == "trained with -b 2 --flag True --lr 0.1 --name a b\n", jobs.log())
        folder = jobs.folder()
        expect(status["model"] == (folder / "model.tar.gz").as_uri() and status["model"] in jobs.err, status, jobs.err)
        expect(names_in(folder / "model.tar.gz") == ["model-0"], names_in(folder / "model.tar.gz"))
        expect(content(folder / "output.tar.gz", "notes") == "algo-1")
        expect((folder / "hosts/algo-1/output/success").is_file() and not (folder / "hosts/algo-1/output/failure").exists())
        left = sorted(entry.name for entry in folder.iterdir())
        expect(left == ["checkpoints", "events.jsonl", "hosts", "job.json", "logs", "model.tar.gz", "output.tar.gz", "runner.log",
                        "status.json", "traces"], left)
        expect(not (folder / "runner.log").read_text(), (folder / "runner.log").read_text())


def hosts_are_joined_and_their_models_merged():
    with Jobs() as jobs:
        jobs.run(RANKS, instance_count=2, workers_per_host=2, distribution=DATA_PARALLEL)
        lines = sorted(re.findall(r"^(algo-\d) \| \d\| I am (.*)$", jobs.out, re.M))
        expect(lines == [("algo-1", "0 4 0 0 algo-1"), ("algo-1", "1 4 1 0 algo-1"), ("algo-2", "2 4 0 1 algo-2"),
                         ("algo-2", "3 4 1 1 algo-2")], jobs.out)
        expect("I am 2" in jobs.log(host="algo-2") and "I am 2" not in jobs.log(host="algo-1"), jobs.told())
        expect(names_in(jobs.folder() / "model.tar.gz") == ["of-0", "of-2"])
        expect(names_in(jobs.folder() / "output.tar.gz") == ["algo-1/same-name", "algo-2/same-name"])


def script_finds_what_the_contract_promises():
    with Jobs() as jobs:
        jobs.write("../data/numbers", "1 2 3")
        jobs.run(CONTRACT, hyperparameters={"batch-size": 32, "layers": [1, 2], "sizes": {"b": 2, "a": 1}, "name": "a b", "none": None},
                 channels={"training": {"uri": str(jobs.root / "data"), "content_type": "text/csv"}}, instance_type="ml.c5.large",
                 environment={"MINE": "yes"}, instance_count=2)
        told = json.loads(content(jobs.folder() / "model.tar.gz", "told-algo-2"))
    base, found, files = str(jobs.folder() / "hosts/algo-2"), told["environment"], told["files"]
    expect(told["data"] == "1 2 3" and told["folder"] == f"{base}/code" and found["MINE"] == "yes", told)
    expect(told["arguments"] == ["--batch-size", "32", "--layers", "[1, 2]", "--name", "a b", "--none", "", "--sizes", "a=1,b=2"], told)
    expect(files["hyperparameters"]["name"] == '"a b"' and files["hyperparameters"]["sagemaker_program"] == '"train.py"', files)
    group = {"instance_group_name": "homogeneousCluster", "instance_type": "ml.c5.large", "hosts": ["algo-1", "algo-2"]}
    interface = files["resourceconfig"].pop("network_interface_name")
    expect(files["resourceconfig"] == {"current_host": "algo-2", "current_instance_type": "ml.c5.large", "hosts": ["algo-1", "algo-2"],
                                       "current_group_name": "homogeneousCluster", "instance_groups": [group]}, files)
    expect(interface in os.listdir("/sys/class/net"), interface)
    expect(files["inputdataconfig"] == {"training": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated",
                                                     "RecordWrapperType": "None", "ContentType": "text/csv"}}, files)
    wanted = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_CURRENT_INSTANCE_TYPE": "ml.c5.large",
              "SM_HP_BATCH-SIZE": "32", "SM_HP_NAME": "a b", "SM_HP_LAYERS": "[1,2]", "SM_HP_NONE": "", "SM_CHANNELS": '["training"]',
              "SM_CHANNEL_TRAINING": f"{base}/input/data/training", "SM_MODEL_DIR": f"{base}/model", "SM_OUTPUT_DIR": f"{base}/output",
              "SM_OUTPUT_DATA_DIR": f"{base}/output/data", "SM_INPUT_DIR": f"{base}/input", "SM_LOG_LEVEL": "20",
              "SM_INPUT_CONFIG_DIR": f"{base}/input/config", "SM_MODULE_DIR": f"{base}/code", "SM_MODULE_NAME": "train",
              "SM_USER_ENTRY_POINT": "train.py", "SM_NETWORK_INTERFACE_NAME": interface, "SM_IS_HETERO": "false",
              "SM_OUTPUT_INTERMEDIATE_DIR": f"{base}/output/intermediate", "SM_NUM_CPUS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
              "SM_USER_ARGS": json.dumps(told["arguments"], separators=(",", ":")), "SM_INSTANCE_GROUPS": '["homogeneousCluster"]',
              "SM_CURRENT_INSTANCE_GROUP": "homogeneousCluster", "SM_RESOURCE_CONFIG": None, "SM_TRAINING_ENV": None, "SM_HPS": None,
              "TRAINING_JOB_NAME": "job", "SM_NUM_NEURONS": "0", "SM_FRAMEWORK_MODULE": ""}
    wrong = {name: found.get(name) for name, value in wanted.items() if name not in found or (value is not None and found[name] != value)}
    expect(not wrong, wrong)
    expect(json.loads(found["SM_HPS"]) == {"batch-size": 32, "layers": [1, 2], "sizes": {"b": 2, "a": 1}, "name": "a b", "none": None}, found["SM_HPS"])
    described = json.loads(found["SM_TRAINING_ENV"])
    expect(described["is_master"] is False and described["master_hostname"] == "algo-1" and described["job_name"] == "job", described)


OF_THE_TOOLKIT = "import json; from sagemaker_training import environment; print(json.dumps(environment.Environment().to_env_vars()))"


def variables_are_those_of_the_toolkit():
    """sagemaker-training reads the same base folder. The variables equal those that it would give the script."""
    toolkit = TOP / "build/toolkit/bin/python3"
    if not toolkit.exists():
        raise Skip(f"there is no {toolkit}: `make test-all` makes it")
    with Jobs() as jobs:
        data = jobs.write("../data/numbers", "1 2 3").parent
        jobs.run("""
            import json, os
            with open(os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], "variables"), "w") as file:
                json.dump(dict(os.environ), file)
        """, instance_count=2, instance_type="ml.c5.large", distribution=DATA_PARALLEL, workers_per_host=1, channels={"training": str(data)},
                 hyperparameters={"lr": 0.1, "layers": [1, 2], "name": "a b", "none": None})
        base = jobs.folder() / "hosts/algo-2"
        ours = json.loads((base / "output/data/variables").read_text())
        variables = {"PATH": os.environ["PATH"], "SAGEMAKER_BASE_DIR": str(base), "TRAINING_JOB_NAME": "job", "AWS_DEFAULT_REGION": "us-west-2"}
        done = subprocess.run([toolkit, "-c", OF_THE_TOOLKIT], env=variables, capture_output=True, text=True, timeout=120)
        expect(done.returncode == 0, done.stdout, done.stderr)
        theirs = json.loads(done.stdout.splitlines()[-1])
        described, description = (json.loads(found.pop("SM_TRAINING_ENV")) for found in (ours, theirs))
        theirs.pop("SM_NUM_CPUS")  # all cores of the machine; here hosts share the cores that the job may use
        for name in ("num_cpus", "is_modelparallel_enabled", "is_smddprun_installed", "is_smddpmprun_installed", "topology"):
            description.pop(name)  # the last four concern its own launchers
        wrong = {name: (ours.get(name), value) for name, value in theirs.items() if ours.get(name) != value}
        wrong.update({name: (described.get(name), value) for name, value in description.items() if described.get(name) != value})
        expect(not wrong and len(theirs) > 30 and len(description) > 30, wrong, len(theirs), len(description))


def shell_scripts_and_packages_are_entry_points():
    with Jobs() as jobs:
        script = jobs.write("go.sh", 'echo "shell: $*"\n')
        script.write_text("#!/bin/sh\n" + script.read_text())
        script.chmod(0o644)
        jobs.run(entry_point="go.sh", hyperparameters={"name": "it's a b"}, name="shell")
        expect(jobs.log("shell") == "shell: --name it's a b\n", jobs.log("shell"))
        jobs.write("setup.py", "from setuptools import setup\nsetup(name='pack', package_dir={'': 'src'}, packages=['more'])\n")
        jobs.write("src/more/__init__.py", "VALUE = 42\n")
        jobs.write("pack/__init__.py", "")
        jobs.write("pack/__main__.py", "import more, sys; print('package:', more.VALUE, *sys.argv[1:])")
        jobs.run(entry_point="pack", hyperparameters={"n": 1}, name="package")
        expect(jobs.log("package") == "package: 42 -n 1\n", jobs.log("package"))


def entry_point_alone_is_enough():
    with Jobs() as jobs:
        path = jobs.document("import os; print(os.listdir('.'), os.environ['SM_USER_ENTRY_POINT'])", source_dir=None)
        path.write_text(path.read_text().replace('"train.py"', '"source/train.py"'))
        code, out, err = jobs.call("run", path)
        expect(code == 0 and "['train.py'] train.py\n" in out, code, out, err)


def same_file_from_all_hosts_is_no_clash():
    save = "import os; open(os.environ['SM_MODEL_DIR'] + '/model', 'w').write({!r} + os.environ['SM_CURRENT_HOST'] * {})"
    with Jobs() as jobs:
        jobs.run(save.format("same", 0), instance_count=2, name="same")
        expect(names_in(jobs.folder("same") / "model.tar.gz") == ["model"])
        status = jobs.run(save.format("differs", 1), instance_count=2, name="differs", code=1)
        expect(status["failure_reason"].startswith("algo-1 and algo-2 both wrote model into their model folders, with different "), status)
        expect(not (jobs.folder("differs") / "model.tar.gz").exists() and len(jobs.err.splitlines()) < 8, jobs.err)


def links_in_the_model_are_followed():
    with Jobs() as jobs:
        jobs.write("../big", "weights")
        jobs.run(f"""
            import os
            os.chdir(os.environ["SM_MODEL_DIR"])
            os.makedirs("code/empty")
            os.symlink({str(jobs.root / "big")!r}, "model.bin")
            os.symlink("code", "linked")
        """)
        archive = jobs.folder() / "model.tar.gz"
        expect(names_in(archive) == ["code/empty/", "linked/empty/", "model.bin"], names_in(archive))
        expect(content(archive, "model.bin") == "weights")


def result_goes_to_output_path():
    with Jobs() as jobs:
        status = jobs.run(SAVE, output_path=str(jobs.root / "results"))
        expect(status["model"] == (jobs.root / "results/job/output/model.tar.gz").as_uri(), status)
        expect(sorted(path.name for path in (jobs.root / "results/job/output").iterdir()) == ["model.tar.gz", "output.tar.gz"])


def job_outlives_who_started_it():
    with Jobs() as jobs:
        jobs.start("import time; print('begun', flush=True)\nwhile not __import__('os').path.exists('go'): time.sleep(0.02)\nprint('done')")
        jobs.wait_for_line("begun")
        status = jobs.status()
        expect(status["status"] == "Training" and status["started"] and not status["ended"], status)
        code, out, err = jobs.call("list")
        expect(code == 0 and re.search(r"Training +1 host +job$", out, re.M), out, err)
        following = subprocess.Popen([SHOAL, "job", "logs", "job", "--follow"], env=jobs.environment, stdout=subprocess.PIPE, text=True)
        (jobs.folder() / "hosts/algo-1/code/go").touch()
        out, _ = following.communicate(timeout=100)
        expect((following.returncode, out) == (0, "begun\ndone\n"), following.returncode, out)
        expect(jobs.call("logs", "job")[:2] == (0, "begun\ndone\n"))


def checkpoints_are_in_the_job_folder():
    with Jobs() as jobs:
        jobs.run("open('../checkpoints/step-1', 'w').write('x')")
        expect((jobs.folder() / "checkpoints/step-1").read_text() == "x")


def plain_jobs_are_started_again():
    with Jobs() as jobs:
        status = jobs.run("""
            import os, sys
            count = len(os.listdir("../checkpoints"))
            open(f"../checkpoints/{count}", "w").close()
            sys.exit(0 if count == 2 else 5)
        """, restarts=2)
        expect(status["attempt"] == 2 and status["status"] == "Completed", status)
        status = jobs.run("""
            import os
            if not os.listdir("../checkpoints"):
                open("../checkpoints/1", "w").close()
                open("../output/failure", "w").write("the first reason")
            raise ValueError("another reason")
        """, restarts=1, name="fails", code=1)
        expect("ValueError: another reason" in status["failure_reason"], "the reason of the last attempt", status)


def torchrun_and_mpi_scripts_find_their_variables():
    show = "import os; print('has', *(os.environ[name] for name in {!r}))"
    with Jobs() as jobs:
        names = ["RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "TORCHELASTIC_RUN_ID"]
        jobs.run(show.format(names), distribution={"torch_distributed": {"enabled": True}}, workers_per_host=2, name="torchrun",
                 instance_type="local_gpu")
        lines = sorted(line for line in jobs.log("torchrun").splitlines() if "| has" in line)
        expect(lines == ["0| has 0 1 0 none", "1| has 1 1 1 none"], jobs.log("torchrun"))
        names = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]
        jobs.run(show.format(names), distribution={"mpi": {"enabled": True, "processes_per_host": 2}}, name="mpi", instance_count=2)
        both = sorted(jobs.log("mpi").splitlines() + jobs.log("mpi", "algo-2").splitlines())
        expect([line for line in both if "| has" in line] == ["0| has 0 4 0", "1| has 1 4 1", "2| has 2 4 0", "3| has 3 4 1"], both)


def last_lines_come_before_the_end():
    """Lines that arrive after the last look at the logs are shown before the status that ends the job."""
    sys.path.insert(0, str(TOP / "python"))
    from shoal.job import engines
    from shoal.job.document.folder import JobFolder
    with Jobs() as jobs:
        jobs.run("print('last words')")
        told = io.StringIO()
        engines.job_wait(JobFolder("job", jobs.jobs), out=told, told=told)
        expect(-1 < told.getvalue().find("last words") < told.getvalue().find("job: Completed"), told.getvalue())


def a_long_log_is_shown_in_pieces():
    """Whole lines, also those that are longer than a piece and those that come later, in little memory."""
    from shoal.job import engines
    from shoal.job.document.folder import JobFolder
    with Jobs() as jobs:
        jobs.run("pass")
        log = jobs.folder() / "logs/algo-1.log"
        lines = "".join(f"line {number} \u2588\n" for number in range(400_000)) + "x" * (3 << 20) + "\n"
        log.write_text(lines + "half")
        shown = io.StringIO()
        follower = engines.Follower(JobFolder("job", jobs.jobs), shown)
        follower.follow()
        expect("".join(shown.getvalue().split("\n")) == lines.replace("\n", ""), "the lines")
        with open(log, "a") as file:
            file.write(" a line\n")
        follower.follow()
        expect(shown.getvalue().endswith("half a line\n"))
        with open(os.devnull, "w") as nowhere:
            tracemalloc.start()
            engines.Follower(JobFolder("job", jobs.jobs), nowhere).follow()
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        expect(most < 12 << 20, f"{most} bytes for a log of {log.stat().st_size}")


def command_helps_and_refuses():
    with Jobs() as jobs:
        code, out, err = jobs.call("--help")
        expect(code == 0 and "Examples:" in out and "Exit codes:" in out, code, out, err)
        for command in ("run", "check", "list", "status", "logs", "stop", "report", "watch"):
            code, out, err = jobs.call(command, "--help")
            expect(code == 0 and f"shoal job {command}" in out, code, out, err)
        for words, told in ((["statsu", "x"], "invalid choice"), ([], "no command given"), (["status"], "NAME"),
                            (["status", "nothing"], "there is no job named nothing in"), (["logs", "../jobs"], "there is no job named"),
                            (["run", "nothing.json"], "nothing.json")):
            code, out, err = jobs.call(*words)
            expect(code == 2 and told in err and not out, words, code, out, err)
        expect(jobs.call("list")[0] == 0)


def all_mistakes_of_a_document_are_told_before_anything_starts():
    with Jobs() as jobs:
        path = jobs.document(instance_count=0, max_run="x", metric_definitions=[{"name": "loss", "regex": "loss=(["}])
        for command in ("check", "run"):
            code, out, err = jobs.call(command, path)
            expect(code == 2 and all(word in err for word in ("instance_count", "max_run", "does not compile")), code, out, err)
        expect(not jobs.jobs.exists())
        good = jobs.document(hyperparameters={"lr": 1})
        code, out, err = jobs.call("check", good, "--set", "hyperparameters.lr=0.5", "--set", "hyperparameters.name=a b", "--format", "json")
        expect(code == 0 and json.loads(out)["hyperparameters"] == {"lr": 0.5, "name": "a b"}, code, out, err)
        code, out, err = jobs.call("check", good, "--set", "instance_cuont=2")
        expect(code == 2 and "instance_count" in err, code, out, err)


def command_says_when_python_or_the_package_is_missing():
    with Jobs() as jobs:
        code, out, err = jobs.call("list", SHOAL_PYTHON="/no/such/python3")
        expect(code == 127 and "cannot start /no/such/python3: No such file" in err and len(err.splitlines()) == 1, code, err)
        alone = jobs.root / "bin/shoal"
        alone.parent.mkdir()
        alone.write_bytes(open(SHOAL, "rb").read())
        alone.chmod(0o755)
        environment = {**jobs.environment, "LD_LIBRARY_PATH": os.path.dirname(SHOAL), "PYTHONPATH": ""}
        code, out, err = call(alone, "job", "list", env=environment)
        expect(code == 127 and "the Python package shoal is neither beside" in err and len(err.splitlines()) == 1, code, err)
        code, out, err = call(alone, "job", "list", env={**environment, "PYTHONPATH": str(TOP / "python")})
        expect(code == 0, code, err)


run_cases([job_runs_from_document_to_model, last_lines_come_before_the_end, a_long_log_is_shown_in_pieces,
           hosts_are_joined_and_their_models_merged,
           script_finds_what_the_contract_promises,
           variables_are_those_of_the_toolkit, shell_scripts_and_packages_are_entry_points, entry_point_alone_is_enough, same_file_from_all_hosts_is_no_clash,
           links_in_the_model_are_followed, result_goes_to_output_path, job_outlives_who_started_it, checkpoints_are_in_the_job_folder,
           plain_jobs_are_started_again, torchrun_and_mpi_scripts_find_their_variables, command_helps_and_refuses,
           all_mistakes_of_a_document_are_told_before_anything_starts, command_says_when_python_or_the_package_is_missing])
