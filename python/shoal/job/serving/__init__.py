"""The endpoint's application: /ping and /invocations over the functions of a script for the vendor's PyTorch containers.

    body -> input_fn(data, content_type) -> predict_fn(data, model) -> output_fn(prediction, accept) -> answer
            \\______________ transform_fn(model, data, content_type, accept) in place of the three ______________/

The functions come from the module SAGEMAKER_PROGRAM (by default inference.py) in the folder code/ of the model. Missing ones
are the containers' defaults. One prediction runs at a time, on its own thread, so that /ping is answered meanwhile.

Differences from the containers: a wrong request is answered with 400, 406, 408, 413 or 415 (there 500); pickled objects in .npy
and .npz are refused; an error is JSON, and contains paths of this machine only if `show_errors` is set."""
from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import inspect
import io
import json
import os
import pathlib
import re
import sys
import traceback
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any, AsyncIterator, Callable, Dict, Iterator, List, Optional, Tuple

from shoal.job import processes

JSON, CSV, NPY, NPZ, ANY = "application/json", "text/csv", "application/x-npy", "application/x-npz", "*/*"
TEXTS = (JSON, CSV)  # bodies of these types reach input_fn as text
INPUTS = (JSON, CSV, NPY, NPZ)
OUTPUTS = (JSON, CSV, NPY)
BODY_BYTES_MAX = 64 << 20
BODY_S = 60.0  # within which a body must arrive: slow clients would hold the room of all others
HELD_BODIES = 4  # bodies of the largest size that may be waiting or being read at one time
UNPACKED_MAX = 4  # limit of the arrays in an .npz, in multiples of the largest body
NAMES = ("model_fn", "input_fn", "predict_fn", "output_fn", "transform_fn", "pre_model_fn", "model_warmup_fn")
ARGUMENTS = {"model_fn": 1, "input_fn": 2, "predict_fn": 2, "output_fn": 2, "transform_fn": 4, "pre_model_fn": 1,
             "model_warmup_fn": 2}
PATH_TEXT = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+([\w.+@-]*)")


class ServeError(RuntimeError):
    """The endpoint cannot start. The message is one line."""


class RequestError(Exception):
    """The client's request cannot be served."""

    def __init__(self, status: int, kind: str, message: str):
        super().__init__(message)
        self.status, self.kind = status, kind


class FunctionError(Exception):
    """A function of the script has raised an exception."""

    def __init__(self, name: str, cause: BaseException):
        super().__init__(str(cause))
        self.name, self.cause = name, cause


@dataclasses.dataclass
class Context:
    """The extra argument of functions that accept one more."""

    model_dir: str
    request_headers: Dict[str, str] = dataclasses.field(default_factory=dict)
    system_properties: Dict[str, Any] = dataclasses.field(default_factory=dict)

    def get_request_header(self, idx: int, key: str) -> Optional[str]:
        return self.request_headers.get(key.lower())


# ---- bodies ----

def decode(body: Any, content_type: str) -> Any:
    """The default of input_fn: returns a numpy array."""
    import numpy
    try:
        if content_type == JSON:
            return numpy.array(json.loads(body))
        if content_type == CSV:
            return numpy.genfromtxt(io.StringIO(body), delimiter=",")
        if content_type == NPY:
            return numpy.load(io.BytesIO(body), allow_pickle=False)
        if content_type == NPZ:
            return _npz(body)
    except RequestError:
        raise
    except Exception as error:  # numpy and zipfile raise many kinds
        raise RequestError(400, "MalformedBody", f"the body is not {content_type}: {error}") from error
    raise RequestError(415, "UnsupportedContentType",
                       f"Content-Type {content_type or '(none)'} is not understood: send one of {', '.join(INPUTS)}")


def _npz(body: bytes) -> Any:
    """Reads a sparse matrix as scipy.sparse.save_npz writes it; else the arrays by name, or the single array."""
    import numpy
    size = sum(member.file_size for member in zipfile.ZipFile(io.BytesIO(body)).infolist())
    if size > UNPACKED_MAX * BODY_BYTES_MAX:
        raise RequestError(413, "BodyTooLarge", f"the arrays of the body have {size:,} bytes unpacked, and may have "
                                                f"{UNPACKED_MAX * BODY_BYTES_MAX:,}: send less at a time")
    with numpy.load(io.BytesIO(body), allow_pickle=False) as file:
        if "format" not in file.files:
            arrays = {name: file[name] for name in file.files}
            return next(iter(arrays.values())) if len(arrays) == 1 else arrays
    try:
        import scipy.sparse
    except ImportError as error:
        raise RequestError(415, "UnsupportedContentType", f"a sparse matrix in {NPZ} needs scipy here") from error
    return scipy.sparse.load_npz(io.BytesIO(body))


def encode(prediction: Any, accept: str) -> Any:
    """The default of output_fn: encodes as the containers do."""
    import numpy
    if accept == JSON:
        return json.dumps(prediction, default=_as_list)
    if accept == CSV:
        text = io.StringIO()
        numpy.savetxt(text, prediction, delimiter=",", fmt="%s")
        return text.getvalue()
    data = io.BytesIO()
    numpy.save(data, prediction, allow_pickle=False)
    return data.getvalue()


def _as_list(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def media_type(header: str) -> str:
    return header.split(";", 1)[0].strip().lower()


def accepted(header: str) -> List[str]:
    """Returns the types of an Accept header, in the order of the client's preference."""
    found: List[Tuple[float, str]] = []
    for part in header.split(","):
        name, *parameters = [word.strip() for word in part.split(";")]
        quality = next((word[2:] for word in parameters if word.startswith("q=")), "1")
        with contextlib.suppress(ValueError):
            if name and float(quality) > 0:
                found.append((-float(quality), name.lower()))
    return [name for _, name in sorted(found, key=lambda one: one[0])]


# ---- the containers' defaults ----

def default_model_fn(model_dir: str) -> Any:
    """Loads a model of TorchScript."""
    path = os.path.join(model_dir, "model.pt")
    if not os.path.exists(path):
        raise ServeError("the model has no model.pt, and the script has no model_fn(model_dir): write one, name the script "
                         "that has one (--entry-point), or save the model with torch.jit")
    import torch
    return torch.jit.load(path, map_location=_device()).eval()


def _device() -> Any:
    import torch
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_input_fn(data: Any, content_type: str) -> Any:
    """Returns a tensor if torch is in use, else an array."""
    array = decode(data, content_type)
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(array, "dtype") or not hasattr(array, "shape") or hasattr(array, "getnnz"):
        return array
    if array.dtype.kind not in "biufc":
        raise RequestError(400, "MalformedBody", "the body holds no numbers in rows of one length")
    return torch.as_tensor(array, dtype=torch.float32 if content_type in TEXTS else None).to(_device())


def default_predict_fn(data: Any, model: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return model(data)
    with torch.no_grad():
        return model.to(_device()).eval()(data)


def default_output_fn(prediction: Any, accept: str) -> Any:
    """Encodes the prediction as the first of the client's types that we can write. Returns the body and the type."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(prediction, torch.Tensor):
        prediction = prediction.detach().cpu().numpy()
    default = os.environ.get("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", JSON)
    for name in accepted(accept):
        name = default if name in (ANY, "application/*") else name
        if name in OUTPUTS:
            return encode(prediction, name), name
    raise RequestError(406, "NotAcceptable", f"Accept {accept} cannot be answered: ask for one of {', '.join(OUTPUTS)}")


# ---- the script ----

class Handler:
    """A model and the functions around it. Call `load` once, then `answer` for each request, on one thread. `origin` is the URL
    at which this machine reaches the endpoint."""

    names: Tuple[str, ...] = NAMES  # the functions that a script may define
    origin = ""

    def __init__(self, model_dir: pathlib.Path, program: Optional[str] = None, code: Optional[pathlib.Path] = None):
        self.model_dir = model_dir
        self.code = code or model_dir / "code"
        self.program = program or os.environ.get("SAGEMAKER_PROGRAM") or "inference.py"
        self.functions: Dict[str, Callable[..., Any]] = {
            "model_fn": default_model_fn, "input_fn": default_input_fn, "predict_fn": default_predict_fn,
            "output_fn": default_output_fn}
        self.model: Any = None

    def load(self) -> None:
        """Loads the script and the model. Raises ServeError, or FunctionError if the script raises an exception."""
        own = self._own_functions()
        if "transform_fn" in own and {"input_fn", "predict_fn", "output_fn"} & set(own):
            raise ServeError("Cannot use transform_fn implementation in conjunction with input_fn, predict_fn, and/or "
                             "output_fn implementation")
        self.functions.update(own)
        context = Context(str(self.model_dir))
        if "pre_model_fn" in own:
            self._call("pre_model_fn", context, str(self.model_dir))
        self.model = self._call("model_fn", context, str(self.model_dir))
        if "model_warmup_fn" in own:
            self._call("model_warmup_fn", context, str(self.model_dir), self.model)

    def _own_functions(self) -> Dict[str, Callable[..., Any]]:
        path = self.code / self.program
        if not path.is_file():
            if self.program != "inference.py":
                raise ServeError(f"there is no {self.program} in the model's code: entry_point and SAGEMAKER_PROGRAM name a "
                                 "file there")
            return {}
        sys.path.insert(0, str(self.code))
        if path.parent != self.code:
            sys.path.insert(0, str(path.parent))
        module = self._module(path)
        return {name: getattr(module, name) for name in self.names if callable(getattr(module, name, None))}

    def _module(self, path: pathlib.Path) -> types.ModuleType:
        """Imports the script under its own name, so that a pickled model finds its classes."""
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            raise FunctionError(self.program, error) from error
        return module

    def _call(self, name: str, context: Context, *arguments: Any) -> Any:
        """Calls a function. One that accepts one more argument gets the context."""
        function = self.functions[name]
        if _takes(function, ARGUMENTS[name] + 1):
            arguments = (*arguments, context)
        return called(name, function, *arguments)

    def answer(self, body: bytes, headers: Dict[str, str]) -> Tuple[bytes, str]:
        """Returns the body of the answer and its type."""
        content_type = media_type(headers.get("content-type") or os.environ.get("SAGEMAKER_DEFAULT_CONTENT_TYPE", JSON))
        accept = headers.get("accept") or ANY
        if accept == ANY:
            accept = os.environ.get("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", JSON)
        data: Any = body
        if content_type in TEXTS:
            try:
                data = body.decode("utf-8")
            except UnicodeDecodeError as error:
                raise RequestError(400, "MalformedBody", f"the body is not text in UTF-8: {error}") from error
        context = Context(str(self.model_dir), headers)
        return result_of(self._transform(data, content_type, accept, context), accept)

    def _transform(self, data: Any, content_type: str, accept: str, context: Context) -> Any:
        if "transform_fn" in self.functions:
            return self._call("transform_fn", context, self.model, data, content_type, accept)
        asked = self._call("input_fn", context, data, content_type)
        prediction = self._call("predict_fn", context, asked, self.model)
        return self._call("output_fn", context, prediction, accept)


def called(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of the script. Raises FunctionError for its exceptions."""
    try:
        return function(*arguments)
    except (RequestError, ServeError):
        raise
    except SystemExit as error:
        raise FunctionError(name, RuntimeError(f"it called sys.exit({error.code})")) from error
    except Exception as error:
        raise FunctionError(name, error) from error


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def result_of(result: Any, accept: str) -> Tuple[bytes, str]:
    """Returns the body and its type from the result of output_fn or transform_fn, which may be a body alone."""
    content_type = next(iter(accepted(accept)), JSON)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], str):
        result, content_type = result
    if isinstance(result, str):
        return result.encode("utf-8"), content_type
    if isinstance(result, (bytes, bytearray, memoryview)):
        return bytes(result), content_type
    try:
        return json.dumps(result).encode(), content_type
    except (TypeError, ValueError) as error:
        wrong = TypeError(f"it returned {type(result).__name__}: return bytes or text, or that and its type")
        raise FunctionError("output_fn", wrong) from error


# ---- errors ----

def error_data(error: BaseException, code: pathlib.Path, show_errors: bool) -> Tuple[int, Dict[str, Any]]:
    """Returns the answer's status and data for an error."""
    if isinstance(error, RequestError):
        return error.status, {"error": {"type": error.kind, "message": _without_paths(str(error), show_errors)}}
    name = error.name if isinstance(error, FunctionError) else None
    cause = error.cause if isinstance(error, FunctionError) else error
    told: Dict[str, Any] = {"type": type(cause).__name__, "message": _without_paths(str(cause), show_errors), "function": name,
                            "where": _where(cause, code)}
    if show_errors:
        told["traceback"] = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    status = getattr(cause, "status_code", 500)  # the containers' errors have one
    return status if isinstance(status, int) and 400 <= status < 600 else 500, {"error": told}


def _without_paths(text: str, show_errors: bool) -> str:
    return text if show_errors else PATH_TEXT.sub(r"\1", text)


def _where(error: BaseException, code: pathlib.Path) -> Optional[str]:
    """Returns the last line of the traceback in the script's folder, as FILE:LINE."""
    top = str(code.resolve()) + os.sep
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = os.path.realpath(frame.filename)
        if name.startswith(top):
            return f"{name[len(top):]}:{frame.lineno}"
    return None


# ---- the application ----

def application(handler: Handler, show_errors: bool = False, body_bytes_max: int = BODY_BYTES_MAX, is_local: bool = False) -> Any:
    """Returns a starlette application over a loaded handler. With is_local it listens on the loopback interface, and so answers
    only requests that name this machine."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    pool = ThreadPoolExecutor(1, thread_name_prefix="predict")
    rest_pool = ThreadPoolExecutor(1, thread_name_prefix="rest")  # a script on the other thread may wait for its answer
    held = Held(HELD_BODIES * body_bytes_max)

    @contextlib.asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        yield
        pool.shutdown(wait=False)
        rest_pool.shutdown(wait=False)

    async def ping(request: Request) -> Response:
        return Response(b"", media_type=JSON)

    def answered_check(request: Request) -> None:
        if is_local and not processes.asks_this_machine(request.headers.get("host")):
            raise RequestError(403, "OtherHost", "this endpoint answers only requests to localhost: --address makes it listen "
                                                 "elsewhere")

    async def invocations(request: Request) -> Response:
        try:
            answered_check(request)
            with held.one() as add:
                body = await _body_in_time(request, body_bytes_max, add)
                loop = asyncio.get_running_loop()
                data, content_type = await loop.run_in_executor(pool, handler.answer, body, dict(request.headers))
        except ClientDisconnect:
            return Response(b"", 400)
        except Exception as error:
            status, told = error_data(error, handler.code, show_errors)
            if status >= 500:
                cause = error.cause if isinstance(error, FunctionError) else error
                traceback.print_exception(type(cause), cause, cause.__traceback__)
            more = {"connection": "close"} if status == 408 else None  # the rest of the body may still arrive
            return JSONResponse(told, status, more)
        return Response(data, headers={"content-type": content_type})

    async def rest(request: Request) -> Response:
        """TensorFlow Serving's own interface, for the scripts of a SavedModel."""
        try:
            answered_check(request)
            with held.one() as add:
                body = await _body_in_time(request, body_bytes_max, add)
                status, data = await asyncio.get_running_loop().run_in_executor(rest_pool, handler.rest, request.url.path, body)
        except ClientDisconnect:
            return Response(b"", 400)
        except Exception as error:
            status, told = error_data(error, handler.code, show_errors)
            data = json.dumps({"error": told["error"]["message"]}).encode()
        return Response(data, status, media_type=JSON)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = "POST /invocations asks the model, GET /ping whether it is there"
        return JSONResponse({"error": {"type": error.detail, "message": text}}, error.status_code, error.headers)

    routes = [Route("/ping", ping, methods=["GET"]), Route("/invocations", invocations, methods=["POST"])]
    if hasattr(handler, "rest"):
        routes.append(Route("/v1/models/{rest:path}", rest, methods=["POST"]))
    return Starlette(routes=routes, lifespan=life, exception_handlers={404: refused, 405: refused})


class Held:
    """Counts the bytes of all bodies that are being read or wait for their prediction. Used only on the event loop's thread."""

    def __init__(self, most: int):
        self.most, self.bytes = most, 0

    @contextlib.contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts bytes of one request until the request ends. The function raises RequestError beyond
        the limit."""
        own = 0

        def add(count: int) -> None:
            nonlocal own
            if self.bytes + count > self.most:
                raise RequestError(503, "TooManyRequests", f"requests of {self.bytes:,} bytes wait already: ask again later")
            own, self.bytes = own + count, self.bytes + count

        try:
            yield add
        finally:
            self.bytes -= own


async def _body_in_time(request: Any, bytes_max: int, add: Callable[[int], None]) -> bytes:
    try:
        return await asyncio.wait_for(_body(request, bytes_max, add), BODY_S)
    except asyncio.TimeoutError:
        raise RequestError(408, "BodyTooSlow", f"the body has not arrived within {BODY_S:g} s: send less at a time") from None


async def _body(request: Any, bytes_max: int, add: Callable[[int], None]) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        add(len(piece))
        if size > bytes_max:
            raise RequestError(413, "BodyTooLarge",
                               f"the body is larger than {bytes_max:,} bytes: send less at a time, or start with --max-bytes")
        pieces.append(piece)
    return b"".join(pieces)
