#!/usr/bin/env python3
"""Cells of a notebook, run by the engine "local": from the estimator, through training and attach, to an endpoint that
answers."""
import contextlib
import io
import json
import logging
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from jobs import Jobs  # noqa: E402
from tap import expect, run_cases  # noqa: E402

from shoal.job import (Channel, Checkpoints, Estimator, FileSystemInput, Job, JobError, JSONDeserializer,  # noqa: E402
                       JSONSerializer,
                       Metric, ModelError, Predictor, PyTorch, ShuffleConfig, TensorFlow, TrainingInput,
                       UnexpectedStatusException,
                       Where, job_read)
from shoal.job.document.folder import JobFolder  # noqa: E402
from shoal.job.sdk.estimator import TrainingJobAnalytics  # noqa: E402
from shoal.job.sdk.inputs import channels_of  # noqa: E402

SCRIPT = """
import json, os, pathlib


def train():
    import argparse
    words = argparse.ArgumentParser()
    words.add_argument("--epochs", type=int)
    words = words.parse_args()
    data = pathlib.Path(os.environ["SM_CHANNEL_TRAINING"], "numbers").read_text().split()
    print("loss=0.5;", flush=True)
    if os.environ.get("RANK", "0") == "0":
        model = {"weight": words.epochs * sum(map(int, data)), "size": os.environ.get("WORLD_SIZE")}
        pathlib.Path(os.environ["SM_MODEL_DIR"], "model.json").write_text(json.dumps(model))


def model_fn(folder):
    return json.loads(pathlib.Path(folder, "model.json").read_text())


def predict_fn(data, model):
    if data.ndim > 2:
        raise ValueError("too many dimensions")
    return data * model["weight"]


if __name__ == "__main__":
    train()
"""
SETTINGS = {"image_uri": "any", "instance_type": "local", "role": "arn:aws:iam::1:role/r"}


@contextlib.contextmanager
def notebook(script=SCRIPT):
    """Yields a folder with a script and data as the working directory, and a folder for jobs."""
    with Jobs() as jobs, contextlib.ExitStack() as stack:
        jobs.write("train.py", script)
        (jobs.root / "data").mkdir()
        (jobs.root / "data/numbers").write_text("1 2 3\n")
        before = os.getcwd(), os.environ.get("SHOAL_JOBS"), os.environ.get("SHOAL_PYTHON")
        os.environ.update(SHOAL_JOBS=str(jobs.jobs), SHOAL_PYTHON=sys.executable)
        os.chdir(jobs.root)
        stack.callback(os.chdir, before[0])
        stack.callback(restore, SHOAL_JOBS=before[1], SHOAL_PYTHON=before[2])
        yield jobs


def restore(**variables):
    for name, value in variables.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def logged():
    """Collects the lines that our logger writes."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("shoal.job")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def printed(function, *arguments, **named):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function(*arguments, **named)
    return out.getvalue()


def failure(kind, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except kind as error:
        return str(error)
    raise AssertionError(f"{function} raised no {kind.__name__}")


# ------------------------------------------------------------ cells

def a_cell_trains_and_its_endpoint_answers():
    import numpy
    with notebook() as jobs:
        estimator = PyTorch("train.py", source_dir="source", instance_count=2, hyperparameters={"epochs": 2}, **SETTINGS,
                            distribution={"smdistributed": {"dataparallel": {"enabled": True}}}, base_job_name="cell",
                            metric_definitions=[{"Name": "loss", "Regex": "loss=(.*?);"}])
        out = printed(estimator.fit, "file://data")
        name = estimator.latest_training_job.name
        expect("loss=0.5;" in out and "algo-2" in out and "Training seconds: " in out, out, jobs.told(name))
        expect(name.startswith("cell-") and estimator.model_data == f"file://{jobs.jobs}/{name}/model.tar.gz",
               estimator.model_data)
        described = estimator.latest_training_job.describe()
        expect(described["TrainingJobStatus"] == "Completed" and described["HyperParameters"]["epochs"] == "2"
               and described["ResourceConfig"] == {"InstanceCount": 2, "InstanceType": "local"}, described)
        predictor = estimator.deploy(initial_instance_count=1, instance_type="ml.m5.xlarge")
        answer = predictor.predict(numpy.array([[1.0, 2.0]]))
        expect(answer.tolist() == [[12.0, 24.0]], answer)
        other = Predictor(predictor.url, serializer=JSONSerializer(), deserializer=JSONDeserializer())
        said = failure(ModelError, predictor.predict, numpy.zeros((1, 1, 1)))
        expect(said.startswith("An error occurred (ModelError) when calling the InvokeEndpoint operation: Received server "
                               "error (500) "
                               'from primary with message "') and "too many dimensions" in said, said)
        refused = failure(ModelError, other.predict, "x", initial_args={"ContentType": "application/x-none"})
        expect("application/x-none" in refused and "error (" in refused, refused)
        taken = failure(JobError, estimator.deploy, 1, "local", endpoint_name=predictor.endpoint_name)
        expect(taken == f'there is an endpoint "{predictor.endpoint_name}" already; delete it, or choose another name', taken)
        url = predictor.url
        predictor.delete_endpoint()
        expect(failure(JobError, predictor.predict, numpy.ones(1)).startswith(f'no endpoint "{predictor.endpoint_name}": '))
        gone = failure(JobError, other.predict, {"a": 1})
        expect(gone.startswith(f'endpoint "{url}" at {url} does not answer: '), gone)
        attached_answers(name)


def attached_answers(name):
    attached = PyTorch.attach(name)
    expect(attached.hyperparameters()["epochs"] == "2" and attached.instance_count == 2, attached.hyperparameters())
    expect(attached.distribution == {"smdistributed": {"dataparallel": {"enabled": True}}}, attached.distribution)
    expect(attached.model_data.endswith(f"{name}/model.tar.gz"), attached.model_data)
    expect(failure(ValueError, TensorFlow.attach, name) == f"Training job: {name} didn't use image for requested framework")


def a_failed_job_is_told_as_by_the_sdk():
    with notebook("raise RuntimeError('no such layer')\n"):
        estimator = PyTorch("train.py", source_dir="source", **SETTINGS)
        with contextlib.redirect_stdout(io.StringIO()):
            said = failure(UnexpectedStatusException, estimator.fit, job_name="fails")
        expect(said.startswith("Error for Training job fails: Failed. Reason: ") and "no such layer" in said, said)
        expect(said.endswith("Check troubleshooting guide for common errors: https://docs.aws.amazon.com/sagemaker/latest/dg/"
                             "sagemaker-python-sdk-troubleshooting.html"), said)
        expect("has left no model (Failed)" in failure(JobError, estimator.deploy, 1, "local"))
        expect(estimator.model_data is None)
        expect(said == failure(UnexpectedStatusException, PyTorch.attach, "fails"))


def a_job_in_the_background_is_stopped():
    with notebook("import time\nprint('begun', flush=True)\ntime.sleep(600)\n") as jobs:
        estimator = PyTorch("train.py", source_dir="source", **SETTINGS)
        estimator.fit(wait=False, job_name="sleeps")
        jobs.wait_for_line("begun", "sleeps")
        expect(estimator.latest_training_job.describe()["TrainingJobStatus"] == "InProgress")
        expect("there is a job named sleeps already" in failure(Exception, PyTorch("train.py", source_dir="source",
                                                                                   **SETTINGS).fit,
                                                                  wait=False, job_name="sleeps"))
        estimator.latest_training_job.stop()
        with logged() as lines:
            estimator.latest_training_job.wait(logs=False)
        expect(len(lines) == 1 and lines[0].startswith("Job ended with status 'Stopped' rather than 'Completed'."), lines)
        expect(estimator.latest_training_job.status().status == "Stopped")


def nothing_starts_with_a_mistake():
    with notebook() as jobs:
        estimator = PyTorch("trian.py", source_dir="source", **SETTINGS, environment={"A B": "x"},
                            metric_definitions=[{"Name": "loss", "Regex": "loss=(["}], output_path="s3:/bucket/x")
        said = failure(JobError, estimator.fit, {"training": "none"}, job_name="my_job")
        places = sorted(line.split(": ")[0] for line in said.split("\n"))
        expect(places == ["channels.training.uri", "entry_point", "environment.A B", "metric_definitions[0].regex", "name",
                          "output_path"], said)
        expect(not jobs.jobs.exists(), list(jobs.root.iterdir()))
        estimator = PyTorch("train.py", source_dir="source", **SETTINGS, distribution={
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"expert_parallel_degree": 2}}}, "mpi": {"enabled": True}})
        expect(json.loads(estimator.hyperparameters()["mp_parameters"]) == {"expert_parallel_degree": 2})
        expect("distribution.smdistributed.modelparallel.parameters.expert_parallel_degree: 2 is not served: leave it out, or write 1"
               in failure(JobError, estimator.fit))
        expect(not jobs.jobs.exists())


# ------------------------------------------------------------ arguments

def arguments_for_aws_alone_are_named_once():
    with logged() as lines:
        estimator = PyTorch("train.py", subnets=["a"], volume_size=100, use_spot_instances=True, max_wait=3, tags=[],
                            rules=None,
                            debugger_hook_config=False, disable_profiler=True, **SETTINGS)
    expect(lines == ["PyTorch: without meaning outside AWS, and ignored: role, volume_size, tags, subnets, "
                     "use_spot_instances, max_wait"],
           lines)
    expect(estimator.subnets == ["a"] and estimator.max_run == 86400)
    with logged() as lines:
        estimator = PyTorch("train.py", image_uri="any", train_instance_count=3, train_max_run=5)
    expect((estimator.instance_count, estimator.max_run) == (3, 5) and len(lines) == 2, lines)


def what_is_not_served_is_an_error():
    for name, value in (("instance_groups", ["g"]), ("training_recipe", "r")):
        said = failure(JobError, PyTorch, "train.py", **{name: value}, **SETTINGS)
        expect(said.startswith(f"PyTorch: {name} is not served: "), said)
    expect(failure(JobError, Estimator, "image").startswith("Estimator: the program of a container is not served: set "
                                                            "entry_point"))


def all_arguments_reach_the_document():
    estimator = PyTorch(
        "train.py", source_dir="code", hyperparameters={"a": [1], 2: None}, image_uri="any", instance_count=3,
        instance_type="ml.c5.xlarge", dependencies=["lib", pathlib.Path("more")],
        max_run=60, input_mode="FastFile", output_path="s3://bucket/out", base_job_name="base", model_uri="s3://bucket/model",
        metric_definitions=[{"Name": "n", "Regex": "(.)"}], checkpoint_s3_uri="s3://bucket/c",
        checkpoint_local_path="/opt/ml/checkpoints",
        environment={"A": "b"}, max_retry_attempts=2, container_log_level=10, workers_per_host=4, requirements="r.txt",
        where=Where("slurm", options={"partition": "p"}), distribution={"torch_distributed": {"enabled": True}})
    job = estimator.as_job({"x": "s3://bucket/x"})
    expect(job == Job(
        "train.py", base_job_name="base", framework="pytorch", source_dir="code", requirements="r.txt", instance_count=3,
        dependencies=["lib", "more"], instance_type="ml.c5.xlarge", workers_per_host=4,
        distribution={"torch_distributed": {"enabled": True}},
        hyperparameters={"a": [1], "2": None, "sagemaker_container_log_level": 10},
        channels={"x": Channel("s3://bucket/x", "FastFile"), "model": Channel("s3://bucket/model")},
        metric_definitions=[Metric("n", "(.)")],
        environment={"A": "b"}, max_run=60, restarts=2, checkpoints=Checkpoints("s3://bucket/c", "checkpoints"),
        output_path="s3://bucket/out",
        where=Where("slurm", options={"partition": "p"})), job)
    job = PyTorch("train.py", image_uri="i:1", role="r", where="sagemaker").as_job()
    expect(job.where == Where("sagemaker", options={"image": "i:1", "role": "r"}) and job.instance_type == "local", job)


def dependencies_lie_beside_the_source():
    script = "import own, helper, words.more; print('found', own.A, helper.A, words.more.A)"
    with notebook(script):
        for name, text in (("own.py", "A = 1"), ("../lib/helper.py", "A = 2"), ("../lib/words/more.py", "A = 3"),
                           ("../lib/words/__pycache__/old.pyc", "")):
            path = pathlib.Path("code", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        pathlib.Path("source/train.py").rename("code/train.py")
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            estimator = PyTorch("train.py", source_dir="code", dependencies=["lib/helper.py", "lib/words/"], instance_count=2,
                                distribution={"smdistributed": {"dataparallel": {"enabled": True}}}, **SETTINGS)
            estimator.fit()
        expect(told.getvalue().count("found 1 2 3") == 2, told.getvalue())
        code = estimator.latest_training_job.folder.base("algo-2") / "code"
        expect([path.name for path in (code / "words").iterdir() if path.is_file()] == ["more.py"], list(code.rglob("*")))
        pathlib.Path("x/words").mkdir(parents=True)
        wrong = PyTorch("train.py", source_dir="code", dependencies=["lib/none", "lib/words", "x/words", "s3://b/x"],
                        **SETTINGS)
        said = failure(JobError, wrong.fit)
        for line in ('dependencies[0]: no file or folder "',
                     'dependencies[2]: "x/words" and "lib/words" would both be words next to',
                     'dependencies[3]: "s3://b/x": needs a folder or file of this machine'):
            expect(line in said, line, said)
        pathlib.Path("own.py").write_text("")
        said = failure(UnexpectedStatusException, PyTorch("train.py", source_dir="code",
                                                          dependencies=["own.py"], **SETTINGS).fit)
        expect("own.py would replace own.py, which the source or another dependency has: rename one" in said, said)


def git(*words):
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True, cwd="repository",
                          env={**os.environ, **identity, "GIT_CONFIG_GLOBAL": "/dev/null"}).stdout.strip()


def repository_make():
    """Makes three commits: one, two on the branch that a clone checks out, three on the branch `side`. Returns the first
    one."""
    pathlib.Path("repository/src").mkdir(parents=True)
    pathlib.Path("repository/shared").mkdir()
    pathlib.Path("repository/shared/helper.py").write_text("A = 'helped'")
    git("init", "--quiet", "--initial-branch", "trunk")
    for version in ("one", "two", "three"):
        if version == "three":
            git("checkout", "--quiet", "-b", "side")
        pathlib.Path("repository/src/train.py").write_text(f"import helper\nprint('version {version}', helper.A)\n")
        git("add", "-A")
        git("commit", "--quiet", "-m", version)
    git("checkout", "--quiet", "trunk")
    return git("rev-parse", "trunk~1")


def fitted(config, **more):
    """Returns the output of a job from a repository."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        estimator = PyTorch("train.py", source_dir="src", dependencies=["shared/helper.py"], git_config=config,
                            **SETTINGS, **more)
        estimator.fit()
    return told.getvalue(), estimator


def git_config_names_the_source():
    with notebook() as jobs:
        first = repository_make()
        url = pathlib.Path("repository").resolve().as_uri()
        for config, version in (({"repo": "repository"}, "two"), ({"repo": url, "branch": "side"}, "three"),
                                ({"repo": url, "branch": "side", "commit": first, "2FA_enabled": False}, "one")):
            told, estimator = fitted(config)
            expect(f"version {version} helped\n" in told, config, told)
        job = estimator.latest_training_job.job()
        expect(job.source_dir == str(estimator.latest_training_job.folder.path / "source/src"), job)
        expect(not [path for path in jobs.jobs.iterdir() if path.name.startswith(".")], list(jobs.jobs.iterdir()))


def mistakes_of_git_config_are_told():
    with notebook() as jobs:
        repository_make()
        for config, text in (
                ({}, "Please provide a repo for git_config."), ({"repo": 3}, "'repo' must be a string."),
                ({"repo": "repository", "tag": "x"}, "git_config: unknown key tag; known: repo, branch, commit"),
                ({"repo": "repository", "token": "s3cret"},
                 "git_config: token is not taken: a job's folder would keep credentials"),
                ({"repo": "repository", "2FA_enabled": True}, "git_config: 2FA_enabled is not taken"),
                ({"repo": "https://me:s3cret@host/x"}, "git_config: repo holds credentials (USER:PASSWORD@): leave them out"),
                ({"repo": "--upload-pack=x"}, 'git_config: repo is "--upload-pack=x", which names nothing'),
                ({"repo": "ext::sh -c x"}, "git_config: cannot clone ext::sh -c x: fatal: transport 'ext' not allowed"),
                ({"repo": "nowhere"}, "git_config: cannot clone nowhere: fatal: repository 'nowhere' does not exist"),
                ({"repo": "repository", "branch": "none"}, "git_config: cannot clone repository: "),
                ({"repo": "repository", "commit": "0123456"}, "git_config: cannot check out commit 0123456 of repository: ")):
            said = failure(JobError, PyTorch("train.py", source_dir="src", git_config=config or {"branch": "x"},
                                             **SETTINGS).fit)
            expect(said.startswith(text) and "s3cret" not in said, config, said)
        for arguments, text in (({"source_dir": "none"}, "Source directory does not exist in the repo."),
                                ({"source_dir": "shared"}, "Entry point does not exist in the repo."),
                                ({"source_dir": "../code"}, "git_config: ../code leads out of the repository"),
                                ({"source_dir": "src", "dependencies": ["x"]}, "Dependency x does not exist in the repo.")):
            said = failure(JobError, PyTorch("train.py", git_config={"repo": "repository"}, **arguments, **SETTINGS).fit)
            expect(said == text, arguments, said)
        expect(not list(jobs.jobs.iterdir()), list(jobs.jobs.iterdir()))


def inputs_become_channels():
    inputs = {"a": "file:///data/a", "b": TrainingInput("s3://bucket/b", distribution="ShardedByS3Key", input_mode="FastFile",
                                                        content_type="text/csv", s3_data_type="ManifestFile",
                                                        shuffle_config=ShuffleConfig(7)),
              "c": FileSystemInput("fs-1", "EFS", "/train"), "d": FileSystemInput("fs-2", "FSxLustre", "/train"),
              "e": TrainingInput("x")}
    found = channels_of(inputs, "File", {"fs-1": "/mnt/efs/"})
    expect(found == {
        "a": Channel("file:///data/a"), "b": Channel("s3://bucket/b", "FastFile", "ShardedByS3Key", "ManifestFile", "text/csv",
                                                     shuffle_seed=7),
        "c": Channel("/mnt/efs/train"), "d": Channel("/train"), "e": Channel("x")}, found)
    expect(channels_of("file://data", "File", {}) == {"training": Channel(f"file://{os.getcwd()}/data")})
    expect(channels_of(None, "File", {}) == {})
    expect(failure(ValueError, channels_of, {"a": 3}, "File", {}).startswith("Cannot format input 3."))
    expect("attribute_names is not served" in failure(JobError, channels_of, TrainingInput("x", attribute_names=["a"]), "File",
                                                      {}))
    estimator = PyTorch("train.py", image_uri="any", model_uri="s3://bucket/m")
    expect(failure(ValueError, estimator.as_job, {"model": "x"}) == "Duplicate channel model not allowed.")


def an_estimator_is_a_document():
    with notebook() as jobs:
        path = jobs.root / "job.py"
        path.write_text("from shoal.job import TensorFlow\nestimator = TensorFlow(entry_point='train.py', source_dir='source', "
                        "image_uri='any', model_dir=False, hyperparameters={'epochs': 3})\ninputs = {'training': 'data'}\n")
        job = job_read(path)
        expect(job.framework == "tensorflow" and job.hyperparameters == {"epochs": 3, "model_dir": False}, job)
        expect(job.channels == {"training": Channel(f"{jobs.root}/data")} and job.source_dir == f"{jobs.root}/source", job)


def metrics_of_the_definitions_are_the_analytics():
    with notebook() as jobs:
        folder = JobFolder("measured")
        folder.path.mkdir(parents=True)
        folder.document.write_text(json.dumps({"entry_point": "train.py", "metric_definitions": [{"name": "loss",
                                                                                                  "regex": "(.)"}]}))
        rows = [{"time": 10.0 + step, "host": "algo-1", "rank": 0, "name": name, "value": step / 2, "step": step}
                for step in range(3) for name in ("loss", "steps_per_second")]
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"time": 13.0, "name": "lo')  # cut by a full disk
        expect([row["value"] for row in TrainingJobAnalytics("measured")._rows()] == [0.0, 0.5, 1.0])
        expect([row["name"]
                for row in TrainingJobAnalytics("measured", ["steps_per_second"])._rows()] == ["steps_per_second"] * 3)
        expect(jobs.jobs == folder.path.parent)
    estimator = PyTorch("train.py", image_uri="any")
    expect(failure(ValueError, lambda: estimator.training_job_analytics) == "Estimator is not associated with a TrainingJob")


run_cases([a_cell_trains_and_its_endpoint_answers, a_failed_job_is_told_as_by_the_sdk, a_job_in_the_background_is_stopped,
           nothing_starts_with_a_mistake, arguments_for_aws_alone_are_named_once, what_is_not_served_is_an_error,
           all_arguments_reach_the_document, dependencies_lie_beside_the_source, git_config_names_the_source,
           mistakes_of_git_config_are_told, inputs_become_channels, an_estimator_is_a_document,
           metrics_of_the_definitions_are_the_analytics])
