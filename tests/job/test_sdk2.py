#!/usr/bin/env python3
"""Our estimators compared with those of the SageMaker Python SDK v2 itself: the same cells have the same hyperparameters,
errors and requests. Cells that the SDK accepts although nobody can mean them fail with ours. Nothing here uses a network."""
import inspect
import io
import json
import logging
import os
import pathlib
import shutil
import socket
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parents[2]
VENV = TOP / "build/sdk2"
if pathlib.Path(sys.prefix).resolve() != VENV.resolve():
    if not (VENV / "bin/python3").exists():
        print(f"1..0 # SKIP there is no {VENV}: `make test-all` makes it")
        sys.exit(0)
    os.execv(VENV / "bin/python3", [str(VENV / "bin/python3"), *sys.argv])

ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-sdk2-"))
CODE = ROOT / "code"
CODE.mkdir()
(CODE / "train.py").write_text("")
(CODE / "train.sh").write_text("")
(CODE / "bad.json").write_text("{")
(CODE / "good.json").write_text('{"partitions": 2, "microbatches": 4}')
(ROOT / "config.yaml").write_text("SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n")
for variable in [name for name in os.environ if name.startswith(("AWS_", "SAGEMAKER_"))]:
    del os.environ[variable]
os.environ.update(SAGEMAKER_USER_CONFIG_OVERRIDE=str(ROOT / "config.yaml"),
                  SAGEMAKER_ADMIN_CONFIG_OVERRIDE=str(ROOT / "config.yaml"),
                  SAGEMAKER_SUPPRESS_V2_WARNING="1", AWS_DEFAULT_REGION="us-west-2", AWS_ACCESS_KEY_ID="none",
                  AWS_SECRET_ACCESS_KEY="none", AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE="/dev/null",
                  AWS_SHARED_CREDENTIALS_FILE="/dev/null", HOME=str(ROOT))
logging.disable(logging.WARNING)

import unittest.mock  # noqa: E402

import boto3  # noqa: E402
import numpy  # noqa: E402
import sagemaker  # noqa: E402
import sagemaker.deserializers  # noqa: E402
import sagemaker.estimator  # noqa: E402
import sagemaker.inputs  # noqa: E402
import sagemaker.huggingface  # noqa: E402
import sagemaker.pytorch  # noqa: E402
import sagemaker.serializers  # noqa: E402
import sagemaker.session  # noqa: E402
import sagemaker.tensorflow  # noqa: E402

import shoal.job as ours  # noqa: E402
import shoal.job.sdk.estimator  # noqa: E402
from shoal.job.document import JobError  # noqa: E402
from shoal.job.document.folder import Status  # noqa: E402
from tap import expect, run_cases  # noqa: E402


def session():
    """Returns a real session whose uploads go nowhere."""
    made = sagemaker.Session(boto_session=boto3.Session(region_name="us-west-2"))
    made.s3_resource = unittest.mock.MagicMock()
    made.sagemaker_config = {}  # else each estimator checks it against its schema nine times: half a second of CPU time
    return made


def no_network(*_):
    raise AssertionError("the SDK reaches for a network")


socket.socket.connect = no_network


SESSION = session()
VENDOR = {"PyTorch": sagemaker.pytorch.PyTorch, "TensorFlow": sagemaker.tensorflow.TensorFlow,
          "Estimator": sagemaker.estimator.Estimator, "S": SESSION, "CODE": str(CODE)}
OURS = {"PyTorch": ours.PyTorch, "TensorFlow": ours.TensorFlow, "Estimator": ours.Estimator, "S": None, "CODE": str(CODE)}
COMMON = "role='arn:aws:iam::1:role/r', instance_count=2, sagemaker_session=S, output_path='s3://bucket/out', source_dir=CODE"
HYPERPARAMETERS = """{"epochs": 3, "text": "a b", "flag": True, "none": None, "list": [1, "x"], "rate": 1e-3, "nested": {"a":
[{}]}, 7: "x"}"""


def torch(distribution, more="", kind="ml.p4d.24xlarge", version="2.0.1", py="py310", entry="train.py"):
    return (f"PyTorch({entry!r}, framework_version={version!r}, py_version={py!r}, instance_type={kind!r}, {COMMON}, "
            f"distribution={distribution}, {more})")


def tensorflow(distribution, more="", kind="ml.p4d.24xlarge", version="2.11", py="py39"):
    return (f"TensorFlow(entry_point='train.py', framework_version={version!r}, py_version={py!r}, instance_type={kind!r}, "
            f"{COMMON}, "
            f"distribution={distribution}, {more})")


def generic(more=""):
    return f"Estimator('image', entry_point='train.py', instance_type='ml.c5.xlarge', {COMMON}, {more})"


def prepared(cell, names):
    """Returns the hyperparameters that a cell's estimator sends for a job named j."""
    estimator = eval(cell, dict(names))
    estimator._prepare_for_training("j")
    return estimator.hyperparameters()


def same(cells):
    for cell in cells:
        theirs, mine = prepared(cell, VENDOR), prepared(cell, OURS)
        # The runner of a job decides where the source is.
        place = "sagemaker_submit_directory"
        expect(place in theirs and place in mine, cell, theirs, mine)
        theirs.pop(place), mine.pop(place)
        expect(theirs == mine, cell, "theirs: " + json.dumps(theirs, sort_keys=True),
               "ours:   " + json.dumps(mine, sort_keys=True))


def failure(cell, names):
    try:
        prepared(cell, names)
    except Exception as error:
        return error
    return None


def same_error(cells):
    for cell in cells:
        theirs, mine = failure(cell, VENDOR), failure(cell, OURS)
        expect(theirs is not None and str(theirs) == str(mine), cell, f"theirs: {theirs!r}", f"ours:   {mine!r}")
        expect(isinstance(mine, type(theirs)), cell, repr(theirs), repr(mine))


# ------------------------------------------------------------ hyperparameters

DATAPARALLEL = '{"smdistributed": {"dataparallel": {"enabled": True}}}'


def hyperparameters_are_the_same_for_every_strategy():
    with_options = '{"enabled": True, "custom_mpi_options": "-verbose -x NCCL_DEBUG=VERSION"}'
    parameters = '{"enabled": True, "parameters": {"partitions": 2, "microbatches": 4, "pipeline": "interleaved", "ddp": True}}'
    from_file = f'{{"enabled": True, "parameters": "{CODE}/good.json"}}'
    mpi = '"mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "--NCCL_DEBUG INFO"}'
    for make in (torch, tensorflow):
        same(make(distribution) for distribution in (
            "None", "{}", DATAPARALLEL, f'{{"smdistributed": {{"dataparallel": {with_options}}}}}',
            '{"smdistributed": {"dataparallel": {"enabled": False}}}', '{"mpi": {"enabled": True}}', f"{{{mpi}}}",
            '{"mpi": {"enabled": False, "processes_per_host": 2}}', '{"parameter_server": {"enabled": True}}',
            '{"parameter_server": {"enabled": False}}', f'{{"smdistributed": {{"modelparallel": {parameters}}}, {mpi}}}',
            f'{{"smdistributed": {{"modelparallel": {from_file}}}, {mpi}}}',
            f'{{"mpi": {{"enabled": False, "processes_per_host": 2}}, "smdistributed": {{"dataparallel": {with_options}}}}}'))
    same(torch(distribution) for distribution in (
        f'{{"pytorchddp": {with_options}}}', '{"pytorchddp": {"enabled": False}}', '{"torch_distributed": {"enabled": True}}',
        '{"torch_distributed": {"enabled": False}}',
        f'{{"smdistributed": {{"modelparallel": {parameters}}}, "torch_distributed": {{"enabled": True}}}}'))
    same([tensorflow('{"multi_worker_mirrored_strategy": {"enabled": True}}'),
          tensorflow('{"multi_worker_mirrored_strategy": {"enabled": False}}')])


def hyperparameters_of_users_are_the_same():
    more = (f"hyperparameters={HYPERPARAMETERS}", "container_log_level=10", "hyperparameters={'sagemaker_program': 'x'}")
    same(make(DATAPARALLEL, one) for make in (torch, tensorflow) for one in more)
    same(generic(one) for one in more[1:])
    same([generic("hyperparameters={'epochs': 3, 'text': 'a b', 'flag': True}")])
    same([tensorflow("None", "model_dir='s3://bucket/model'"), tensorflow("None", "model_dir=False"),
          tensorflow("None", "model_dir='/opt/ml/model', hyperparameters={'model_dir': 'x'}")])


def hyperparameters_that_are_set_later_are_the_same():
    for cell in (torch("None", "hyperparameters={'a': 1, 'b': 2}"), tensorflow("None", "model_dir=False"), generic()):
        both = [eval(cell, dict(names)) for names in (VENDOR, OURS)]
        for estimator in both:
            estimator.set_hyperparameters(b=3, text="a b", flag=True)
        theirs, mine = (estimator.hyperparameters() for estimator in both)
        expect(theirs == mine, cell, theirs, mine)


# ------------------------------------------------------------ errors

def errors_of_strategies_are_the_same():
    same_error(torch(distribution) for distribution in (
        '{"pytorchddp": {"enabled": True}, "smdistributed": {"dataparallel": {"enabled": True}}}', '{"smdistributed": True}',
        '{"smdistributed": "dataparallel"}', '{"smdistributed": {"dataparalell": {"enabled": True}}}',
        '{"smdistributed": {"dataparallel": {"enabled": True}, "modelparallel": {"enabled": True}}}',
        '{"pytorchxla": {"enabled": True}}', '{"multi_worker_mirrored_strategy": {"enabled": True}}',
        '{"mpi": {"enabled": True}, "instance_groups": ["a"]}', '{"smdistributed": True, "instance_groups": ["a"]}',
        '{"pytorchddp": {"enabled": True}, "smdistributed": True, "instance_groups": ["a"]}'))
    mirrored = '"multi_worker_mirrored_strategy": {"enabled": True}'
    same_error([tensorflow('{"parameter_server": {"enabled": True}, "instance_groups": ["a"]}'),
                tensorflow(f'{{{mirrored}, "parameter_server": {{"enabled": True}}}}'),
                tensorflow(f'{{{mirrored}, "smdistributed": {{"dataparallel": {{"enabled": True}}}}}}')])


def errors_of_scripts_and_missing_versions_are_the_same():
    torchrun = '{"torch_distributed": {"enabled": True}}'
    same_error([
        torch(torchrun, entry="train.sh"), torch(torchrun, "image_uri='i'", entry="train.sh", kind="ml.c5.xlarge"),
        torch("None", version=None), torch("None", py=None), tensorflow("None", version=None),
        torch("None", entry="s3://bucket/train.py"), torch("None", entry=None)])


def versions_and_instances_of_containers_are_not_checked():
    """The SDK refuses versions and machines for which Amazon has no container. A job on one's own machines uses none."""
    torchrun, ddp = '{"torch_distributed": {"enabled": True}}', '{"pytorchddp": {"enabled": True}}'
    mirrored = '{"multi_worker_mirrored_strategy": {"enabled": True}}'
    for cell in (torch(DATAPARALLEL, version="2.9.0"), torch(ddp, py="py2"), torch(DATAPARALLEL, kind=None),
                 torch(DATAPARALLEL, kind="ml.p5.48xlarge"), torch(torchrun, version="2.9.0", kind="ml.g5.xlarge"),
                 torch(torchrun, kind="ml.c5.xlarge"), torch('{"mpi": {"enabled": True}}', kind="ml.trn1.2xlarge"),
                 torch(DATAPARALLEL, "image_uri='x/pytorch-training:2.0.1-gpu-py310-cu121-ubuntu20.04-sagemaker'"),
                 tensorflow(DATAPARALLEL, version="2.12"), tensorflow(mirrored, version="2.8")):
        expect(isinstance(failure(cell, VENDOR), ValueError), cell, "the SDK accepts it", repr(failure(cell, VENDOR)))
        expect(failure(cell, OURS) is None, cell, repr(failure(cell, OURS)))


def errors_of_modelparallel_are_the_same():
    wrong = (
        '{"pipeline": "x"}', '{"placement_strategy": "x"}', '{"optimize": 3}', '{"microbatches": 0}', '{"partitions": "2"}',
        '{"active_microbatches": -1}', '{"auto_partition": "x"}', '{"contiguous": 2}', '{"load_partition": None}',
        '{"horovod": "yes"}',
        '{"ddp": 3}', '{"deterministic_server": "x"}', '{"partition_file": 3}', '{"auto_partition": False}',
        '{"default_partition": 2, "partitions": 2}', '{"memory_weight": 1.1}', '{"memory_weight": -0.1}', '{"ddp_port": 3}',
        '{"ddp_dist_backend": "nccl"}', '{"ddp": True, "ddp_port": -1}', '{"ddp": True, "ddp_port": "x"}',
        '{"horovod": True, "ddp": True}',
        '{"pipeline": "x", "ddp_port": -1}', "'none.json'", f"'{CODE}/bad.json'")
    cell = '{"smdistributed": {"modelparallel": {"enabled": True, "parameters": %s}}, "mpi": {"enabled": True}}'
    same_error(torch(cell % one) for one in wrong)


def what_the_sdk_lets_pass_is_an_error():
    """Each of these cells trains something unintended, or stops with an error that does not mention a distribution."""
    for distribution, said in (
            ('{"smdistribute": {"dataparallel": {"enabled": True}}}', 'distribution.smdistribute: unknown strategy; did you '
             'mean "smdistributed"?'),
            ('{"dataparallel": {"enabled": True}}', 'distribution.dataparallel: unknown strategy; write "smdistributed": '
             '{"dataparallel": ...}'),
            ('{"horovod": {"enabled": True}}', "distribution.horovod: unknown strategy; known: mpi, "
             "multi_worker_mirrored_strategy, "
                                               "parameter_server, pytorchddp, pytorchxla, smdistributed, torch_distributed"),
            ('{"mpi": {"enable": True}}', 'distribution.mpi.enable: unknown setting; did you mean '
             '"enabled"?\ndistribution.mpi: "enabled" is '
                                          'missing, without which nothing is distributed; write "enabled": true, or false'),
            ('{"mpi": {"processes_per_host": 2}}', 'distribution.mpi: "enabled" is missing, without which nothing is '
             'distributed; write '
                                                   '"enabled": true, or false'),
            ('{"mpi": True}', 'distribution.mpi: needs a table such as {"enabled": true}, not true'),
            ('{"mpi": None}', 'distribution.mpi: needs a table such as {"enabled": true}, not null'),
            ('"mpi"', 'distribution: needs a table of strategies, not "mpi"'),
            ('["mpi"]', 'distribution: needs a table of strategies, not ["mpi"]'),
            ('{"mpi": {"enabled": "true"}}', 'distribution.mpi.enabled: needs true or false, not "true"'),
            ('{"mpi": {"enabled": True, "processes_per_host": "8"}}', 'distribution.mpi.processes_per_host: needs a whole '
             'number, not "8"'),
            ('{"mpi": {"enabled": True, "processes_per_host": True}}', "distribution.mpi.processes_per_host: needs a whole "
             "number, not true"),
            ('{"mpi": {"enabled": True, "processes_per_host": 0}}', "distribution.mpi.processes_per_host: needs a positive "
             "number, not 0"),
            ('{"mpi": {"enabled": True, "custom_mpi_options": ["-x", "A=1"]}}',
             'distribution.mpi.custom_mpi_options: needs text, not ["-x", "A=1"]'),
            ('{"mpi": {"enabled": True, "custom_mpi_options": "-x \\"A=1"}}',
             "distribution.mpi.custom_mpi_options: cannot be read: No closing quotation: '-x \"A=1'"),
            ('{"mpi": {"enabled": True}, "torch_distributed": {"enabled": True}}',
             "distribution.mpi: torch_distributed and mpi are both enabled, and only one of them can start the workers; "
             "enable one"),
            ('{"mpi": {"enabled": True}, "smdistributed": {"dataparallel": {"enabled": True}}}',
             "distribution.mpi: smdistributed.dataparallel and mpi are both enabled, and only one of them can start the "
             "workers; enable one"),
            ('{"torch_distributed": {"enabled": True}, "smdistributed": {"dataparallel": {"enabled": True}}}',
             "distribution.torch_distributed: smdistributed.dataparallel and torch_distributed are both enabled, and only one "
             "of them can "
             "start the workers; enable one"),
            ('{"smdistributed": {}}', "distribution.smdistributed: names no strategy; known: dataparallel, modelparallel"),
            ('{"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}}}',
             'distribution.smdistributed.modelparallel: needs "mpi", or "torch_distributed" since its version 2, to be '
             'enabled as well: '
             "these start its workers")):
        cell = torch(distribution)
        theirs, mine = failure(cell, VENDOR), failure(cell, OURS)
        expect(theirs is None or not isinstance(theirs, ValueError) or "dictionary" in str(theirs), cell, repr(theirs))
        expect(isinstance(mine, JobError), cell, repr(mine))
        expect(str(mine) == said, cell, f"theirs: {theirs!r}", f"ours: {mine}", f"expected: {said}")


def a_failed_job_is_told_in_the_same_words():
    for status, reason in (("Failed", "AlgorithmError: x"), ("Failed", None), ("Failed", "CapacityError: none")):
        description = {"TrainingJobStatus": status, **({"FailureReason": reason} if reason else {})}
        try:
            sagemaker.session._check_job_status("j", description, "TrainingJobStatus")
        except Exception as error:
            theirs = error
        try:
            shoal.job.sdk.estimator._check_status(Status("j", status, failure_reason=reason))
        except ours.UnexpectedStatusException as error:
            mine = error
        expect(str(theirs) == str(mine) and type(theirs).__name__ == type(mine).__name__, repr(theirs), repr(mine))
        expect((theirs.allowed_statuses, theirs.actual_status) == (mine.allowed_statuses, mine.actual_status))


# ------------------------------------------------------------ names and arguments

EXTRA = {"where", "workers_per_host", "requirements"}  # only ours has these


def parameters(function):
    """Returns names and defaults of a function's parameters, including those of the constructors that its **kwargs reach.
    Also returns the order of its own parameters."""
    owner = function if inspect.isclass(function) else None
    functions = [vars(one)["__init__"] for one in owner.__mro__ if "__init__" in vars(one)
                 and one is not object] if owner else [function]
    found, order = {}, []
    for index, one in enumerate(functions):
        listed = [p for p in inspect.signature(one).parameters.values() if p.kind is not p.VAR_KEYWORD and p.name != "self"]
        order = order or [p.name for p in listed]
        for parameter in listed:
            found.setdefault(parameter.name, parameter.default)
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(one).parameters.values()):
            break
    return found, order


def plain(default):
    """Returns simple defaults as they are and None for objects (serializers). If ours is None, another test compares the
    class that it selects."""
    return default if isinstance(default, (str, int, float, bool, tuple, type(None), type(inspect._empty))) else None


def arguments_are_the_same():
    pairs = [(getattr(ours, name), theirs) for name, theirs in list(VENDOR.items())[:3]]
    pairs += [(ours.HuggingFace, sagemaker.huggingface.HuggingFace), (ours.TrainingInput, sagemaker.inputs.TrainingInput), (ours.FileSystemInput, sagemaker.inputs.FileSystemInput),
              (ours.Predictor, sagemaker.predictor.Predictor), (ours.PyTorchPredictor, sagemaker.pytorch.PyTorchPredictor),
              (ours.TensorFlowPredictor, sagemaker.tensorflow.TensorFlowPredictor)]
    for name in ("fit", "attach", "deploy", "hyperparameters", "set_hyperparameters", "logs", "training_image_uri"):
        pairs.append((getattr(ours.PyTorch, name), getattr(sagemaker.pytorch.PyTorch, name)))
    for name in ("predict", "delete_endpoint", "delete_model", "delete_predictor"):
        pairs.append((getattr(ours.Predictor, name), getattr(sagemaker.predictor.Predictor, name)))
    for mine, theirs in pairs:
        (mine_found, mine_order), (their_found, their_order) = parameters(mine), parameters(theirs)
        only_mine, only_theirs = set(mine_found) - set(their_found) - EXTRA, set(their_found) - set(mine_found)
        told = f"{mine}: ours {sorted(only_mine)}, theirs {sorted(only_theirs)}"
        expect(set(mine_found) - EXTRA == set(their_found) - {"is_nova_job"}, told)
        for name in set(their_found) - {"is_nova_job"}:
            expect(plain(mine_found[name]) == plain(their_found[name]), mine, name, mine_found[name], their_found[name])
        positional = min(len(mine_order), len(their_order), 4)
        expect(mine_order[:positional] == their_order[:positional], mine, mine_order, their_order)


def versions_of_transformers_are_checked_alike():
    """The same exceptions and texts as the SDK's, and a framework by the version that is given."""
    common = {"entry_point": "train.py", "py_version": "py310", "source_dir": str(CODE), "instance_count": 1, "instance_type": "ml.p4d.24xlarge"}
    wrong = [{}, {"transformers_version": "4.28.1"}, {"transformers_version": "4.28.1", "pytorch_version": "2.0.0", "tensorflow_version": "2.6.3"},
             {"transformers_version": "4.28", "pytorch_version": "2.0.0"}]
    for versions in wrong:
        told = []
        for estimator, more in ((sagemaker.huggingface.HuggingFace, {"role": "r", "sagemaker_session": SESSION}), (ours.HuggingFace, {})):
            try:
                estimator(**common, **versions, **more)
                raise AssertionError(f"no error: {versions}")
            except ValueError as error:
                told.append(str(error))
        expect(told[0] == told[1], versions, told)
    for name, framework in (("pytorch_version", "pytorch"), ("tensorflow_version", "tensorflow")):
        estimator = ours.HuggingFace(**common, transformers_version="4.28.1", **{name: "2.0.0"}, hyperparameters={"epochs": 3},
                                     distribution={"smdistributed": {"dataparallel": {"enabled": True}}})
        job = estimator.as_job()
        expect(job.framework == framework and job.distribution and job.entry_point == "train.py", job)
        attached = ours.HuggingFace._of_job(job, "model")
        expect(attached.as_job() == job or attached.framework == framework, attached.as_job(), job)


def unknown_arguments_are_refused():
    for cell, said in ((torch("None", "instance_typ='x'"), "PyTorch.__init__() got an unexpected keyword argument "
                        "'instance_typ'; did you mean "
                                                           '"instance_type"?'),
                       (tensorflow("None", "zzz=1"), "TensorFlow.__init__() got an unexpected keyword argument 'zzz'"),
                       (generic("hyperparameter={}"), "Estimator.__init__() got an unexpected keyword argument "
                        "'hyperparameter'; did you mean "
                                                      '"hyperparameters"?')):
        mine = failure(cell, OURS)
        expect(isinstance(mine, TypeError) and str(mine) == said, cell, repr(mine))


def inputs_have_the_same_configuration():
    shuffle = (sagemaker.inputs.ShuffleConfig(7), ours.ShuffleConfig(7))
    for arguments in ({}, {"distribution": "ShardedByS3Key"}, {"compression": "Gzip", "content_type": "text/csv",
                                                               "input_mode": "Pipe"},
                      {"record_wrapping": "RecordIO", "s3_data_type": "ManifestFile"},
                      {"attribute_names": ["a"], "target_attribute_name": "b"},
                      {"instance_groups": ["g"]}, {"hub_access_config": {"a": 1}, "model_access_config": {"b": 2}}):
        for seed in (None, *zip(shuffle)):
            theirs = sagemaker.inputs.TrainingInput("s3://b/x", **arguments, **({"shuffle_config": shuffle[0]} if seed else {}))
            mine = ours.TrainingInput("s3://b/x", **arguments, **({"shuffle_config": shuffle[1]} if seed else {}))
            expect(theirs.config == mine.config, theirs.config, mine.config)
    arguments = ("fs-1", "EFS", "/data", "rw", "text/csv")
    expect(sagemaker.inputs.FileSystemInput(*arguments).config == ours.FileSystemInput(*arguments).config)
    for wrong in (("fs-1", "NFS", "/data"), ("fs-1", "EFS", "/data", "x")):
        told = []
        for kind in (sagemaker.inputs.FileSystemInput, ours.FileSystemInput):
            try:
                kind(*wrong)
            except ValueError as error:
                told.append(str(error))
        expect(len(told) == 2 and told[0] == told[1], told)


# ------------------------------------------------------------ requests

def outcome(function, *arguments):
    """Returns a function's result, or its error."""
    try:
        return function(*arguments)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def serializers_write_the_same():
    array = numpy.arange(6, dtype="float32").reshape(2, 3)
    data = (array, array[0], [[1, 2], [3, 4]], [1, 2], (1, 2), "1,2\n3", {"a": [1, {"b": None}]}, {"a": array}, [],
            numpy.array([]), 3,
            ["x", "a,b"], [["x"], ["y"]], b"ab", str(CODE / "good.json"), "/none/none")
    for name in ("CSVSerializer", "NumpySerializer", "JSONSerializer", "IdentitySerializer", "JSONLinesSerializer",
                 "StringSerializer",
                 "LibSVMSerializer", "DataSerializer"):
        theirs, mine = getattr(sagemaker.serializers, name)(), getattr(ours, name)()
        expect(theirs.CONTENT_TYPE == mine.CONTENT_TYPE, name)
        for one in data:
            try:
                wanted = outcome(theirs.serialize, one)
            except (TypeError, AttributeError, LookupError):
                continue  # not meant for such data
            got = outcome(mine.serialize, one)
            expect(wanted is got or wanted == got, name, repr(one), repr(wanted), repr(got))
    for make in (sagemaker.serializers.CSVSerializer, ours.CSVSerializer):
        expect(make(content_type="text/other").CONTENT_TYPE == "text/other")
        expect(outcome(make, 3).startswith("ValueError: content_type must be a string"), outcome(make, 3))
    chosen = [kind(dtype="float64").serialize(array) for kind in (sagemaker.serializers.NumpySerializer, ours.NumpySerializer)]
    expect(chosen[0] == chosen[1])


def deserializers_read_the_same():
    npy = ours.NumpySerializer().serialize(numpy.arange(6).reshape(2, 3))
    for name, content_type, data in (
            ("BytesDeserializer", "x", b"ab"), ("StringDeserializer", "x", "ä".encode()),
        ("CSVDeserializer", "text/csv", b'1,"a,b"\n2,c\n'),
            ("JSONDeserializer", "application/json", b'{"a": [1]}'), ("JSONLinesDeserializer", "x", b"[1]\n{}\n"),
            ("NumpyDeserializer", "application/x-npy", npy), ("NumpyDeserializer", "text/csv", b"1,2\n3,4"),
            ("NumpyDeserializer", "application/json", b"[[1, 2]]"), ("PandasDeserializer", "text/csv", b"a,b\n1,2\n"),
            ("PandasDeserializer", "application/json", b'[{"a": 1}]')):
        theirs, mine = getattr(sagemaker.deserializers, name)(), getattr(ours, name)()
        expect(theirs.ACCEPT == mine.ACCEPT, name, theirs.ACCEPT, mine.ACCEPT)
        stream = io.BytesIO(data)
        wanted, got = theirs.deserialize(io.BytesIO(data), content_type), mine.deserialize(stream, content_type)
        if "Numpy" in name:
            is_same = numpy.array_equal(wanted, got)
        else:
            is_same = wanted.equals(got) if hasattr(wanted, "equals") else wanted == got
        expect(is_same and type(wanted) is type(got), name, wanted, got)
        expect(stream.closed, name)
    stream = io.BytesIO(b"x")
    expect(ours.StreamDeserializer().deserialize(stream, "y") == (stream, "y") and not stream.closed)
    expect(outcome(ours.NumpyDeserializer().deserialize, io.BytesIO(b""), "text/x")
           == outcome(sagemaker.deserializers.NumpyDeserializer().deserialize, io.BytesIO(b""), "text/x"))


def predictors_have_the_same_serializers():
    for mine, theirs in ((ours.Predictor, sagemaker.predictor.Predictor), (ours.PyTorchPredictor,
                                                                           sagemaker.pytorch.PyTorchPredictor),
                         (ours.TensorFlowPredictor, sagemaker.tensorflow.TensorFlowPredictor)):
        mine, theirs = mine("e"), theirs("e", SESSION)
        for part in ("serializer", "deserializer"):
            expect(type(getattr(mine, part)).__name__ == type(getattr(theirs, part)).__name__, mine, part)
        expect(mine.content_type == theirs.serializer.CONTENT_TYPE and mine.accept == theirs.deserializer.ACCEPT)


try:
    run_cases([hyperparameters_are_the_same_for_every_strategy, hyperparameters_of_users_are_the_same,
               hyperparameters_that_are_set_later_are_the_same, errors_of_strategies_are_the_same,
               errors_of_scripts_and_missing_versions_are_the_same,
               versions_and_instances_of_containers_are_not_checked, errors_of_modelparallel_are_the_same,
               what_the_sdk_lets_pass_is_an_error,
               a_failed_job_is_told_in_the_same_words, arguments_are_the_same, versions_of_transformers_are_checked_alike, unknown_arguments_are_refused,
               inputs_have_the_same_configuration, serializers_write_the_same, deserializers_read_the_same,
               predictors_have_the_same_serializers])
finally:
    shutil.rmtree(ROOT, ignore_errors=True)
