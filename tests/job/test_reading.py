#!/usr/bin/env python3
"""A job document: read in its three formats, every mistake reported with its place, and unchanged after it is written and
read again."""
import json
import pathlib
import random
import re
import shutil
import string
import tempfile
import textwrap

from shoal.job.document import Channel, Checkpoints, Job, JobError, Metric, Where, as_data
from shoal.job.document.reading import job_of, job_read, problems
from tap import Skip, expect, run_cases

ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-reading-")).resolve()
(ROOT / "code").mkdir()
(ROOT / "code/train.py").write_text("print('trained')\n")
(ROOT / "code/requirements.txt").write_text("")
(ROOT / "data").mkdir()

GOOD = {"entry_point": "train.py", "source_dir": str(ROOT / "code"), "channels": {"train": {"uri": str(ROOT / "data")}}}
TOML = """
entry_point = "train.py"
source_dir = "code"
instance_count = 2
base_job_name = "fashion"

[hyperparameters]
epochs = 3
"learning rate" = 0.1

[channels]
train = "data"

[channels.test]
uri = "s3://bucket/test"
input_mode = "FastFile"

[[metric_definitions]]
name = "loss"
regex = 'loss=([0-9.]+)'

[distribution.smdistributed.dataparallel]
enabled = true
"""


def needs_toml():
    try:
        import tomllib  # noqa: F401
    except ImportError:
        try:
            import tomli  # noqa: F401
        except ImportError:
            raise Skip("neither tomllib nor tomli")


def written(name, text):
    path = ROOT / name
    path.write_text(textwrap.dedent(text))
    return path


def told(path):
    """Returns the mistakes in a file, one per line."""
    try:
        job_read(path)
    except JobError as error:
        return str(error).split("\n")
    return []


def wrong(**changes):
    """Returns the mistakes in a document that is right except for these fields."""
    return [str(one) for one in problems({**GOOD, **changes})]


def is_wrong(text, **changes):
    found = wrong(**changes)
    expect(found == [text], *found, "expected:", text)


# ------------------------------------------------------------ formats

def toml_json_and_python_say_the_same():
    needs_toml()
    from_toml = job_read(written("job.toml", TOML))
    expect(from_toml.instance_count == 2 and from_toml.hyperparameters == {"epochs": 3, "learning rate": 0.1}, from_toml)
    expect(from_toml.channels["test"] == Channel("s3://bucket/test", input_mode="FastFile"), from_toml)
    expect(job_read(written("same.json", json.dumps(as_data(from_toml)))) == from_toml)
    for name, text in (("marked.toml", TOML), ("marked.json", json.dumps(as_data(from_toml)))):  # as editors on Windows write
        expect(job_read(written(name, "\ufeff" + text)) == from_toml, name)
    data = {key: value for key, value in as_data(from_toml).items()}
    expect(job_read(written("same.py", f"from shoal.job.document import *\njob = {data!r}\n")) == from_toml)
    expect(job_read(written("job.py", "from shoal.job.document import *\njob = Job('train.py', source_dir='code')\n"))
           == Job("train.py", source_dir=str(ROOT / "code")))


def documents_of_the_manual_are_right():
    """docs/jobs.md: the script compiles, and the documents have no mistakes."""
    needs_toml()
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs/jobs.md").read_text()
    script, *_ = re.findall(r"```python\n(.*?)```", text, re.S)
    compile(script, "train.py", "exec")
    documents = [one for one in re.findall(r"```toml\n(.*?)```", text, re.S) if "entry_point" in one]  # the others are parts
    expect(len(documents) == 2, documents)
    for folder in ("manual", "manual/code", "manual/data"):
        (ROOT / folder).mkdir()
    written("manual/code/train.py", script)
    for document in documents:
        job = job_read(written("manual/job.toml", document))
        expect(job.instance_count == 2 and job.metric_definitions[0].name == "loss", job)


def paths_start_at_the_document():
    job = job_read(written("paths.json", json.dumps({
        "entry_point": "code/train.py", "output_path": "out", "checkpoints": {"uri": "kept"},
        "channels": {"a": "data", "b": "s3://bucket/x"}})))
    expect(job.entry_point == str(ROOT / "code/train.py"), job)
    expect(job.output_path == str(ROOT / "out") and job.checkpoints.uri == str(ROOT / "kept"), job)
    expect(job.channels["a"].uri == str(ROOT / "data") and job.channels["b"].uri == "s3://bucket/x", job)


def what_is_no_document_is_said():
    for name, text, said in (
            ("broken.json", '{"entry_point": \n"train.py",,}', "broken.json: not JSON: Expecting property name enclosed in "
             "double quotes: line 2, column 12"),
            ("list.json", "[1]", "list.json: a job is a table of settings, not [1]"),
            ("job.yaml", "a: 1", "job.yaml: a job document is a file .json, .toml or .py"),
            ("raises.py", "import os\nraise KeyError('x')\n", "raises.py: line 2: KeyError: 'x'"),
            ("ends.py", "import sys\nsys.exit(3)\n", "ends.py: line 2: SystemExit: 3"),
            ("empty.py", "x = 1\n", "empty.py: has neither `job = Job(...)` nor an estimator at the top level"),
            ("number.py", "job = 3\n", "number.py: job: is a int, and a Job, an estimator or a dict is needed")):
        expect(told(written(name, text)) == [said], told(ROOT / name), said)
    expect(told(ROOT / "none.json") == ["none.json: cannot be read: No such file or directory"], told(ROOT / "none.json"))
    expect(told(ROOT / "none.py") == ["none.py: cannot be read: No such file or directory"], told(ROOT / "none.py"))
    (ROOT / "latin.json").write_bytes(b'{"entry_point": "\xff"}')
    expect(told(ROOT / "latin.json")[0].startswith("latin.json: cannot be read: 'utf-8' codec"), told(ROOT / "latin.json"))


def broken_toml_is_said():
    needs_toml()
    found = told(written("broken.toml", "entry_point = \n"))
    expect(len(found) == 1 and found[0].startswith("broken.toml: not TOML: ") and "line 1" in found[0], found)


def a_key_that_is_there_twice_is_said():
    path = written("twice.json", '{"entry_point": "code/train.py",\n "max_run": 3,\n "hyperparameters": {"a": 1,\n "a": 2}}')
    expect(told(path) == ["twice.json:4: hyperparameters.a: is there twice"], told(path))


# ------------------------------------------------------------ places

def all_mistakes_of_toml_have_their_lines():
    needs_toml()
    path = written("wrong.toml", '''
        entry_point = "train.py"
        source_dir = "code"
        instance_count = "2"
        instence_type = "local"
        text = """
        max_run = 1
        """

        [distribution.smdistributed]
        dataparalell = {enabled = true}

        [environment]
        lines = [
          "not = a key",
          [1],
        ]
        OMP_NUM_THREADS = 4

        [[metric_definitions]]
        name = "good"
        regex = "x=(.)"
        [[metric_definitions]]
        name = "bad"
        regex = "loss=(["
        ''')
    # One message of the SDK has a line break.
    lines = dict(reversed(line.split(": ")[:2]) for line in told(path) if line.startswith("wrong.toml"))
    expect(lines == {"instance_count": "wrong.toml:4", "instence_type": "wrong.toml:5", "text": "wrong.toml:6",
                     "distribution.smdistributed.dataparalell": "wrong.toml:11", "environment.lines": "wrong.toml:14",
                     "environment.OMP_NUM_THREADS": "wrong.toml:18", "metric_definitions[1].regex": "wrong.toml:25"},
           *told(path))


def all_mistakes_of_json_have_their_lines():
    path = written("wrong.json", """
        {
          "source_dir": "code", "max_run": 0,
          "channels": {"train": {
            "uri": "data",
            "input_mode": "Fast"}},
          "metric_definitions": [
            {"name": "a", "regex": "(.)"},
            {"name": "b",
             "regex": "x"}]
        }
        """)
    expect(told(path) == [
        "wrong.json: entry_point: is missing",
        "wrong.json:3: max_run: 0, and the least is 1",
        'wrong.json:6: channels.train.input_mode: needs File or FastFile, not "Fast"; did you mean "FastFile"?',
        'wrong.json:10: metric_definitions[1].regex: metric "b": "x" has no group, and the number is what the first group '
        'matches, as '
        r"in loss=([-+.\w]+)"], *told(path))


# ------------------------------------------------------------ mistakes

def types_are_checked():
    is_wrong('instance_count: needs a whole number, not true', instance_count=True)
    is_wrong('instance_count: needs a whole number, not 2.0', instance_count=2.0)
    is_wrong('name: needs text, not 3; write "3"', name=3)
    is_wrong('environment.A: needs text, not 1; write "1"', environment={"A": 1})
    is_wrong('environment.A: needs text, not null', environment={"A": None})
    is_wrong('environment: needs a table, not []', environment=[])
    is_wrong('metric_definitions: needs a list, not {}', metric_definitions={})
    is_wrong('metric_definitions[0]: needs a table with name, regex, not "x"', metric_definitions=["x"])
    is_wrong('metric_definitions[0].regex: is missing', metric_definitions=[{"Name": "x"}])
    is_wrong('where.hosts[1]: needs text, not 2; write "2"', where={"engine": "hosts", "hosts": ["a", 2]}, instance_count=2)
    is_wrong('hyperparameters.3: a key is text, not 3', hyperparameters={3: 4})
    is_wrong('channels.a: needs a table with uri, input_mode, distribution, data_type, content_type, compression, '
             'record_wrapping, '
             'shuffle_seed, not 3', channels={"a": 3})
    expect([str(one) for one in problems("job")] == ['a job is a table of settings, not "job"'])


def names_are_checked():
    is_wrong('name: "my_job" is not the name of a job: use letters, digits and hyphens, with no hyphen at either end; try "my-job"',
             name="my_job")
    is_wrong('name: "-job" is not the name of a job: use letters, digits and hyphens, with no hyphen at either end; try "job"', name="-job")
    is_wrong('name: "" is not the name of a job: use letters, digits and hyphens, with no hyphen at either end', name="")
    is_wrong('base_job_name: 64 characters, and at most 63 are allowed', base_job_name="a" * 64)
    expect(wrong(name="a" * 63) == [] and wrong(name="a--b") == [])


def numbers_are_checked():
    is_wrong("instance_count: 0, and the least is 1", instance_count=0)
    is_wrong("workers_per_host: -1, and the least is 1", workers_per_host=-1)
    is_wrong("restarts: -1, and the least is 0", restarts=-1)
    is_wrong("stop_grace: -1, and the least is 0", stop_grace=-1)
    expect(wrong(stop_grace=0) == [])
    is_wrong("max_run: 2419201 seconds, and SageMaker allows 2419200, 28 days", max_run=2419201, where={"engine": "sagemaker"})
    expect(wrong(max_run=2419201) == [])
    is_wrong('framework: "PyTorch" is not known; pytorch, tensorflow, or leave it out; did you mean "pytorch"?',
             framework="PyTorch")
    is_wrong('instance_type: is empty; "local" is this machine', instance_type="")


def entry_points_are_checked():
    name = 'is not the name of a script: use letters, digits, ".", "_", "+" and "-", which is not the first of a name, and no ".."'
    for entry_point in ("-train.py", "a b.py", "../train.py", "a//b.py", "train.py;ls", "", "träin.py"):
        found = [str(one) for one in problems({**GOOD, "entry_point": entry_point}, files=False)]
        expect(found == [f'entry_point: "{entry_point}" {name}'], entry_point, *found)
    is_wrong(f'entry_point: "{ROOT}/code/train.py": with source_dir it is a path below that folder',
             entry_point=f"{ROOT}/code/train.py")
    is_wrong(f'entry_point: No file named "trian.py" was found in directory "{ROOT}/code". Did you mean "train.py"?',
             entry_point="trian.py")
    is_wrong(f'source_dir: no folder "{ROOT}/none"', source_dir=str(ROOT / "none"))
    is_wrong(f'entry_point: no file "{ROOT}/none.py"', entry_point=str(ROOT / "none.py"), source_dir=None)
    is_wrong(f'requirements: no file "{ROOT}/code/none.txt"', requirements="none.txt")
    expect(wrong(requirements="requirements.txt") == [])
    expect(wrong(entry_point="train.py", source_dir="s3://bucket/code.tar.gz") == [])
    expect(problems({**GOOD, "entry_point": "none.py"}, files=False) == [])


def hyperparameters_are_checked():
    is_wrong("hyperparameters.a: 2501 characters as JSON, and at most 2500 are allowed; put long values into a file of "
             "source_dir",
             hyperparameters={"a": "x" * 2499})
    expect(wrong(hyperparameters={"a": "x" * 2498}) == [])
    is_wrong(f"hyperparameters.{'k' * 257}: its name has 257 characters; 1 to 256 are allowed", hyperparameters={"k" * 257: 1})
    is_wrong("hyperparameters.when: has no form in JSON: Object of type set is not JSON serializable",
             hyperparameters={"when": {1}})
    many = {f"h{number}": number for number in range(100)}
    found = wrong(hyperparameters=many)
    expect(len(found) == 1 and found[0].startswith("hyperparameters: 105 are sent (5 of them describe how the job is run)"), found)


def variables_are_checked():
    name = "no name of a variable: letters, digits and _, no digit first, at most 512 characters"
    is_wrong(f"environment.1A: {name}", environment={"1A": ""})
    is_wrong(f"environment.A=B: {name}", environment={"A=B": ""})
    is_wrong("environment.A: 513 characters, and at most 512 are allowed", environment={"A": "x" * 513})
    is_wrong("environment.A: holds a NUL character, which no variable can", environment={"A": "a\0b"})
    is_wrong("hyperparameters.text: holds a NUL character, which no argument of a program can", hyperparameters={"text": "a\0b"})
    is_wrong("environment: 101 variables, and at most 100 are allowed", environment={f"A{number}": "" for number in range(101)})


def a_file_of_parameters_is_read_with_the_document():
    """The job runs in other folders, on other hosts."""
    (ROOT / "split.json").write_text('{"partitions": 1, "microbatches": 4}')

    def enabled(parameters):
        return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}, "mpi": {"enabled": True, "processes_per_host": 1}}
    job = job_read(written("split-job.json", json.dumps({**GOOD, "distribution": enabled("split.json")})))
    expect(job.distribution == enabled({"partitions": 1, "microbatches": 4}), job.distribution)
    text = told(written("split-job.json", json.dumps({**GOOD, "distribution": enabled("none.json")})))
    expect(len(text) == 1 and f"Received: {ROOT}/none.json." in text[0], text)


def channels_are_checked():
    for name in ("a b", ".", ".."):  # the last two would name the parent folders
        is_wrong(f'channels.{name}: is not a name of a channel: 1 to 64 letters, digits, ".", "-" and "_", and neither "." nor ".."',
                 channels={name: "s3://bucket/x"})
    is_wrong("channels: 21 channels, and at most 20 are allowed", channels={f"c{number}": "s3://bucket/x"
                                                                            for number in range(21)})
    is_wrong("channels.a.input_mode: mode Pipe is not served; File brings the objects as files",
             channels={"a": {"uri": "s3://bucket/x", "input_mode": "Pipe"}})
    is_wrong('channels.a.distribution: needs FullyReplicated or ShardedByS3Key, not "Sharded"; did you mean "ShardedByS3Key"?',
             channels={"a": {"uri": "s3://bucket/x", "distribution": "Sharded"}})
    is_wrong("channels.a.compression: is for mode Pipe alone, which is not served; leave it out: files arrive as they are",
             channels={"a": {"uri": "s3://bucket/x", "compression": "Gzip"}})
    is_wrong('channels.a.url: unknown key; did you mean "uri"?', channels={"a": {"uri": "s3://bucket/x", "url": "x"}})
    is_wrong(f'channels.a.uri: no file or folder "{ROOT}/none"', channels={"a": str(ROOT / "none")})
    is_wrong(f'channels.a.uri: no file or folder "{ROOT}/none"', channels={"a": f"file://{ROOT}/none"})
    is_wrong(f'channels.a.uri: no file or folder "{ROOT}/of\\n\\nthree lines"', channels={"a": f"{ROOT}/of\n\nthree lines"})
    expect(wrong(channels={"a": str(ROOT / "none")}, where={"engine": "slurm"}) == [])
    (ROOT / "a blank, 100%41#").mkdir()
    expect(wrong(channels={"a": (ROOT / "a blank, 100%41#").as_uri(), "b": str(ROOT / "a blank, 100%41#")}) == [])


def uris_are_checked():
    for uri, said in (("s3:/bucket/x", '"s3:/bucket/x" is neither a path nor a URI; did you mean "s3://bucket/x"?'),
                      ("S3://bucket/x", '"S3://bucket/x": no scheme of a URI, such as s3 or file, before "://"'),
                      ("s3://", '"s3://" names no bucket, as s3://bucket/prefix does: 3 to 63 lower-case letters, digits, "." '
                       'and "-"'),
                      ("s3://My_bucket/x", '"s3://My_bucket/x" names no bucket, as s3://bucket/prefix does: 3 to 63 '
                       'lower-case letters, '
                                           'digits, "." and "-"'),
                      ("file://data/x", '"file://data/x": the path after file:// is absolute, as in file:///data/train'),
                      ("gs://", '"gs://" names nothing after "://"'), ("", "is empty")):
        is_wrong(f"output_path: {said}", output_path=uri)
    is_wrong('checkpoints.local_path: "../x": a path below the base folder, or an absolute one, without ".."',
             checkpoints={"uri": "kept", "local_path": "../x"})
    is_wrong("checkpoints.uri: is missing", checkpoints={})
    for uri in ("s3://bucket", "s3://bucket/a b", "file:///x", "gs://b/c", "out", "/s3:/x"):
        expect(wrong(output_path=uri) == [], uri, wrong(output_path=uri))


def metrics_are_checked():
    is_wrong('metric_definitions[0].regex: metric "a": "loss=([" does not compile: unterminated character set at position 6',
             metric_definitions=[{"Name": "a", "Regex": "loss=(["}])
    is_wrong('metric_definitions[0].regex: metric "a": 501 characters; 1 to 500 are allowed',
             metric_definitions=[{"name": "a", "regex": "(" + "x" * 499 + ")"}])
    is_wrong('metric_definitions[0].name: 0 characters; 1 to 255 are allowed',
             metric_definitions=[{"name": "", "regex": "(x)"}])
    one = {"name": "a", "regex": "Train_error=(.*?);"}
    is_wrong("metric_definitions: 41 metrics, and at most 40 are allowed", metric_definitions=[one] * 41)
    expect(wrong(metric_definitions=[one] * 40) == [])


def places_to_run_are_checked():
    is_wrong('where.engine: "slrum" is not known; did you mean "slurm"?', where={"engine": "slrum"})
    is_wrong('where.engine: "" is not known; known: local, hosts, slurm, kubernetes, sagemaker', where={"engine": ""})
    is_wrong("where.hosts: names 1 hosts, and instance_count is 2", where={"engine": "hosts", "hosts": ["a"]}, instance_count=2)
    is_wrong("where.hosts: names a host twice, or none", where={"engine": "hosts", "hosts": ["a", "a"]}, instance_count=2)
    is_wrong("where.options.checkpoints_timeout: is '1 h', and has to be seconds, such as 600",
             where={"options": {"checkpoints_timeout": "1 h"}})
    expect(wrong(where={"options": {"checkpoints_timeout": 7.5, "silence": 60}}) == [])
    is_wrong('where.hosts: names hosts, and engine is "local"; write engine = "hosts", or leave hosts out',
             where={"hosts": ["a"]})
    is_wrong('where.engin: unknown key; did you mean "engine"?', where={"engin": "slurm"})
    expect(wrong(where={"engine": "slurm", "options": {"partition": "cpu"}}) == [])


def settings_that_exclude_each_other_are_checked():
    mpi = {"mpi": {"enabled": True, "processes_per_host": 4}}
    is_wrong("distribution.mpi.processes_per_host: 4, and workers_per_host is 2; give one of them", distribution=mpi,
             workers_per_host=2)
    expect(wrong(distribution=mpi, workers_per_host=4) == [])
    is_wrong("distribution.parameter_server: starts one process on each host, and workers_per_host is 2; leave that out",
             distribution={"parameter_server": {"enabled": True}}, workers_per_host=2)


def one_mistake_hides_no_other():
    found = wrong(name="a_b", instance_count="x", channels={"a": {}}, metric_definitions=[{"name": "a", "regex": "("}, {}],
                  environment={"A": 1, "B": "x" * 600}, where={"engine": 1, "hosts": ["a", "a"]}, distribution={"mpi": True})
    expect(sorted(line.split(": ")[0] for line in found) == [
        "channels.a.uri", "distribution.mpi", "environment.A", "environment.B", "instance_count", "metric_definitions[0].regex",
        "metric_definitions[1].name", "metric_definitions[1].regex", "name", "where.engine", "where.hosts"], *found)


# ------------------------------------------------------------ round trip

def random_text(chance, letters=string.printable + "äß漢\u2028"):
    return "".join(chance.choice(letters) for _ in range(chance.randrange(1, 12)))


def random_name(chance):
    return "".join(chance.choice(string.ascii_letters + string.digits) for _ in range(chance.randrange(1, 12)))


def random_value(chance, depth=0):
    kinds = [lambda: chance.randrange(-10**6, 10**6), lambda: chance.random(), lambda: chance.choice([True, False, None]),
             lambda: random_text(chance)]
    if depth < 2:
        kinds += [lambda: [random_value(chance, depth + 1) for _ in range(chance.randrange(3))],
                  lambda: {random_text(chance): random_value(chance, depth + 1) for _ in range(chance.randrange(3))}]
    return chance.choice(kinds)()


def random_uri(chance):
    return chance.choice(["s3://bucket/", "file:///", "/", "gs://b/"]) + random_text(chance)


def random_channel(chance):
    return Channel(random_uri(chance), chance.choice(["File", "FastFile"]), chance.choice(["FullyReplicated",
                                                                                           "ShardedByS3Key"]),
                   chance.choice(["S3Prefix", "ManifestFile"]), content_type=chance.choice([None, "text/csv"]),
                   shuffle_seed=chance.choice([None, 7]))


DISTRIBUTIONS = ({}, {"mpi": {"enabled": True, "custom_mpi_options": "-x A=1"}}, {"torch_distributed": {"enabled": True}},
                 {"smdistributed": {"dataparallel": {"enabled": True}}}, {"parameter_server": {"enabled": False}})


def random_job(chance):
    hosts = chance.randrange(1, 5)
    on_hosts = chance.random() < 0.5
    return Job(
        "train.py", name=chance.choice([None, random_name(chance)]), base_job_name=chance.choice([None, random_name(chance)]),
        framework=chance.choice([None, "pytorch"]), source_dir=chance.choice([None, str(ROOT / "code"),
                                                                              "s3://bucket/c.tar.gz"]),
        requirements=chance.choice([None, "requirements.txt"]), instance_count=hosts,
        instance_type=chance.choice(["local", "ml.p4d.24xlarge"]),
        workers_per_host=chance.choice([None, 1]), distribution=chance.choice(DISTRIBUTIONS),
        hyperparameters={random_text(chance): random_value(chance) for _ in range(chance.randrange(4))},
        channels={random_name(chance): random_channel(chance) for _ in range(chance.randrange(3))},
        metric_definitions=[Metric(random_text(chance), "(" + chance.choice(["a", "[0-9]+", "x|y"]) + ")")
                            for _ in range(chance.randrange(3))],
        environment={random_name(chance).lstrip(string.digits) + "_": random_text(chance) for _ in range(chance.randrange(3))},
        max_run=chance.randrange(1, 10**6), restarts=chance.randrange(3),
        checkpoints=chance.choice([None, Checkpoints(random_uri(chance))]),
        output_path=chance.choice([None, random_uri(chance)]),
        where=Where("hosts", [f"h{number}" for number in range(hosts)]) if on_hosts else
        Where("slurm", options={random_text(chance): random_value(chance)}))


def what_is_written_is_read_again():
    seed = random.randrange(10**9)
    chance = random.Random(seed)
    for number in range(400):
        job = random_job(chance)
        try:
            expect(job_of(as_data(job), files=False) == job, seed, number, job)
            expect(job_of(json.loads(json.dumps(as_data(job))), files=False) == job, seed, number, job)
        except JobError as error:
            raise AssertionError(f"seed {seed}, number {number}: {error}: {job}") from None


def no_data_are_too_odd_to_be_told_of():
    """Randomly changed documents are read, or refused with mistakes. No other exception is raised."""
    seed = random.randrange(10**9)
    chance = random.Random(seed)
    odd = [None, True, -1, 0, 3.5, "", "x", "s3://", [], {}, [1], [None], {"enabled": True}, {"a": {"b": None}}, {3: 4}, (),
           b"x", {"uri": None}]
    for number in range(2000):
        data = as_data(random_job(chance))
        for _ in range(chance.randrange(1, 4)):
            change_something(data, chance, odd)
        try:
            for one in problems(data, files=bool(number % 2)):
                expect(one.text and "\n\n" not in one.text, one)
        except Exception as error:
            raise AssertionError(f"seed {seed}, number {number}: {data}") from error


def change_something(data, chance, odd):
    inside = data
    while True:
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        key = chance.choice(list(keys)) if keys else "added"
        deeper = isinstance(inside, dict) and key in inside and isinstance(inside[key], (dict, list)) and inside[key]
        if deeper and chance.random() < 0.7 and isinstance(inside[key], dict):
            inside = inside[key]
            continue
        inside[key] = chance.choice(odd)
        return


try:
    run_cases([toml_json_and_python_say_the_same, paths_start_at_the_document, what_is_no_document_is_said, broken_toml_is_said,
               a_key_that_is_there_twice_is_said, all_mistakes_of_toml_have_their_lines, all_mistakes_of_json_have_their_lines,
               types_are_checked, names_are_checked, numbers_are_checked, entry_points_are_checked, hyperparameters_are_checked,
               variables_are_checked, a_file_of_parameters_is_read_with_the_document, channels_are_checked, uris_are_checked, metrics_are_checked, places_to_run_are_checked,
               settings_that_exclude_each_other_are_checked, one_mistake_hides_no_other, what_is_written_is_read_again,
               no_data_are_too_odd_to_be_told_of, documents_of_the_manual_are_right])
finally:
    shutil.rmtree(ROOT, ignore_errors=True)
