"""A SavedModel of TensorFlow: finds its versions in a model's folder, and answers requests in the form of TensorFlow Serving's
REST interface.

    {"instances": [ROW, ...]}  ->  {"predictions": [ROW, ...]}   one value for each row, or an object of named values
    {"inputs": VALUES}         ->  {"outputs": VALUES}           all rows at once, or an object of them

"signature_name" selects another signature than serving_default. Bytes are {"b64": TEXT}, as are outputs whose name ends in
_bytes. tfserving.py handles the bodies and the script around it."""
from __future__ import annotations

import base64
import binascii
import os
import pathlib
import re
import threading
from typing import Any, Dict, List, Mapping, Optional, Tuple

from shoal.job.serving import FunctionError, RequestError, ServeError

FILE = "saved_model.pb"
SIGNATURE = "serving_default"
UNNAMED = "model"  # a model whose versions are at the top of the folder
ROWS, COLUMNS = "instances", "inputs"
ANSWERS = {ROWS: "predictions", COLUMNS: "outputs"}
Versions = Dict[int, pathlib.Path]


# ---- the folder ----

def find(model_dir: pathlib.Path) -> Dict[str, Versions]:
    """Returns the versions of each model: as in the containers, the folders NAME/NUMBER that have a saved_model.pb."""
    found: Dict[str, Versions] = {}
    for file in sorted(model_dir.rglob(FILE)):
        version, base = file.parent, file.parent.parent
        if version != model_dir and re.fullmatch(r"[0-9]+", version.name):
            found.setdefault(UNNAMED if base == model_dir else base.name, {})[int(version.name)] = version
    return found


def misplaced(model_dir: pathlib.Path) -> Optional[pathlib.Path]:
    """Returns a SavedModel that find() passes over because its folder is not a number, or None."""
    file = next(iter(sorted(model_dir.rglob(FILE))), None)
    return file and file.parent.relative_to(model_dir)


class Models:
    """All models of a folder, by name and version. A version is loaded when it is first used, by any thread."""

    def __init__(self, model_dir: pathlib.Path):
        self.found = find(model_dir)
        self.default = os.environ.get("SAGEMAKER_TFS_DEFAULT_MODEL_NAME") or min(self.found)
        self.loaded: Dict[pathlib.Path, Servable] = {}
        self.lock = threading.Lock()
        if self.default not in self.found:
            names = ", ".join(sorted(self.found))
            raise ServeError(f"SAGEMAKER_TFS_DEFAULT_MODEL_NAME is {self.default}, and the model has {names}")

    def get(self, name: Optional[str] = None, version: Optional[str] = None) -> Servable:
        """Returns a model; by default the newest version of the default model. Raises RequestError if there is none."""
        path = self._path(name or self.default, version)
        with self.lock:
            if path not in self.loaded:
                self.loaded[path] = Servable(path)
            return self.loaded[path]

    def _path(self, name: str, version: Optional[str]) -> pathlib.Path:
        if name not in self.found:
            raise RequestError(404, "NoSuchModel", f"there is no model {name}: ask for one of {', '.join(sorted(self.found))}")
        versions = self.found[name]
        if version is None:
            return versions[max(versions)]
        number = int(version) if re.fullmatch(r"[0-9]{1,18}", version) else -1
        if number not in versions:
            known = ", ".join(map(str, sorted(versions)))
            raise RequestError(404, "NoSuchModel", f"there is no version {version} of the model {name}: ask for one of {known}")
        return versions[number]


# ---- a version ----

class Servable:
    """A loaded SavedModel."""

    def __init__(self, path: pathlib.Path):
        self.tf = tensorflow_import()
        place = f"{path.parent.name}/{path.name}"
        try:
            self.model = self.tf.saved_model.load(str(path))
        except Exception as error:  # TensorFlow raises many kinds
            raise ServeError(f"the SavedModel in {place} cannot be loaded: {first_line(error)}") from error
        self.signatures = dict(self.model.signatures)
        if not self.signatures:
            raise ServeError(f"the SavedModel in {place} has no signature: write it with model.export(path), or with "
                             "tf.saved_model.save(model, path, signatures=...)")

    def answer(self, request: Any) -> Dict[str, Any]:
        """Answers a request of the REST interface. Raises RequestError if the request does not fit the signature."""
        form, data, signature = self._read(request)
        specs: Mapping[str, Any] = signature.structured_input_signature[1]
        values = by_rows(data, list(specs)) if form == ROWS else by_columns(data, list(specs))
        tensors = {name: self._tensor(name, values[name], spec) for name, spec in specs.items()}
        try:
            outputs = {name: tensor.numpy() for name, tensor in signature(**tensors).items()}
        except self.tf.errors.InvalidArgumentError as error:
            raise RequestError(400, "InvalidArgument", f"the model refuses the input: {cause_of(error)}") from error
        except Exception as error:
            raise FunctionError("signature", error) from error
        return {ANSWERS[form]: predictions(outputs, len(data)) if form == ROWS else unnamed(columns_of(outputs))}

    def _read(self, request: Any) -> Tuple[str, Any, Any]:
        """Returns the form of a request, its data and the signature that it asks for."""
        forms = [form for form in ANSWERS if isinstance(request, dict) and form in request]
        if len(forms) != 1:
            raise RequestError(400, "MalformedBody", 'the body must be an object with either "instances" or "inputs"')
        name = request.get("signature_name", SIGNATURE)
        if not isinstance(name, str) or name not in self.signatures:
            raise RequestError(400, "NoSuchSignature", f"the model has no signature {name}: \"signature_name\" may be "
                                                       f"{', '.join(sorted(self.signatures))}")
        return forms[0], request[forms[0]], self.signatures[name]

    def _tensor(self, name: str, value: Any, spec: Any) -> Any:
        try:
            array = strings(value) if spec.dtype == self.tf.string else numbers(value, spec.dtype.as_numpy_dtype)
        except (ValueError, TypeError, OverflowError) as error:
            text = f'input "{name}" must hold {spec.dtype.name}: {first_line(error)}'
            raise RequestError(400, "InvalidInput", text) from error
        if not spec.shape.is_compatible_with(array.shape):
            shape = tuple(spec.shape.as_list())
            raise RequestError(400, "InvalidInput", f'input "{name}" has the shape {array.shape}, and the model takes {shape} '
                                                    "(None: any length)")
        return self.tf.constant(array, dtype=spec.dtype)


def tensorflow_import() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings about this machine's instruction set
    try:
        import tensorflow
    except ImportError as error:
        raise ServeError("the model is a SavedModel, and this Python has no TensorFlow: pip install tensorflow, or name a "
                         "Python that has it by SHOAL_PYTHON") from error
    return tensorflow


def cause_of(error: BaseException) -> str:
    """Returns the cause in an error of a graph: the line before the last, which names the node."""
    lines = str(error).strip().partition("[[{{node ")[0].strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# ---- from JSON ----

def by_rows(data: Any, names: List[str]) -> Dict[str, Any]:
    """Returns the values of each input, one for each row."""
    if not isinstance(data, list) or not data:
        raise RequestError(400, "MalformedBody", '"instances" must be a list with at least one row')
    if not any(_is_object(row) for row in data):
        return {_only(names): data}
    for number, row in enumerate(data):
        _names_check(row, names, f"instance {number}")
    return {name: [row[name] for row in data] for name in names}


def by_columns(data: Any, names: List[str]) -> Dict[str, Any]:
    if not _is_object(data):
        return {_only(names): data}
    _names_check(data, names, '"inputs"')
    return dict(data)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and set(value) != {"b64"}


def _only(names: List[str]) -> str:
    if len(names) != 1:
        raise RequestError(400, "InvalidInput", f"the model has the inputs {', '.join(sorted(names))}: send an object with "
                                                "these names")
    return names[0]


def _names_check(value: Any, names: List[str], what: str) -> None:
    if not isinstance(value, dict) or set(value) != set(names):
        sent = ", ".join(sorted(value)) if isinstance(value, dict) else "no names"
        known = ", ".join(sorted(names))
        raise RequestError(400, "InvalidInput", f"{what} has {sent or 'no names'}, and the model's inputs are {known}")


def numbers(value: Any, dtype: Any) -> Any:
    """Returns an array of the type. Raises ValueError for anything that the type cannot hold."""
    import numpy
    array = numpy.array(value)
    kind = numpy.dtype(dtype).kind
    allowed = {"b": "b", "i": "iu", "u": "iu"}.get(kind, "iufc" if kind == "c" else "iuf")
    if array.size and array.dtype.kind not in allowed:
        raise ValueError(f"not {array.dtype}" if array.dtype.kind in "biufc" else "not text, null or objects")
    if array.size and kind in "iu" and not numpy.iinfo(dtype).min <= array.min() <= array.max() <= numpy.iinfo(dtype).max:
        raise ValueError("a number is too large or too small")
    return array.astype(dtype)


def strings(value: Any) -> Any:
    """Returns an array of bytes from texts and {"b64": ...} in nested lists."""
    import numpy
    array = numpy.array(_decoded(value), dtype=object)
    if not all(isinstance(one, bytes) for one in array.flat):
        raise ValueError("only texts and {\"b64\": ...}, in rows of one length")
    return array


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and isinstance(value.get("b64"), str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"{{\"b64\": ...}} is not base64: {error}") from error
    return value


# ---- to JSON ----

def predictions(outputs: Mapping[str, Any], rows: int) -> List[Any]:
    """Returns the outputs row by row."""
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != rows:
            raise RequestError(400, "InvalidOutput", f'output "{name}" has the shape {array.shape}, not one value for each of '
                                                     f'{rows} instances: ask with "inputs"')
    columns = columns_of(outputs)
    return [unnamed({name: column[row] for name, column in columns.items()}) for row in range(rows)]


def unnamed(values: Dict[str, Any]) -> Any:
    """Returns the value itself if there is only one."""
    return next(iter(values.values())) if len(values) == 1 else values


def columns_of(outputs: Mapping[str, Any]) -> Dict[str, Any]:
    return {name: _plain(array, name.endswith("_bytes")) for name, array in outputs.items()}


def _plain(array: Any, is_binary: bool) -> Any:
    """Returns an array as lists that JSON can hold."""
    if isinstance(array, bytes) or array.dtype == object:
        return _texts(array.tolist() if hasattr(array, "tolist") else array, is_binary)
    return (array if array.dtype.kind in "biuf" else array.astype("float32")).tolist()  # bfloat16 is of no kind that JSON has


def _texts(value: Any, is_binary: bool) -> Any:
    if isinstance(value, list):
        return [_texts(one, is_binary) for one in value]
    try:
        if not is_binary:
            return value.decode()
    except UnicodeDecodeError:
        pass
    return {"b64": base64.b64encode(value).decode()}
