#!/usr/bin/env python3
"""The endpoint of a SavedModel of TensorFlow: requests and answers in the form of TensorFlow Serving and of the vendor's
containers, their script's functions, and requests that do not fit. The interpreter is that of the jobs' tests, with the
packages of build/tensorflow after its own."""
import base64
import contextlib
import io
import json
import os
import pathlib
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "tests/multi"), str(TOP / "python")]

from shoal.job import JSONSerializer, ModelError, TensorFlow, serving  # noqa: E402
from shoal.job.serving import serve, tfserving  # noqa: E402
from shoal.job import TensorFlowModel, TensorFlowPredictor  # noqa: E402
from tap import expect, run_cases  # noqa: E402

JSON, CSV, LINES = "application/json", "text/csv", "application/jsonlines"
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
FOLDER = tempfile.TemporaryDirectory(prefix="shoal-test-savedmodel-")
ROOT = pathlib.Path(FOLDER.name)
# Doubles rows of two numbers in version 1, and triples them in version 2. Further signatures have two inputs, texts, whole
# numbers, and one number for all rows.
MAKE = """
import sys
import tensorflow as tf

class Scale(tf.Module):
    def __init__(self, factor):
        self.factor = tf.Variable(float(factor))

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def scale(self, x):
        return {"y": x * self.factor}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="a"), tf.TensorSpec([None], tf.int32, name="b")])
    def two(self, a, b):
        return {"sum": a + tf.cast(b, tf.float32), "positive": b > 0}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
    def texts(self, text):
        return {"upper": tf.strings.upper(text), "raw_bytes": text}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.uint8, name="x")])
    def small(self, x):
        tf.debugging.assert_less(x, tf.constant(200, tf.uint8), message="too bright")
        return {"total": tf.reduce_sum(tf.cast(x, tf.int32))}

for version in (1, 2):
    model = Scale(version + 1)
    tf.saved_model.save(model, f"{sys.argv[1]}/{version}", signatures={
        "serving_default": model.scale, "two": model.two, "texts": model.texts, "small": model.small})
"""


def tensorflow_add():
    """Appends the packages of build/tensorflow to those of this interpreter, here and in all processes that it starts."""
    packages = next(iter((TOP / "build/tensorflow/lib").glob("python3*/site-packages")), None)
    if packages is None:
        print(f"1..0 # SKIP there is no {TOP / 'build/tensorflow'}: `make test-all` makes it")
        sys.exit(0)
    (ROOT / "site").mkdir()
    (ROOT / "site/sitecustomize.py").write_text(f"import sys\nsys.path.append({str(packages)!r})\n")
    os.environ.update(PYTHONPATH=f"{ROOT / 'site'}:{os.environ['PYTHONPATH']}", SHOAL_PYTHON=sys.executable)
    sys.path.append(str(packages))


def model_make():
    """Writes ROOT/model with the versions 1 and 2."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    code = os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", MAKE, str(ROOT / "model")], environment)
    expect(code == 0, "making the SavedModel ends with", code)


def archive_make(name, script=None):
    """Packs the model, and code/inference.py if given. Returns the path."""
    path = ROOT / name
    with tarfile.open(path, "w:gz") as tar:
        tar.add(ROOT / "model", ".")
        if script is not None:
            member = tarfile.TarInfo("code/inference.py")
            member.size = len(script)
            tar.addfile(member, io.BytesIO(script.encode()))
    return path


class Shared:
    endpoint = None


def url():
    if Shared.endpoint is None:
        Shared.endpoint = serve.start(str(archive_make("plain.tar.gz")))
    return Shared.endpoint.url


def post(address, body, content_type=JSON, accept=None, attributes=None, path="/invocations"):
    """Returns (status, text, content type)."""
    given = {"Content-Type": content_type, "Accept": accept, ATTRIBUTES: attributes}
    headers = {name: value for name, value in given.items() if value}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, data, headers), timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers["content-type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers["content-type"]


def expect_answer(wanted, *words, **named):
    status, text, _ = post(url(), *words, **named)
    expect(status == 200 and json.loads(text) == wanted, words, status, text)


def expect_refused(status, kind, text, *words, **named):
    got, body, content_type = post(url(), *words, **named)
    told = json.loads(body)["error"]
    expect((got, told["type"], content_type) == (status, kind, JSON) and text in told["message"], words, got, told)


# ---- requests ----

def rows_and_columns_are_answered():
    rows = [[1, 2], [3, 4.5]]
    expect_answer({"predictions": [[3, 6], [9, 13.5]]}, {"instances": rows})
    expect_answer({"outputs": [[3, 6], [9, 13.5]]}, {"inputs": rows})
    expect_answer({"predictions": [[3, 6]]}, {"instances": [{"x": [1, 2]}]})
    expect_answer({"outputs": [[3, 6]]}, {"inputs": {"x": [[1, 2]]}})


def signatures_are_chosen_by_name():
    expect_answer({"predictions": [{"sum": 3.5, "positive": True}, {"sum": 1.0, "positive": False}]},
                  {"signature_name": "two", "instances": [{"a": 1.5, "b": 2}, {"a": 1, "b": 0}]})
    expect_answer({"outputs": {"sum": [3.5], "positive": [True]}}, {"signature_name": "two", "inputs": {"a": [1.5], "b": [2]}})
    expect_answer({"outputs": 6}, {"signature_name": "small", "inputs": [1, 2, 3]})


def texts_and_bytes_are_passed():
    raw = base64.b64encode(b"\xff\x00").decode()
    expect_answer({"predictions": [{"upper": "ABC", "raw_bytes": {"b64": base64.b64encode(b"abc").decode()}}]},
                  {"signature_name": "texts", "instances": ["abc"]})
    status, text, _ = post(url(), {"signature_name": "texts", "instances": [{"b64": raw}]})
    expect(status == 200 and json.loads(text)["predictions"][0]["raw_bytes"] == {"b64": raw}, text)


def other_bodies_become_rows():
    """As in the containers: plain JSON, JSON lines and CSV."""
    tripled = {"predictions": [[3, 6], [9, 12]]}
    expect_answer(tripled, [[1, 2], [3, 4]])
    expect_answer({"predictions": [[3, 6]]}, [1, 2])
    expect_answer({"predictions": [[3, 6]]}, {"x": [1, 2]})
    expect_answer(tripled, b"[1, 2]\n[3, 4]\n", LINES)
    expect_answer(tripled, b"1,2\n3,4\n", CSV)
    status, text, content_type = post(url(), b"1.0,2e0", CSV, LINES)
    expect((status, content_type) == (200, LINES) and json.loads(text) == {"predictions": [[3, 6]]}, status, content_type, text)


def models_and_versions_are_chosen_by_a_header():
    body = {"instances": [[1, 2]]}
    expect_answer({"predictions": [[2, 4]]}, body, attributes="tfs-model-version=1")
    expect_answer({"predictions": [[3, 6]]}, body, attributes="tfs-model-name=model,tfs-model-version=2,other=x")
    unknown = "there is no version 7 of the model model: ask for one of 1, 2"
    expect_refused(404, "NoSuchModel", unknown, body, attributes="tfs-model-version=7")
    expect_refused(404, "NoSuchModel", "there is no model x: ask for one of model", body, attributes="tfs-model-name=x")
    expect_refused(400, "UnsupportedMethod", "the method classify is not served", body, attributes="tfs-method=classify")


def requests_that_do_not_fit_are_told_apart():
    small = {"signature_name": "small"}
    cases = [({"instances": []}, "MalformedBody", "at least one row"), ({"instances": 3}, "MalformedBody", "must be a list"),
             ({"instances": [[1, 2]], "inputs": [[1, 2]]}, "MalformedBody", 'either "instances" or "inputs"'),
             ({"examples": [1]}, "MalformedBody", 'either "instances" or "inputs"'),
             ({"instances": [[1, 2, 3]]}, "InvalidInput", 'input "x" has the shape (1, 3), and the model takes (None, 2)'),
             ({"instances": [[1, 2], [3]]}, "InvalidInput", 'input "x" must hold float32'),
             ({"instances": [["a", "b"]]}, "InvalidInput", "not text, null or objects"),
             ({"instances": [[1, None]]}, "InvalidInput", "not text, null or objects"),
             ({"instances": [[True, False]]}, "InvalidInput", "not bool"),
             ({"instances": [{"y": [1, 2]}]}, "InvalidInput", "instance 0 has y, and the model's inputs are x"),
             ({"instances": [{"x": [1, 2]}, [1, 2]]}, "InvalidInput", "instance 1 has no names"),
             ({"signature_name": "two", "instances": [1]}, "InvalidInput", "the model has the inputs a, b"),
             ({"signature_name": "none", "instances": [1]}, "NoSuchSignature", "serving_default, small, texts, two"),
             ({**small, "inputs": [300]}, "InvalidInput", "too large or too small"),
             ({**small, "inputs": [1.5]}, "InvalidInput", "not float64"),
             ({**small, "instances": [1, 2]}, "InvalidOutput", 'output "total" has the shape ()'),
             ({**small, "inputs": [201]}, "InvalidArgument", "too bright"),
             ({"signature_name": "texts", "instances": [3]}, "InvalidInput", "only texts"),
             ({"signature_name": "texts", "instances": [{"b64": "?"}]}, "InvalidInput", "is not base64"),
             (b"{", "MalformedBody", "the body is not application/json"), (b"\xff", "MalformedBody", "")]
    for body, kind, text in cases:
        expect_refused(400, kind, text, body)
    expect_refused(415, "UnsupportedContentType", "application/x-npy is not understood", b"x", "application/x-npy")
    expect_refused(406, "NotAcceptable", "Accept text/csv cannot be answered", {"instances": [[1, 2]]}, accept="text/csv")
    expect_answer({"predictions": [[3, 6]]}, {"instances": [[1, 2]]})


def the_model_answers_at_its_own_address():
    """That of TensorFlow Serving, which scripts ask."""
    status, text, _ = post(url(), {"instances": [[1, 2]]}, path="/v1/models/model/versions/1:predict")
    expect(status == 200 and json.loads(text) == {"predictions": [[2, 4]]}, status, text)
    for path, code, wanted in (("/v1/models/other:predict", 404, "there is no model other"),
                               ("/v1/models/model:regress", 400, "regress"),
                               ("/v1/models/model", 404, "is not /v1/models/NAME")):
        status, text, _ = post(url(), {"instances": [[1, 2]]}, path=path)
        expect(status == code and wanted in json.loads(text)["error"], path, status, text)


# ---- scripts ----

PAIR = """
import json
def input_handler(data, context):
    if context.request_content_type != "text/csv":
        raise ValueError(f"unsupported content type {context.request_content_type}")
    assert context.content_length > 0 and context.method is None
    return json.dumps({"instances": [[float(x) for x in data.read().decode().split(",")]]})
def output_handler(response, context):
    if response.status_code != 200:
        raise ValueError(response.content.decode())
    return json.dumps({"sum": sum(response.json()["predictions"][0])}), context.accept_header
"""
ALONE = """
import requests
def handler(data, context):
    return requests.post(context.rest_uri, data=data.read()).content, "text/x"
"""


@contextlib.contextmanager
def served(name, script):
    with serve.start(str(archive_make(name, script))) as endpoint:
        yield endpoint.url


def a_pair_of_handlers_surrounds_the_model():
    with served("pair.tar.gz", PAIR) as address:
        status, text, content_type = post(address, b"1,2", CSV)
        expect((status, content_type) == (200, JSON) and json.loads(text) == {"sum": 9}, status, text)
        status, text, _ = post(address, b"1,2,3", CSV)
        told = json.loads(text)["error"]
        expect(status == 500 and told["function"] == "output_handler" and told["where"] == "inference.py:10", told)
        expect("has the shape (1, 3)" in told["message"], told)
        told = json.loads(post(address, b"1,2", JSON)[1])["error"]
        expect(told["function"] == "input_handler" and told["message"] == "unsupported content type application/json", told)


def a_handler_asks_the_model_itself():
    with served("alone.tar.gz", ALONE) as address:
        status, text, content_type = post(address, {"instances": [[1, 2]]}, attributes="tfs-model-version=1")
        expect((status, content_type) == (200, "text/x") and json.loads(text) == {"predictions": [[2, 4]]}, status, text)


def scripts_without_the_functions_are_refused():
    both = "must define handler, or both input_handler and output_handler"
    for script, text in (("def input_handler(data, context): pass\n", both), ("x = 1\n", both),
                         ("def handler(:\n", "raised SyntaxError")):
        try:
            serve.start(str(archive_make("wrong.tar.gz", script))).stop()
        except serve.ServeError as error:
            expect(text in str(error), error)
        else:
            raise AssertionError(f"served: {script}")


def a_script_with_model_fn_loads_the_model_itself():
    script = ("import tensorflow as tf\ndef model_fn(d):\n    return tf.saved_model.load(d + '/1')\n"
              "def predict_fn(data, model):\n    return model.scale(data.astype('float32'))['y'].numpy()\n")
    with served("own.tar.gz", script) as address:
        status, text, _ = post(address, [[1, 2]])
        expect(status == 200 and json.loads(text) == [[2, 4]], status, text)


def models_that_cannot_be_served_are_one_error():
    unnumbered = ("the SavedModel is in export of the model, and only folders whose name is a number are served: export it to "
                  "SM_MODEL_DIR/1")
    for place, text in (("odd/export", unnumbered), ("broken/1", "the SavedModel in broken/1 cannot be loaded: ")):
        (ROOT / place).mkdir(parents=True)
        (ROOT / place / "saved_model.pb").write_bytes(b"no model")
        folder = (ROOT / place).parent
        try:
            tfserving.handler_make(folder, None, folder / "code").load()
        except serving.ServeError as error:
            expect(text in str(error), error)
        else:
            raise AssertionError(f"served: {folder}")


# ---- the SDK's names ----

def a_model_is_deployed_and_asked():
    model = TensorFlowModel(model_data=str(archive_make("deployed.tar.gz")), role="role", framework_version="2.12")
    predictor = model.deploy(initial_instance_count=1, instance_type="ml.c5.xlarge")
    expect(isinstance(predictor, TensorFlowPredictor), type(predictor))
    expect(predictor.predict({"instances": [[1, 2]]}) == {"predictions": [[3, 6]]})
    first = TensorFlowPredictor(predictor.endpoint_name, serializer=JSONSerializer(), model_version="1")
    expect(first.predict([[1, 2]]) == {"predictions": [[2, 4]]})
    expect(first.predict([[1, 2]], {"CustomAttributes": "tfs-model-name=model"}) == {"predictions": [[2, 4]]})
    try:
        first.predict({"instances": ["x"]})
    except ModelError as error:
        expect(error.code == 400 and "InvalidInput" in error.body, error)
    else:
        raise AssertionError("a text was scaled")
    predictor.delete_endpoint()


# Sums the two numbers of a row.
TRAIN = """
import os
import keras
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
model.export(os.path.join(os.environ["SM_MODEL_DIR"], "1"))
print("trained")
"""


def an_estimator_serves_what_its_script_has_exported():
    """A model of Keras. The training script has no functions for an endpoint, so the endpoint does not run it."""
    (ROOT / "train.py").write_text(TRAIN)
    os.environ["SHOAL_JOBS"] = str(ROOT / "jobs")
    estimator = TensorFlow(entry_point=str(ROOT / "train.py"), role="role", instance_count=1, instance_type="local",
                           framework_version="2.12", py_version="py310", model_dir=False)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        estimator.fit()
    expect("trained" in out.getvalue(), out.getvalue())
    predictor = estimator.deploy(1, "local")
    expect(predictor.predict({"instances": [[1, 2], [3, 4]]}) == {"predictions": [[3], [7]]})
    expect(predictor.predict({"inputs": [[1, 2]]}) == {"outputs": [[3]]})
    predictor.delete_endpoint()


if __name__ == "__main__":
    tensorflow_add()
    try:
        model_make()
        run_cases([rows_and_columns_are_answered, signatures_are_chosen_by_name, texts_and_bytes_are_passed,
                   other_bodies_become_rows, models_and_versions_are_chosen_by_a_header,
                   requests_that_do_not_fit_are_told_apart, the_model_answers_at_its_own_address,
                   a_pair_of_handlers_surrounds_the_model, a_handler_asks_the_model_itself,
                   scripts_without_the_functions_are_refused, a_script_with_model_fn_loads_the_model_itself,
                   models_that_cannot_be_served_are_one_error, a_model_is_deployed_and_asked,
                   an_estimator_serves_what_its_script_has_exported])
    finally:
        if Shared.endpoint:
            Shared.endpoint.stop()
        FOLDER.cleanup()
