"""The endpoint of a SavedModel, as the vendor's TensorFlow Serving containers have it.

    body -> input_handler(data, context) -> the model (savedmodel.py) -> output_handler(response, context) -> answer
            \\______________ handler(data, context), which asks the model at context.rest_uri itself ______________/

The functions are in code/inference.py of the model, or in the script that the caller names. Without a script, a body is JSON as
of TensorFlow Serving, any other JSON, JSON lines or CSV. The header X-Amzn-SageMaker-Custom-Attributes selects the model:
tfs-model-name=NAME,tfs-model-version=N.

Differences from the containers: only the method predict is served, and there is no gRPC (context.channel is None)."""
from __future__ import annotations

import ast
import csv
import io
import json
import pathlib
import re
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from shoal.job import serving
from shoal.job.serving import ANY, CSV, JSON, RequestError, ServeError, savedmodel

JSON_LINES = "application/jsonlines"
INPUTS = (JSON, JSON_LINES, "application/jsons", CSV)
OUTPUTS = (JSON, JSON_LINES)
LOADERS = {"model_fn", "transform_fn"}  # a script that defines one of these loads its model by itself
HANDLERS = ("handler", "input_handler", "output_handler")
ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
REST = "/v1/models/"
REST_PATH = re.compile(r"/v1/models/([^/:]+)(?:/versions/([0-9]+))?:(\w+)")


class Context(NamedTuple):
    """The second argument of the script's functions, with the fields of the containers."""

    model_name: Optional[str]
    model_version: Optional[str]
    method: Optional[str]
    rest_uri: str
    grpc_port: Optional[str]
    channel: Any
    custom_attributes: Optional[str]
    request_content_type: str
    accept_header: str
    content_length: int


class Response:
    """The model's answer, with the names of the package requests that scripts use."""

    def __init__(self, status_code: int, content: bytes):
        self.status_code, self.content = status_code, content
        self.ok = status_code < 400
        self.headers = {"Content-Type": JSON}

    @property
    def text(self) -> str:
        return self.content.decode("utf-8")

    def json(self) -> Any:
        return json.loads(self.content)

    def raise_for_status(self) -> None:
        if not self.ok:
            raise RuntimeError(f"{self.status_code} from the model: {self.text}")


# ---- which handler ----

def handler_make(model_dir: pathlib.Path, program: Optional[str], code: pathlib.Path) -> serving.Handler:
    """Returns the handler of a model. A SavedModel has its own, unless the script loads the model by itself. Raises
    ServeError for a SavedModel in a folder whose name is not a number, which the containers do not find."""
    handler = serving.Handler(model_dir, program, code)
    names = names_defined(handler.code / handler.program)
    if LOADERS & names:
        return handler
    if savedmodel.find(model_dir):
        is_default = handler.program == "inference.py" and (handler.code / handler.program).is_file()
        return SavedModelHandler(model_dir, program, code, is_scripted=is_default or bool({"*", *HANDLERS} & names))
    place = savedmodel.misplaced(model_dir)
    if place is not None:
        raise ServeError(f"the SavedModel is in {place} of the model, and only folders whose name is a number are served: export it to "
                         "SM_MODEL_DIR/1")
    return handler


def names_defined(script: pathlib.Path) -> Set[str]:
    """Returns the names that a script defines or imports, without running it: a training script would train. "*" means that
    it imports all names of a module."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):  # if there is a script, importing it shows what is wrong
        return {"*"} if script.is_file() else set()
    names: Set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


# ---- the handler ----

class SavedModelHandler(serving.Handler):
    """The models of a folder and the script around them. Call `load` once, then `answer` on one thread and `rest` on any."""

    names = HANDLERS

    def __init__(self, model_dir: pathlib.Path, program: Optional[str], code: pathlib.Path, is_scripted: bool):
        super().__init__(model_dir, program, code)
        self.is_scripted = is_scripted
        self.functions: Dict[str, Callable[..., Any]] = {}
        self.models: Optional[savedmodel.Models] = None

    def load(self) -> None:
        if self.is_scripted:
            self.functions = self._own_functions()
            if "handler" not in self.functions and not {"input_handler", "output_handler"} <= set(self.functions):
                raise ServeError(f"{self.program} must define handler, or both input_handler and output_handler; to load the "
                                 "model by yourself, define model_fn")
        self.models = savedmodel.Models(self.model_dir)
        self.models.get()

    def answer(self, body: bytes, headers: Dict[str, str]) -> Tuple[bytes, str]:
        context = self._context(body, headers)
        if "handler" in self.functions:
            return serving.result_of(self._call("handler", io.BytesIO(body), context), context.accept_header)
        if self.functions:
            asked = self._call("input_handler", io.BytesIO(body), context)
            response = Response(*self._ask(context.model_name, context.model_version, context.method, asked))
            return serving.result_of(self._call("output_handler", response, context), context.accept_header)
        return self._answer_plain(body, context)

    def _call(self, name: str, *arguments: Any) -> Any:
        return serving.called(name, self.functions[name], *arguments)

    def _answer_plain(self, body: bytes, context: Context) -> Tuple[bytes, str]:
        kind = accepted_kind(context.accept_header)
        request = request_of(body, context.request_content_type)
        told = self._predict(context.model_name, context.model_version, context.method, request)
        return json.dumps(told).encode(), kind

    def _predict(self, name: Optional[str], version: Optional[str], method: Optional[str], request: Any) -> Dict[str, Any]:
        if method not in (None, "predict"):
            raise RequestError(400, "UnsupportedMethod", f"the method {method} is not served: only predict is")
        assert self.models
        return self.models.get(name, version).answer(request)

    def _ask(self, name: Optional[str], version: Optional[str], method: Optional[str], asked: Any) -> Tuple[int, bytes]:
        """Asks the model as the REST interface does: returns (status, body)."""
        try:
            return 200, json.dumps(self._predict(name, version, method, json_of(asked))).encode()
        except RequestError as error:
            return error.status, json.dumps({"error": str(error)}).encode()

    def rest(self, path: str, body: bytes) -> Tuple[int, bytes]:
        """Answers a request to context.rest_uri."""
        found = REST_PATH.fullmatch(path)
        if not found:
            return 404, json.dumps({"error": f"{path} is not {REST}NAME[/versions/N]:predict"}).encode()
        return self._ask(found[1], found[2], found[3], body)

    def _context(self, body: bytes, headers: Dict[str, str]) -> Context:
        attributes = dict(re.findall(r"(tfs-[a-z-]+)=([^,]+)", headers.get(ATTRIBUTES, "")))
        assert self.models
        name, version, method = (attributes.get(f"tfs-{word}") for word in ("model-name", "model-version", "method"))
        place = f"{name or self.models.default}" + (f"/versions/{version}" if version else "")
        accept = headers.get("accept") or ANY
        uri = f"{self.origin}{REST}{place}:{method or 'predict'}"
        return Context(name, version, method, uri, None, None, headers.get(ATTRIBUTES),
                       serving.media_type(headers.get("content-type") or JSON), JSON if accept == ANY else accept, len(body))


# ---- bodies ----

def accepted_kind(accept: str) -> str:
    """Returns the first type of an Accept header that can be written."""
    for name in serving.accepted(accept):
        if name in (ANY, "application/*"):
            return JSON
        if name in OUTPUTS:
            return name
    raise RequestError(406, "NotAcceptable", f"Accept {accept} cannot be answered: ask for one of {', '.join(OUTPUTS)}")


def request_of(body: bytes, content_type: str) -> Any:
    """Returns a request to the model. Other JSON than TensorFlow Serving's is a row, or rows if it is a list of lists."""
    if content_type not in INPUTS:
        raise RequestError(415, "UnsupportedContentType",
                           f"Content-Type {content_type} is not understood: send one of {', '.join(INPUTS)}")
    if content_type == CSV:
        return {savedmodel.ROWS: csv_rows(text_of(body))}
    try:
        data = json_of(body)
    except RequestError:
        lines = [line for line in text_of(body).splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return {savedmodel.ROWS: [json_of(line) for line in lines]}
    if isinstance(data, dict) and {"instances", "inputs", "examples"} & set(data):
        return data
    is_rows = isinstance(data, list) and bool(data) and isinstance(data[0], list)
    return {savedmodel.ROWS: data if is_rows else [data]}


def text_of(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(400, "MalformedBody", f"the body is not text in UTF-8: {error}") from error


def json_of(body: Any) -> Any:
    """Reads text, bytes or a stream; returns other data as they are."""
    data = body.read() if hasattr(body, "read") else body
    if not isinstance(data, (str, bytes, bytearray)):
        return data
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "MalformedBody", f"the body is not {JSON}: {error}") from error


def csv_rows(text: str) -> List[Any]:
    """Returns a row for each line. A line with one column is a value, as in the containers."""
    rows = [[_number(word) for word in row] for row in csv.reader(io.StringIO(text)) if row]
    return [row if len(row) > 1 else row[0] for row in rows]


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word.strip()
