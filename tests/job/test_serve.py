#!/usr/bin/env python3
"""The endpoint: /ping, /invocations and the functions of the vendor's containers. Its answers equal those of the vendor's
server for the same archive. Errors tell a client what failed, but no path of this machine."""
import asyncio
import http.client
import io
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import unittest.mock
import urllib.error
import urllib.request
import zipfile

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "tests/multi"), str(TOP / "python")]

import numpy  # noqa: E402
from shoal.job import serving  # noqa: E402
from shoal.job.serving import serve  # noqa: E402
from jobs import SHOAL  # noqa: E402
from stores import CREDENTIALS, S3, message, wait_for  # noqa: E402
from tap import Skip, expect, run_cases  # noqa: E402

JSON, CSV, NPY, NPZ = "application/json", "text/csv", "application/x-npy", "application/x-npz"
INFERENCE = TOP / "build/inference/bin/python3"
SDK2 = TOP / "build/sdk2/bin/python3"

# A model of three weights. The first number of a request selects the behavior of a prediction.
SCRIPT = """
import json, os, pathlib, sys, time
import numpy
import helper

def model_fn(model_dir):
    return numpy.array(json.loads(open(os.path.join(model_dir, "weights.json")).read()))

def predict_fn(data, model):
    first = float(numpy.asarray(data).reshape(-1)[0])
    if first == 1000:
        raise KeyError(f"no such thing in {__file__}")
    if first == 1001:
        gate = pathlib.Path(os.environ["GATE"])
        gate.with_name("began").touch()
        until = time.monotonic() + 60
        while not gate.exists() and time.monotonic() < until:
            time.sleep(0.02)
    if first == 1002:
        os._exit(9)
    if first == 1003:
        return numpy.array([os.getpid()])
    return helper.times(data, model)
"""
HELPER = "def times(data, model):\n    return data @ model\n"


def archive_make(folder, files):
    """Writes a model.tar.gz with these files, by name."""
    path = pathlib.Path(folder) / "model.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            data = text if isinstance(text, bytes) else text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def model_files(script=SCRIPT, **more):
    return {"weights.json": "[1.0, 10.0, 100.0]", "code/inference.py": script, "code/helper.py": HELPER, **more}


def handler_of(script, folder, **files):
    """Returns a handler in this process with its model loaded."""
    top = pathlib.Path(tempfile.mkdtemp(dir=folder))
    (top / "code").mkdir()
    for name, text in {"code/inference.py": script, **files}.items():
        (top / name).write_text(text)
    handler = serving.Handler(top)
    before = list(sys.path)
    try:
        handler.load()
    finally:
        sys.path[:] = before
    return handler


def ask(url, body=None, content_type=JSON, accept=None, path="/invocations", timeout=60):
    """Returns (status, body, content type)."""
    headers = {name: value for name, value in (("Content-Type", content_type), ("Accept", accept)) if value}
    request = urllib.request.Request(url + path, data=body, headers=headers, method="GET" if body is None else "POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read(), answer.headers["content-type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers["content-type"]


def npy(array):
    data = io.BytesIO()
    numpy.save(data, array)
    return data.getvalue()


def npz(**arrays):
    data = io.BytesIO()
    numpy.savez(data, **arrays)
    return data.getvalue()


ROWS = numpy.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
SUMS = [321.0, 654.0]
REQUESTS = [(json.dumps(ROWS.tolist()).encode(), JSON, JSON), (b"1,2,3\n4,5,6\n", CSV, JSON), (npy(ROWS), NPY, JSON),
            (npy(ROWS), NPY, NPY), (npy(ROWS), NPY, CSV), (b"[[1, 2, 3], [4, 5, 6]]", JSON, None), (b"1,2,3\n4,5,6\n", CSV, "*/*")]


# ---- one endpoint for several cases ----

class Shared:
    endpoint = None
    folder = None


def url():
    if Shared.endpoint is None:
        Shared.folder = tempfile.TemporaryDirectory(prefix="shoal-test-serve-")
        archive = archive_make(Shared.folder.name, model_files())
        Shared.endpoint = serve.start(str(archive), environment={"GATE": str(gate())})
    return Shared.endpoint.url


def gate():
    """A prediction of 1001 waits until this file exists."""
    return pathlib.Path(Shared.folder.name) / "gate"


def prediction_begin():
    """Starts a prediction and returns once it waits at the gate. Returns its thread, and the list that receives the answer."""
    answers, address = [], url()
    for name in ("gate", "began"):
        gate().with_name(name).unlink(missing_ok=True)
    thread = threading.Thread(target=lambda: answers.append(ask(address, b"[1001, 0, 0]")))
    thread.start()
    wait_for(gate().with_name("began").exists, "the beginning of a prediction")
    return thread, answers


def the_types_of_the_containers_come_and_go():
    for body, content_type, accept in REQUESTS:
        status, answer, answered = ask(url(), body, content_type, accept)
        expect(status == 200, status, answer)
        if accept == NPY:
            expect(answered == NPY and numpy.load(io.BytesIO(answer)).tolist() == SUMS, answered, answer)
        elif accept == CSV:
            expect(answered == CSV and answer == b"321.0\n654.0\n", answered, answer)
        else:
            expect(answered == JSON and json.loads(answer) == SUMS, answered, answer)
    status, answer, _ = ask(url(), npz(x=ROWS), NPZ)
    expect(status == 200 and json.loads(answer) == SUMS, status, answer)


def the_first_type_of_accept_that_can_be_written_is_taken():
    for accept, wanted in (("image/png, text/csv;q=0.9", CSV), ("text/csv;q=0.1, application/x-npy", NPY),
                           ("application/json; charset=utf-8", JSON)):
        status, _, answered = ask(url(), npy(ROWS), NPY, accept)
        expect((status, answered) == (200, wanted), accept, status, answered)


def ping_answers():
    expect(ask(url(), path="/ping")[0] == 200)


def what_a_client_does_wrong_is_told_apart():
    cases = [((b"[1, 2", JSON, None), 400, "MalformedBody", "the body is not application/json"),
             ((b"\xff\xfe", CSV, None), 400, "MalformedBody", "the body is not text in UTF-8"),
             ((b"no array", NPY, None), 400, "MalformedBody", "the body is not application/x-npy"),
             ((b"<x/>", "text/xml", None), 415, "UnsupportedContentType", "Content-Type text/xml is not understood"),
             ((npy(ROWS), NPY, "image/png"), 406, "NotAcceptable", "Accept image/png cannot be answered")]
    for (body, content_type, accept), status, kind, text in cases:
        got, answer, answered = ask(url(), body, content_type, accept)
        told = json.loads(answer)["error"]
        expect((got, answered, told["type"]) == (status, JSON, kind) and text in told["message"], got, told)
    pickled = io.BytesIO()
    numpy.save(pickled, numpy.array([{"a": 1}], dtype=object), allow_pickle=True)
    expect(ask(url(), pickled.getvalue(), NPY)[0] == 400)
    for path, body, status in (("/nothing", b"", 404), ("/invocations", None, 405), ("/ping", b"", 405)):
        got, answer, _ = ask(url(), body, path=path)
        expect(got == status and "POST /invocations" in json.loads(answer)["error"]["message"], got, answer)


def arrays_that_unpack_to_gigabytes_are_refused():
    """Three megabytes of deflated zeros. The archive's header has the size of its members."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w") as member:
            numpy.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": (40 << 20,)})
            for _ in range(40):
                member.write(bytes(8 << 20))
    status, answer, _ = ask(url(), packed.getvalue(), NPZ)
    told = json.loads(answer)["error"]
    expect(len(packed.getvalue()) < 1 << 20 and (status, told["type"]) == (413, "BodyTooLarge"), status, told)
    expect("335,544" in told["message"] and "may have 268,435,456" in told["message"], told)


def a_name_of_somebody_elses_page_is_refused():
    port = url().rpartition(":")[2]
    for host, status in (("evil.example", 403), (f"evil.example:{port}", 403), (f"localhost:{port}", 200), ("127.0.0.1", 200), ("[::1]:80", 200)):
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        connection.request("POST", "/invocations", b"[[1, 2, 3]]", {"Host": host, "Content-Type": JSON})
        expect(connection.getresponse().status == status, host)
        connection.close()


def bodies_that_wait_have_a_limit():
    held = serving.Held(100)
    with held.one() as add, held.one() as other:
        add(60)
        try:
            other(50)
            raise AssertionError("beyond the limit")
        except serving.RequestError as error:
            expect(error.status == 503 and "requests of 60 bytes wait already" in str(error), error)
        other(40)
    with held.one() as add:
        add(100)
    expect(held.bytes == 0, held.bytes)


def a_body_that_does_not_arrive_makes_room():
    """Four clients announce the largest bodies, send nearly all of them, and stop."""
    async def talk():
        app = serving.application(handler, body_bytes_max=100)

        async def client(body, is_whole):
            pieces, sent = [{"type": "http.request", "body": body, "more_body": not is_whole}], []

            async def receive():
                return pieces.pop(0) if pieces else await asyncio.Event().wait()

            async def send(message):
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": "/invocations", "query_string": b"", "headers": [(b"content-type", JSON.encode())]}
            await app(scope, receive, send)
            return sent[0]["status"], b"".join(one.get("body", b"") for one in sent)

        slow = [asyncio.ensure_future(client(b"[" + b" " * 97, False)) for _ in range(4)]
        await asyncio.sleep(0)
        busy = await client(b"[[1, 2, 3]]", True)
        told = await asyncio.gather(*slow)
        return busy, told, await client(b"[[1, 2, 3]]", True)

    with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(serving, "BODY_S", 0.3):
        handler = handler_of("def model_fn(d): return 0\ndef transform_fn(m, d, c, a): return d\n", folder)
        busy, told, last = asyncio.run(asyncio.wait_for(talk(), 60))
    expect(busy[0] == 503 and all(status == 408 and b"has not arrived within 0.3 s" in body for status, body in told), busy, told)
    expect(last == (200, b"[[1, 2, 3]]"), last)


def an_error_of_the_script_tells_where_and_no_path():
    status, answer, _ = ask(url(), b"[1000]")
    told = json.loads(answer)["error"]
    expect(status == 500 and told["type"] == "KeyError" and told["function"] == "predict_fn", status, told)
    expect(told["where"] == "inference.py:12" and "no such thing in inference.py" in told["message"], told)
    expect("/" not in answer.decode().replace("\\/", ""), answer)
    status, answer, _ = ask(url(), b"[[1, 2]]")  # the shapes do not match, in a module of the script
    told = json.loads(answer)["error"]
    expect(status == 500 and told["type"] == "ValueError" and told["where"] == "helper.py:2", told)


def ping_is_answered_while_a_prediction_runs():
    thread, answers = prediction_begin()
    expect(ask(url(), path="/ping")[0] == 200 and not answers)
    gate().touch()
    thread.join()
    expect(answers[0][0] == 200, answers)


def a_worker_that_dies_is_replaced():
    status = None
    try:
        status = ask(url(), b"[1002]")[0]
    except (urllib.error.URLError, OSError):
        pass
    expect(status is None, status)
    wait_for(lambda: _answers(), "another worker")


def _answers():
    try:
        return ask(url(), b"[[1, 2, 3]]", timeout=2)[0] == 200
    except (urllib.error.URLError, OSError):
        return False


def sigterm_answers_what_runs_and_ends():
    """The last case that uses the shared endpoint."""
    thread, answers = prediction_begin()
    threading.Timer(1, gate().touch).start()
    Shared.endpoint.stop()
    thread.join()
    expect(answers and answers[0][0] == 200, answers)
    expect(Shared.endpoint._process.returncode == 0, Shared.endpoint._process.returncode)
    try:
        ask(url(), path="/ping")
    except (urllib.error.URLError, OSError):
        return
    raise AssertionError("the endpoint still answers")


# ---- functions ----

def functions_may_take_the_context():
    with tempfile.TemporaryDirectory() as folder:
        handler = handler_of("""
seen = []
def pre_model_fn(model_dir):
    seen.append("pre")
def model_fn(model_dir, context):
    seen.append(context.model_dir == model_dir)
    return 3
def model_warmup_fn(model_dir, model):
    seen.append(model)
def input_fn(data, content_type, context):
    return data + context.get_request_header(0, "X-Who")
def predict_fn(data, model):
    return data * model
def output_fn(prediction, accept):
    return prediction + str(seen), "text/plain"
""", folder)
        expect(handler.answer(b"a", {"content-type": "text/csv", "x-who": "b"}) == (b"ababab['pre', True, 3]", "text/plain"))


def transform_fn_stands_alone():
    with tempfile.TemporaryDirectory() as folder:
        script = "def model_fn(model_dir): return 2\ndef transform_fn(model, data, content_type, accept): return data * model\n"
        answer = handler_of(script, folder).answer(b"xy", {"content-type": "application/octet-stream", "accept": "text/x"})
        expect(answer == (b"xyxy", "text/x"), answer)
        text = message(handler_of, script + "def predict_fn(data, model): pass\n", folder)
        expect(text == "Cannot use transform_fn implementation in conjunction with input_fn, predict_fn, and/or output_fn "
                       "implementation", text)


def what_a_function_returns_becomes_a_body():
    with tempfile.TemporaryDirectory() as folder:
        for value, body in (("'text'", b"text"), ("b'bytes'", b"bytes"), ("{'a': [1]}", b'{"a": [1]}'), ("('x', 'text/x')", b"x")):
            handler = handler_of(f"def model_fn(d): return 0\ndef transform_fn(m, d, c, a): return {value}\n", folder)
            expect(handler.answer(b"", {})[0] == body, value)
        handler = handler_of("def model_fn(d): return 0\ndef transform_fn(m, d, c, a): return object()\n", folder)
        try:
            handler.answer(b"", {})
        except serving.FunctionError as error:
            status, told = serving.error_data(error, handler.code, False)
            expect(status == 500 and "return bytes or text" in told["error"]["message"], told)
        else:
            raise AssertionError("an object became a body")


def errors_show_paths_only_when_asked():
    with tempfile.TemporaryDirectory() as folder:
        handler = handler_of("def model_fn(d): return 0\ndef transform_fn(m, d, c, a): open('/etc/no such/file.txt')\n", folder)
        try:
            handler.answer(b"", {})
        except serving.FunctionError as error:
            hidden, shown = (json.dumps(serving.error_data(error, handler.code, show)[1]) for show in (False, True))
            expect("/etc" not in hidden and folder not in hidden and "file.txt" in hidden and "inference.py:2" in hidden, hidden)
            expect("/etc/no such/file.txt" in shown and "Traceback" in shown, shown)
        else:
            raise AssertionError("no error")


def pytorch_models_and_torchscript_answer():
    """The defaults of the PyTorch containers, for a model whose class is in the script."""
    import torch
    with tempfile.TemporaryDirectory() as folder:
        top = pathlib.Path(folder) / "scripted"
        top.mkdir()
        torch.manual_seed(0)
        linear = torch.nn.Linear(3, 2)
        torch.jit.script(linear).save(str(top / "model.pt"))
        handler = serving.Handler(top)
        handler.load()
        wanted = linear(torch.tensor(ROWS, dtype=torch.float32))
        body, _ = handler.answer(json.dumps(ROWS.tolist()).encode(), {"content-type": JSON})
        expect(torch.allclose(torch.tensor(json.loads(body)), wanted))
        body, content_type = handler.answer(npy(ROWS.astype("float32")), {"content-type": NPY, "accept": NPY})
        expect(content_type == NPY and numpy.allclose(numpy.load(io.BytesIO(body)), wanted.detach().numpy()))
        handler = handler_of("import torch\ndef model_fn(d):\n    torch.manual_seed(0)\n    return torch.nn.Linear(3, 2)\n", folder)
        body, _ = handler.answer(b"1,2,3\n4,5,6\n", {"content-type": CSV})
        expect(torch.allclose(torch.tensor(json.loads(body)), wanted))


# ---- the vendor's own server and client ----

VENDOR = """
import json, os, sys
from sagemaker_inference import content_types, decoder, default_inference_handler, encoder, transformer
from sagemaker_inference.default_handler_service import DefaultHandlerService

class Handler(default_inference_handler.DefaultInferenceHandler):
    def default_predict_fn(self, data, model, context=None):
        return model(data)

class Processor:
    def __init__(self, properties):
        self.properties = properties
    def get_request_properties(self):
        return self.properties
    def add_response_property(self, *_):
        pass
    def report_status(self, code, reason_phrase=None):
        self.code = code

class Context:
    def __init__(self, model_dir, headers):
        self.system_properties = {"model_dir": model_dir}
        self.request_processor = [Processor(headers)]
        self.manifest = {}
    def get_request_processor(self, index):
        return self.request_processor[index]
    def set_response_content_type(self, index, value):
        self.content_type = value
    def set_response_status(self, code=200, phrase="", idx=0):
        self.code = code

model_dir = sys.argv[1]
service = DefaultHandlerService(transformer=transformer.Transformer(default_inference_handler=Handler()))
service.initialize(Context(model_dir, {}))
for line in sys.stdin:
    body, content_type, accept = json.loads(line)
    headers = {"Content-Type": content_type}
    if accept:
        headers["Accept"] = accept
    answer = service.handle([{"body": bytes.fromhex(body)}], Context(model_dir, headers))[0]
    print(json.dumps((answer if isinstance(answer, bytes) else answer.encode()).hex()), flush=True)
"""


def the_vendors_server_gives_the_same_answers():
    if not INFERENCE.exists():
        raise Skip(f"there is no {INFERENCE}: `make build/inference/made` makes it")
    with tempfile.TemporaryDirectory() as folder:
        archive = archive_make(folder, model_files())
        model = pathlib.Path(folder) / "model"
        model.mkdir()
        serve.archive_unpack(archive, model)
        lines = "".join(json.dumps([body.hex(), content_type, accept]) + "\n" for body, content_type, accept in REQUESTS)
        environment = {**os.environ, "SAGEMAKER_BASE_DIR": folder, "SAGEMAKER_PROGRAM": "inference.py",
                       "SAGEMAKER_SUBMIT_DIRECTORY": str(model / "code"), "PYTHONPATH": str(model / "code")}
        done = subprocess.run([INFERENCE, "-W", "ignore", "-c", VENDOR, str(model)], input=lines, capture_output=True, text=True,
                              timeout=120, env=environment)
        expect(done.returncode == 0, done.stdout, done.stderr)
        theirs = [bytes.fromhex(json.loads(line)) for line in done.stdout.splitlines() if line.startswith('"')]
        handler = serving.Handler(model)
        before = list(sys.path)
        handler.load()
        sys.path[:] = before
        headers = [{"content-type": content_type, **({"accept": accept} if accept else {})} for _, content_type, accept in REQUESTS]
        ours = [handler.answer(request[0], one)[0] for request, one in zip(REQUESTS, headers)]
        expect(len(theirs) == len(ours) == 7 and ours == theirs, ours, theirs)


CLIENT = """
import sys
import numpy
from sagemaker.local import LocalSession
from sagemaker.local.local_session import LocalSagemakerRuntimeClient
from sagemaker.pytorch.model import PyTorchPredictor
session = LocalSession()
session.sagemaker_runtime_client = LocalSagemakerRuntimeClient({"local": {"serving_port": int(sys.argv[1])}})
answer = PyTorchPredictor("endpoint", sagemaker_session=session).predict(numpy.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
print(type(answer).__name__, answer.tolist())
"""
DOCKER = """#!/bin/sh
[ "$1" = info ] || echo '[{"Endpoints": {"docker": {"Host": "unix:///nowhere"}}}]'
"""


def the_vendors_client_asks_this_endpoint():
    """A cell's predictor.predict sends .npy and accepts .npy. The client needs a docker to exist."""
    if not SDK2.exists():
        raise Skip(f"there is no {SDK2}: `make build/sdk2/made` makes it")
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "docker").write_text(DOCKER)
        os.chmod(f"{folder}/docker", 0o755)
        (pathlib.Path(folder) / "config.yaml").write_text(
            "SchemaVersion: '1.0'\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n")
        environment = {**os.environ, **CREDENTIALS, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": folder,
                       "SAGEMAKER_USER_CONFIG_OVERRIDE": f"{folder}/config.yaml"}
        done = subprocess.run([SDK2, "-W", "ignore", "-c", CLIENT, url().rsplit(":", 1)[1]], capture_output=True, text=True,
                              timeout=240, env=environment)
        expect(done.returncode == 0 and done.stdout.splitlines()[-1] == f"ndarray {SUMS}", done.stdout, done.stderr)


# ---- what cannot start ----

def start_fails(files, text, **more):
    with tempfile.TemporaryDirectory() as folder:
        try:
            endpoint = serve.start(str(archive_make(folder, files)), **more)
        except serve.ServeError as error:
            expect(text in str(error), error)
            return
        endpoint.stop()
        raise AssertionError("it has started")


def a_model_that_cannot_be_loaded_is_one_error():
    start_fails(model_files("def model_fn(model_dir):\n    raise ValueError('weights of another kind')\n"),
                "model_fn raised ValueError: weights of another kind")
    start_fails({"weights.json": "[]"}, "the model has no model.pt, and the script has no model_fn(model_dir)")


def an_archive_that_leaves_its_folder_is_one_error():
    with tempfile.TemporaryDirectory() as folder:
        for name in ("../outside", "/absolute/outside"):
            archive = archive_make(folder, {name: "x"})
            (pathlib.Path(folder) / "model").mkdir(exist_ok=True)
            expect("does not stay below the model's folder" in message(serve.archive_unpack, archive, pathlib.Path(folder) / "model"))
        with tarfile.open(archive, "w:gz") as tar:
            member = tarfile.TarInfo("link")
            member.type, member.linkname = tarfile.SYMTYPE, "../../etc"
            tar.addfile(member)
        expect("does not stay below" in message(serve.archive_unpack, archive, pathlib.Path(folder) / "model"))
        expect(not (pathlib.Path(folder) / "outside").exists() and list((pathlib.Path(folder) / "model").iterdir()) == [])
        whole = archive_make(folder, {"weights": os.urandom(50_000)}).read_bytes()
        for damaged in (whole[:20_000] + bytes(100) + whole[20_100:], whole[:30_000], b"no archive"):
            archive.write_bytes(damaged)
            expect("cannot be unpacked" in message(serve.archive_unpack, archive, pathlib.Path(folder) / "model"), len(damaged))
        shutil.rmtree(pathlib.Path(folder) / "model")
        (pathlib.Path(folder) / "model").mkdir()
        archive.write_bytes(b"no archive")
        expect("cannot be unpacked" in message(serve.archive_unpack, archive, pathlib.Path(folder) / "model"))
        expect(not (pathlib.Path(folder) / "outside").exists() and list((pathlib.Path(folder) / "model").iterdir()) == [])


def what_cannot_be_served_is_one_error():
    with tempfile.TemporaryDirectory() as folder, socket.socket() as taken:
        os.environ["SHOAL_JOBS"] = folder
        archive = archive_make(folder, model_files())
        (pathlib.Path(folder) / "empty-job").mkdir()
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        cases = [([str(archive), "--port", str(port)], f"port {port} of 127.0.0.1 is in use: end the program that has it, or "),
                 ([str(archive), "--port", "0", "--address", "203.0.113.1"], "cannot listen at 203.0.113.1, port 0: Cannot assign"),
                 ([f"{folder}/none.tar.gz", "--port", "0"], "there is no "),
                 (["no-such-job", "--port", "0"], "there is no job no-such-job below"),
                 (["empty-job", "--port", "0"], "the job empty-job has no model.tar.gz"),
                 ([str(archive), "--port", "0", "--workers", "0"], "--workers 0: at least 1"),
                 ([str(archive), "--port", "0", "--source-dir", folder, "--entry-point", "none.py"], "there is no none.py in source_dir")]
        for words, text in cases:
            code, told = main_of(words)
            lines = [line for line in told.splitlines() if "once the model is loaded" not in line]
            expect(code == 1 and len(lines) == 1 and text in lines[0], words, code, told)


def main_of(words):
    """Runs main in this process; returns (exit code, output). None of these cases starts a worker."""
    before, sys.stderr = sys.stderr, io.StringIO()
    handlers = signal.getsignal(signal.SIGTERM)
    try:
        return serve.main(words), sys.stderr.getvalue()
    finally:
        sys.stderr = before
        signal.signal(signal.SIGTERM, handlers)


# ---- the command ----

def a_job_is_served_by_its_name_with_several_workers():
    """A model in S3, with the caller's script. Two processes share the socket; SIGTERM ends all."""
    s3 = S3()
    with tempfile.TemporaryDirectory() as folder:
        archive = archive_make(folder, {"weights.json": "[2.0, 2.0, 2.0]"})
        s3.client.upload_file(str(archive), "data", "job/output/model.tar.gz")
        job = pathlib.Path(folder) / "jobs/trained"
        job.mkdir(parents=True)
        status = {"name": "trained", "status": "Completed", "model": "s3://data/job/output/model.tar.gz"}
        (job / "status.json").write_text(json.dumps(status))
        source = pathlib.Path(folder) / "source"
        source.mkdir()
        (source / "mine.py").write_text(SCRIPT)
        (source / "helper.py").write_text(HELPER)
        environment = {**os.environ, "SHOAL_JOBS": f"{folder}/jobs", "SHOAL_PYTHON": sys.executable, "TMPDIR": folder}
        environment.pop("PYTHONPATH", None)  # the command finds the package by itself
        process = subprocess.Popen([SHOAL, "job", "serve", "trained", "--port", "0", "--workers", "2", "--source-dir", str(source),
                                    "--entry-point", "mine.py"], stderr=subprocess.PIPE, text=True, env=environment,
                                   stdin=subprocess.DEVNULL)
        try:
            line = process.stderr.readline()
            address = line.split("shoal job serve: ")[1].split("/invocations")[0]
            pids = set()

            def both():
                """Sends many requests at once, so that one process cannot answer them all."""
                answers = []

                def one():
                    answers.append(ask(address, b"[1003]"))

                threads = [threading.Thread(target=one) for _ in range(8)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                pids.update(json.loads(body)[0] for status, body, _ in answers if status == 200)
                return len(pids) == 2

            wait_for(both, "two workers")
            status, body, _ = ask(address, b"[[1, 2, 3]]")
            expect(status == 200 and json.loads(body) == [12.0], status, body)
        finally:
            process.terminate()
            _, err = process.communicate(timeout=60)
        expect(process.returncode == 0, process.returncode, err)
        for pid in pids:
            wait_for(lambda: not pathlib.Path(f"/proc/{pid}").exists(), f"the end of worker {pid}")
        expect([name for name in os.listdir(folder) if name.startswith("shoal-")] == [], os.listdir(folder))


def an_endpoint_ends_with_the_process_that_started_it():
    with tempfile.TemporaryDirectory() as folder:
        archive = archive_make(folder, model_files())
        code = (f"import os, sys; sys.path[:0] = {sys.path[:2]!r}\nfrom shoal.job.serving import serve\n"
                f"print(serve.start({str(archive)!r}).pid, flush=True)\nos.kill(os.getpid(), 9)\n")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        expect(done.returncode == -9, done.returncode, done.stderr)
        wait_for(lambda: not _runs(int(done.stdout)), "the end of the endpoint")


def _runs(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


run_cases([
    the_types_of_the_containers_come_and_go,
    the_first_type_of_accept_that_can_be_written_is_taken,
    ping_answers,
    what_a_client_does_wrong_is_told_apart,
    arrays_that_unpack_to_gigabytes_are_refused,
    a_name_of_somebody_elses_page_is_refused,
    bodies_that_wait_have_a_limit, a_body_that_does_not_arrive_makes_room,
    an_error_of_the_script_tells_where_and_no_path,
    the_vendors_client_asks_this_endpoint,
    ping_is_answered_while_a_prediction_runs,
    a_worker_that_dies_is_replaced,
    sigterm_answers_what_runs_and_ends,
    functions_may_take_the_context,
    transform_fn_stands_alone,
    what_a_function_returns_becomes_a_body,
    errors_show_paths_only_when_asked,
    pytorch_models_and_torchscript_answer,
    the_vendors_server_gives_the_same_answers,
    a_model_that_cannot_be_loaded_is_one_error,
    an_archive_that_leaves_its_folder_is_one_error,
    what_cannot_be_served_is_one_error,
    a_job_is_served_by_its_name_with_several_workers,
    an_endpoint_ends_with_the_process_that_started_it,
])
