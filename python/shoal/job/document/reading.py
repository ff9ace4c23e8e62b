"""Reads a job document from JSON, TOML or Python, and finds all its mistakes before anything starts.

    job = job_read("job.toml")      a file; relative paths in it start at its folder
    job = job_of(data)              data as json.load returns them, or as_data(job): job_of(as_data(job)) == job
    problems(data)                  every mistake with its place

Limits are those of SageMaker's API, so that a document that runs here also runs there.

Types are checked here, and not by pydantic or jsonschema: each host reads the document with the Python of the script, whose
packages and versions are the script's to choose. Lines of keys are found here, because json, tomllib, tomli and tomlkit report
none (decision 76)."""
from __future__ import annotations

import copy
import dataclasses
import json
import os
import pathlib
import re
import runpy
import sys
import traceback
import typing
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

from shoal.job.document import Job, JobError, Problem, as_data, distribution, local_path
from shoal.job.document.distribution import KeyPath, Mistake


ENGINES = ("local", "hosts", "slurm", "kubernetes", "sagemaker")
HYPERPARAMETERS_MAX, HYPERPARAMETER_NAME_MAX, HYPERPARAMETER_MAX = 100, 256, 2500
VARIABLES_MAX, VARIABLE_MAX = 100, 512
CHANNELS_MAX, CHANNEL_NAME = 20, r"[A-Za-z0-9.\-_]{1,64}"
METRICS_MAX, METRIC_NAME_MAX, METRIC_REGEX_MAX = 40, 255, 500
NAME_MAX, NAME = 63, r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
SECONDS_MAX = 28 * 86400  # on SageMaker
ENTRY_POINT = r"[A-Za-z0-9._][A-Za-z0-9._+-]*(/[A-Za-z0-9._][A-Za-z0-9._+-]*)*"  # names that the containers can start
BUCKET = r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]"


@dataclasses.dataclass
class Source:
    """The origin of data: it names the place of a mistake, and relative paths start at its folder."""

    path: Optional[pathlib.Path] = None
    lines: Dict[KeyPath, int] = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> pathlib.Path:
        return self.path.resolve().parent if self.path else pathlib.Path.cwd()

    def where(self, keys: KeyPath) -> str:
        line = next((self.lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in self.lines), None)
        parts = [self.path.name + (f":{line}" if line else "")] if self.path else []
        return ": ".join(parts + ([_dotted(keys)] if keys else []))


def job_read(path: Union[str, os.PathLike]) -> Job:
    """Returns the job in a file: .json, .toml, or .py with `job = Job(...)` or an estimator. Raises JobError."""
    source = Source(pathlib.Path(path))
    readers: Dict[str, Callable[[Source], Any]] = {".json": _read_json, ".toml": _read_toml, ".py": _read_python}
    reader = readers.get(source.path.suffix.lower())
    if reader is None:
        _fail(source, "a job document is a file .json, .toml or .py")
    try:
        data = reader(source)
    except (OSError, UnicodeDecodeError) as error:
        _fail(source, f"cannot be read: {getattr(error, 'strerror', None) or error}")
    return _with_whole_paths(job_of(data, source), source.folder)


def job_of(data: Any, source: Optional[Source] = None, files: bool = True) -> Job:
    """Returns the job in data; `files` as in problems(). Raises JobError."""
    found = problems(data, source, files)
    if found:
        raise JobError(found)
    return _job_built(_long_form(data), source or Source())


def _job_built(data: Any, source: Source) -> Job:
    job = _build(Job, data)
    return dataclasses.replace(job, distribution=distribution.with_parameters(job.distribution, source.folder))


def problems(data: Any, source: Optional[Source] = None, files: bool = True) -> List[Problem]:
    """Returns all mistakes. With `files`, also checks files that must exist, such as the entry point."""
    source = source or Source()
    return [Problem(source.where(keys), text) for keys, text in _mistakes(data, source, files)]


def _fail(source: Source, text: str, keys: KeyPath = ()) -> typing.NoReturn:
    raise JobError([Problem(source.where(keys), text)])


def _dotted(keys: KeyPath) -> str:
    words = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return words[1:] if words.startswith(".") else words


# ------------------------------------------------------------ types

def _mistakes(data: Any, source: Source, files: bool) -> List[Mistake]:
    """Finds mistakes of types first, then checks the values of everything that had no mistake."""
    if not isinstance(data, dict):
        return [((), f"a job is a table of settings, not {_said(data)}")]
    data = _long_form(data)
    found = dict(_mistakes_of_type(data, Job, ()))
    job = _job_built(_without(data, found), source)
    for check in _CHECKS + (_FILE_CHECKS if files else ()):
        for keys, text in check(job, source):
            if not any(_is_about(known, keys) for known in found):
                found[keys] = text
    order = list(data)
    return sorted(found.items(), key=lambda item: order.index(item[0][0]) if item[0][0] in order else -1)


def _is_about(known: KeyPath, keys: KeyPath) -> bool:
    """Returns true if a known mistake makes another one at `keys` pointless: it is there, around it, or in an item of that
    list."""
    return keys[:len(known)] == known or (known[:-1] == keys and isinstance(known[-1], int))


def _long_form(data: Any) -> Any:
    """Expands short forms: a channel that is only a URI, a metric with the SDK's capitals."""
    if not isinstance(data, dict):
        return data
    data = dict(data)
    if isinstance(data.get("channels"), dict):
        data["channels"] = {name: {"uri": one} if isinstance(one, str) else one for name, one in data["channels"].items()}
    if isinstance(data.get("metric_definitions"), list):
        data["metric_definitions"] = [{{"Name": "name", "Regex": "regex"}.get(key, key): value for key, value in one.items()}
                                      if isinstance(one, dict) else one for one in data["metric_definitions"]]
    return data


def _mistakes_of_type(value: Any, kind: Any, keys: KeyPath) -> Iterator[Mistake]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin is Union:  # Optional
        if value is not None:
            yield from _mistakes_of_type(value, arguments[0], keys)
    elif dataclasses.is_dataclass(kind):
        yield from _mistakes_of_fields(value, kind, keys)
    elif origin is dict:
        if not isinstance(value, dict):
            yield keys, f"needs a table, not {_said(value)}"
            return
        for key, one in value.items():
            if not isinstance(key, str):
                yield keys + (str(key),), f"a key is text, not {_said(key)}"
            else:
                yield from _mistakes_of_type(one, arguments[1], keys + (key,))
    elif origin is list:
        if not isinstance(value, list):
            yield keys, f"needs a list, not {_said(value)}"
            return
        for index, one in enumerate(value):
            yield from _mistakes_of_type(one, arguments[0], keys + (index,))
    elif not isinstance(value, kind) or isinstance(value, bool):
        hint = f'; write "{json.dumps(value)}"' if kind is str and isinstance(value, (bool, int, float)) else ""
        yield keys, f"needs {'text' if kind is str else 'a whole number'}, not {_said(value)}{hint}"


def _mistakes_of_fields(value: Any, kind: Any, keys: KeyPath) -> Iterator[Mistake]:
    if not isinstance(value, dict):
        yield keys, f"needs a table with {', '.join(typing.get_type_hints(kind))}, not {_said(value)}"
        return
    hints = typing.get_type_hints(kind)
    for key, one in value.items():
        if key in hints:
            yield from _mistakes_of_type(one, hints[key], keys + (key,))
        else:
            near = distribution.names_like(str(key), hints)
            yield keys + (str(key),), f"unknown key{near or '; known: ' + ', '.join(hints)}"
    for field in dataclasses.fields(kind):
        if _is_required(field) and field.name not in value:
            yield keys + (field.name,), "is missing"


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _without(data: Any, found: Dict[KeyPath, str]) -> Any:
    """Returns a copy with None for all data that have a mistake, so that the rest can be checked."""
    data = copy.deepcopy(data)
    for keys in sorted((keys for keys in found if keys), key=lambda keys: [str(key).zfill(9) for key in keys],
                        reverse=True):
        inside = data
        for key in keys[:-1]:
            inside = inside[key]
        if isinstance(inside, list) or keys[-1] in inside:
            inside[keys[-1]] = None
    return data


def _build(kind: Any, value: Any) -> Any:
    """Builds an object of a type of document.py. Data that _without() removed become the default, or an empty object."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union:
        return None if value is None else _build(arguments[0], value)
    if dataclasses.is_dataclass(kind):
        hints, value = typing.get_type_hints(kind), value or {}
        fields = {name: _build(hint, value[name]) for name, hint in hints.items() if _is_given(hint, value, name)}
        empty = {field.name: "" for field in dataclasses.fields(kind) if _is_required(field)}
        return kind(**{**empty, **fields})
    if origin is dict:
        return {key: _build(arguments[1], one) for key, one in value.items()
                if isinstance(key, str) and (one is not None or arguments[1] is Any)}
    if origin is list:
        return [_build(arguments[0], one) for one in value if one is not None or dataclasses.is_dataclass(arguments[0])]
    return value


def _is_given(hint: Any, value: Dict[str, Any], name: str) -> bool:
    return name in value and (value[name] is not None or typing.get_origin(hint) is Union)


def _said(value: Any) -> str:
    return distribution.said(value)


# ------------------------------------------------------------ limits

def _check_names(job: Job, source: Source) -> Iterator[Mistake]:
    for field in ("name", "base_job_name"):
        value = getattr(job, field)
        if value is None:
            continue
        if not re.fullmatch(r"[a-zA-Z0-9-]*", value) or not re.fullmatch(r"[a-zA-Z0-9](.*[a-zA-Z0-9])?", value):
            better = re.sub(r"[^a-zA-Z0-9]+", "-", value).strip("-")[:NAME_MAX].strip("-")
            yield (field,), (f'"{value}" is not the name of a job: use letters, digits and hyphens, with no hyphen at either end'
                             + (f'; try "{better}"' if better else ""))
        elif len(value) > NAME_MAX:
            yield (field,), f"{len(value)} characters, and at most {NAME_MAX} are allowed"


def _check_numbers(job: Job, source: Source) -> Iterator[Mistake]:
    for field, least in (("instance_count", 1), ("workers_per_host", 1), ("max_run", 1), ("stop_grace", 0),
                         ("restarts", 0)):
        value = getattr(job, field)
        if value is not None and value < least:
            yield (field,), f"{value}, and the least is {least}"
    if job.where.engine == "sagemaker" and job.max_run > SECONDS_MAX:
        yield ("max_run",), f"{job.max_run} seconds, and SageMaker allows {SECONDS_MAX}, 28 days"
    if not job.instance_type:
        yield ("instance_type",), 'is empty; "local" is this machine'
    if job.framework not in (None, "pytorch", "tensorflow"):
        near = distribution.names_like(job.framework.lower(), ("pytorch", "tensorflow"))
        yield ("framework",), f'"{job.framework}" is not known; pytorch, tensorflow, or leave it out{near}'


def _check_entry_point(job: Job, source: Source) -> Iterator[Mistake]:
    name = job.entry_point if job.source_dir else os.path.basename(job.entry_point)
    if job.source_dir and os.path.isabs(job.entry_point):
        yield ("entry_point",), f'"{job.entry_point}": with source_dir it is a path below that folder'
    elif not re.fullmatch(ENTRY_POINT, name) or ".." in name:
        yield ("entry_point",), (f'"{name}" is not the name of a script: use letters, digits, ".", "_", "+" and "-", which is not the '
                                 f'first of a name, and no ".."')
    if job.source_dir is not None and not job.source_dir:
        yield ("source_dir",), "is empty; leave it out: the entry point is then a file of its own"
    for field in ("source_dir", "entry_point"):
        if "://" in (getattr(job, field) or ""):
            yield from _mistakes_of_uri((field,), getattr(job, field))


def _check_hyperparameters(job: Job, source: Source) -> Iterator[Mistake]:
    wrong = False
    for key, value in job.hyperparameters.items():
        for text in _mistakes_of_hyperparameter(key, value):
            wrong = True
            yield ("hyperparameters", key), text
    if not wrong and not distribution.mistakes(job):
        sent = distribution.hyperparameters_of(job)
        if len(sent) > HYPERPARAMETERS_MAX:
            yield ("hyperparameters",), (f"{len(sent)} are sent ({len(sent) - len(job.hyperparameters)} of them describe how "
                                         f"the job is run), but at most {HYPERPARAMETERS_MAX} are allowed")


def _mistakes_of_hyperparameter(key: str, value: Any) -> Iterator[str]:
    try:
        length = len(json.dumps(value))
    except (TypeError, ValueError) as error:
        yield f"has no form in JSON: {error}"
        return
    if "\0" in key or isinstance(value, str) and "\0" in value:
        yield "holds a NUL character, which no argument of a program can"
    if not key or len(key) > HYPERPARAMETER_NAME_MAX:
        yield f"its name has {len(key)} characters; 1 to {HYPERPARAMETER_NAME_MAX} are allowed"
    if length > HYPERPARAMETER_MAX:
        yield (f"{length} characters as JSON, and at most {HYPERPARAMETER_MAX} are allowed; put long values into a file of "
               "source_dir")


def _check_environment(job: Job, source: Source) -> Iterator[Mistake]:
    if len(job.environment) > VARIABLES_MAX:
        yield ("environment",), f"{len(job.environment)} variables, and at most {VARIABLES_MAX} are allowed"
    for name, value in job.environment.items():
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or len(name) > VARIABLE_MAX:
            yield ("environment", name), (f"no name of a variable: letters, digits and _, no digit first, at most "
                                          f"{VARIABLE_MAX} "
                                          "characters")
        elif len(value) > VARIABLE_MAX:
            yield ("environment", name), f"{len(value)} characters, and at most {VARIABLE_MAX} are allowed"
        elif "\0" in value:
            yield ("environment", name), "holds a NUL character, which no variable can"


_CHANNEL_CHOICES = {
    "input_mode": ("File", "FastFile"), "distribution": ("FullyReplicated", "ShardedByS3Key"),
    "data_type": ("S3Prefix", "ManifestFile"), "compression": ("None",), "record_wrapping": ("None",),
}
_NOT_SERVED = {
    "Pipe": "mode Pipe is not served; File brings the objects as files",
    "AugmentedManifestFile": "augmented manifests go with mode Pipe, which is not served",
    "Gzip": "is for mode Pipe alone, which is not served; leave it out: files arrive as they are",
    "RecordIO": "is for mode Pipe alone, which is not served; leave it out: files arrive as they are",
}


def _check_channels(job: Job, source: Source) -> Iterator[Mistake]:
    if len(job.channels) > CHANNELS_MAX:
        yield ("channels",), f"{len(job.channels)} channels, and at most {CHANNELS_MAX} are allowed"
    for name, channel in job.channels.items():
        keys = ("channels", name)
        if not re.fullmatch(CHANNEL_NAME, name) or name in (".", ".."):
            yield keys, 'is not a name of a channel: 1 to 64 letters, digits, ".", "-" and "_", and neither "." nor ".."'
        for field, choices in _CHANNEL_CHOICES.items():
            value = getattr(channel, field)
            if value is not None and value not in choices:
                known = _NOT_SERVED.get(value) or f"needs {' or '.join(choices)}, not {_said(value)}"
                yield keys + (field,), known + distribution.names_like(value, choices) * (value not in _NOT_SERVED)
        yield from _mistakes_of_uri(keys + ("uri",), channel.uri)


def _check_places(job: Job, source: Source) -> Iterator[Mistake]:
    if job.output_path is not None:
        yield from _mistakes_of_uri(("output_path",), job.output_path)
    if job.checkpoints:
        yield from _mistakes_of_uri(("checkpoints", "uri"), job.checkpoints.uri)
        path = pathlib.PurePosixPath(job.checkpoints.local_path)
        if not job.checkpoints.local_path or ".." in path.parts:
            yield ("checkpoints", "local_path"), f'"{path}": a path below the base folder, or an absolute one, without ".."'


def _mistakes_of_uri(keys: KeyPath, uri: str) -> Iterator[Mistake]:
    scheme, mark, rest = uri.partition("://")
    if not uri:
        yield keys, "is empty"
    elif not mark:
        near = re.match(r"(s3|file|gs|https?):?/", uri, re.I)
        if near and not uri.startswith("/"):
            better = f"{near[1].lower()}://{uri[near.end():].lstrip('/')}"
            yield keys, f'"{uri}" is neither a path nor a URI; did you mean "{better}"?'
    elif not re.fullmatch(r"[a-z][a-z0-9+.\-]*", scheme):
        yield keys, f'"{uri}": no scheme of a URI, such as s3 or file, before "://"'
    elif scheme == "file" and not rest.startswith("/"):
        yield keys, f'"{uri}": the path after file:// is absolute, as in file:///data/train'
    elif scheme == "s3" and not re.fullmatch(BUCKET, rest.split("/", 1)[0]):
        yield keys, f'"{uri}" names no bucket, as s3://bucket/prefix does: 3 to 63 lower-case letters, digits, "." and "-"'
    elif not rest:
        yield keys, f'"{uri}" names nothing after "://"'


def _check_metrics(job: Job, source: Source) -> Iterator[Mistake]:
    if len(job.metric_definitions) > METRICS_MAX:
        yield ("metric_definitions",), f"{len(job.metric_definitions)} metrics, and at most {METRICS_MAX} are allowed"
    for index, metric in enumerate(job.metric_definitions):
        keys = ("metric_definitions", index)
        if not 1 <= len(metric.name) <= METRIC_NAME_MAX:
            yield keys + ("name",), f"{len(metric.name)} characters; 1 to {METRIC_NAME_MAX} are allowed"
        for text in _mistakes_of_regex(metric.regex):
            yield keys + ("regex",), f'metric "{metric.name}": {text}'


def _mistakes_of_regex(regex: str) -> Iterator[str]:
    if not 1 <= len(regex) <= METRIC_REGEX_MAX:
        yield f"{len(regex)} characters; 1 to {METRIC_REGEX_MAX} are allowed"
        return
    try:
        groups = re.compile(regex).groups
    except (re.error, OverflowError, RecursionError) as error:
        yield f'"{regex}" does not compile: {error}'
        return
    if not groups:
        yield f'"{regex}" has no group, and the number is what the first group matches, as in loss=([-+.\\w]+)'


def _check_where(job: Job, source: Source) -> Iterator[Mistake]:
    where = job.where
    if where.engine not in ENGINES:
        yield ("where", "engine"), (f'"{where.engine}" is not known'
                                    + (distribution.names_like(where.engine, ENGINES) or f"; known: {', '.join(ENGINES)}"))
    if len(set(where.hosts)) != len(where.hosts) or "" in where.hosts:
        yield ("where", "hosts"), "names a host twice, or none"
    elif where.hosts and where.engine != "hosts" and where.engine in ENGINES:
        yield ("where", "hosts"), f'names hosts, and engine is "{where.engine}"; write engine = "hosts", or leave hosts out'
    elif where.hosts and len(where.hosts) != job.instance_count:
        yield ("where", "hosts"), f"names {len(where.hosts)} hosts, and instance_count is {job.instance_count}"
    for name in ("start_timeout", "silence", "checkpoints_timeout"):
        seconds = where.options.get(name, 0)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds < 0:
            yield ("where", "options", name), f"is {seconds!r}, and has to be seconds, such as 600"


def _check_distribution(job: Job, source: Source) -> Iterator[Mistake]:
    for keys, text in distribution.mistakes(job):
        yield ("distribution",) + keys, text


# ------------------------------------------------------------ files

def _check_script(job: Job, source: Source) -> Iterator[Mistake]:
    if "://" in (job.source_dir or job.entry_point):
        return  # it is read when the job starts
    if job.source_dir is None:
        script = source.folder / job.entry_point
        if not script.is_file():
            yield ("entry_point",), f"no file {_in_quotes(script)}"
        yield from _mistakes_of_requirements(job, script.parent)
        return
    folder = source.folder / job.source_dir
    if not folder.is_dir():
        yield ("source_dir",), f"no folder {_in_quotes(folder)}"
        return
    is_package = (folder / "setup.py").is_file() and (folder / job.entry_point).is_dir()
    if not is_package and not (folder / job.entry_point).is_file():
        # These are the SDK's words.
        text = f'No file named "{job.entry_point}" was found in directory "{folder}".'
        yield ("entry_point",), text + _files_like(job, folder)
    yield from _mistakes_of_requirements(job, folder)


def _check_dependencies(job: Job, source: Source) -> Iterator[Mistake]:
    names: Dict[str, str] = {}
    for number, path in enumerate(job.dependencies):
        keys = ("dependencies", number)
        if "://" in path:
            yield keys, f'"{path}": needs a folder or file of this machine'
        elif not (source.folder / path).exists():
            yield keys, f"no file or folder {_in_quotes(source.folder / path)}"
        name = os.path.basename(os.path.normpath(path))
        if name in names:
            yield keys, f'"{path}" and "{names[name]}" would both be {name} next to the source; rename one'
        names.setdefault(name, path)


def _files_like(job: Job, folder: pathlib.Path) -> str:
    names = [one.name for one in folder.iterdir() if one.is_file()]
    return distribution.names_like(job.entry_point, names).replace("; did", " Did")


def _mistakes_of_requirements(job: Job, folder: pathlib.Path) -> Iterator[Mistake]:
    if job.requirements is not None and not (folder / job.requirements).is_file():
        yield ("requirements",), f"no file {_in_quotes(folder / job.requirements)}"


def _in_quotes(path: pathlib.Path) -> str:
    """Returns a path in quotes on one line, whatever characters it has."""
    return json.dumps(str(path), ensure_ascii=False)


def _check_data(job: Job, source: Source) -> Iterator[Mistake]:
    if job.where.engine != "local":
        return  # other machines have their own files
    for name, channel in job.channels.items():
        path = local_path(channel.uri)
        if path and not (source.folder / path).exists():
            yield ("channels", name, "uri"), f"no file or folder {_in_quotes(source.folder / path)}"


_CHECKS = (_check_names, _check_numbers, _check_entry_point, _check_hyperparameters, _check_environment, _check_channels,
           _check_places, _check_metrics, _check_where, _check_distribution)
_FILE_CHECKS = (_check_script, _check_dependencies, _check_data)


def _with_whole_paths(job: Job, folder: pathlib.Path) -> Job:
    """Makes relative paths of a document start at its folder, in whatever folder the job is started."""

    def whole(path: Optional[str]) -> Optional[str]:
        return path if path is None or "://" in path else str(folder / path)

    changed = dataclasses.replace(job, output_path=whole(job.output_path))
    if job.source_dir is None:
        changed.entry_point = whole(job.entry_point) or ""
    changed.source_dir = whole(job.source_dir)
    changed.dependencies = [whole(path) or "" for path in job.dependencies]
    changed.channels = {name: dataclasses.replace(one, uri=whole(one.uri)) for name, one in job.channels.items()}
    if job.checkpoints:
        changed.checkpoints = dataclasses.replace(job.checkpoints, uri=whole(job.checkpoints.uri))
    return changed


# ------------------------------------------------------------ formats

def _read_json(source: Source) -> Any:
    text = source.path.read_text(encoding="utf-8-sig")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        _fail(source, f"not JSON: {error.msg}: line {error.lineno}, column {error.colno}")
    source.lines, twice = _lines_of_json(text)
    if twice:
        raise JobError([Problem(source.where(keys), "is there twice") for keys in twice])
    return data


_JSON_TOKEN = re.compile(r'\s*([{}\[\],:]|"(?:[^"\\]|\\.)*"|[^\s{}\[\],:"]+)')


def _lines_of_json(text: str) -> Tuple[Dict[KeyPath, int], List[KeyPath]]:
    """Returns the line of each key of a JSON text, and the keys that occur twice."""
    tokens = [(match[1], text.count("\n", 0, match.start(1)) + 1) for match in _JSON_TOKEN.finditer(text)]
    lines: Dict[KeyPath, int] = {}
    twice: List[KeyPath] = []

    def value(at: int, keys: KeyPath) -> int:
        token, line = tokens[at]
        lines.setdefault(keys, line)
        if token == "[" or token == "{":
            at, index = at + 1, 0
            while tokens[at][0] not in "]}":
                key: Union[str, int] = index
                if token == "{":
                    key = json.loads(tokens[at][0])
                    twice.extend([keys + (key,)] * (keys + (key,) in lines))
                    lines[keys + (key,)] = tokens[at][1]
                    at += 2
                at = value(at, keys + (key,))
                at += tokens[at][0] == ","
                index += 1
        return at + 1

    value(0, ())
    return lines, twice


def _read_toml(source: Source) -> Any:
    try:
        import tomllib as toml
    except ImportError:
        try:
            import tomli as toml  # type: ignore
        except ImportError:
            _fail(source, "TOML needs Python 3.11, or the package tomli (pip install tomli); JSON needs neither")
    text = source.path.read_text(encoding="utf-8-sig")
    try:
        data = toml.loads(text)
    except toml.TOMLDecodeError as error:
        _fail(source, f"not TOML: {error}")
    source.lines = _lines_of_toml(text)
    return data


_TOML_KEY = r'(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|\'[^\']*\')'
_TOML_KEYS = rf"{_TOML_KEY}(?:\s*\.\s*{_TOML_KEY})*"
_TOML_TABLE = re.compile(rf"\s*(\[\[?)\s*({_TOML_KEYS})\s*\]")
_TOML_SETTING = re.compile(rf"\s*({_TOML_KEYS})\s*=\s*(.*)")
_TOML_STRING = re.compile(r'"""|\'\'\'|"(?:[^"\\]|\\.)*"|\'[^\']*\'|#.*')


def _lines_of_toml(text: str) -> Dict[KeyPath, int]:
    """Returns the line of each key of a TOML text. Keys inside a value of several lines have the line on which the value
    begins."""
    lines: Dict[KeyPath, int] = {}
    counts: Dict[KeyPath, int] = {}
    table: KeyPath = ()
    ends, depth = "", 0  # the end of an open string of several lines; the number of open brackets
    for number, line in enumerate(text.splitlines(), 1):
        if not ends and not depth:
            head, setting = _TOML_TABLE.match(line), _TOML_SETTING.match(line)
            if head:
                table = _numbered(_toml_keys(head[2]), counts, is_new=head[1] == "[[")
                lines.setdefault(table, number)
                continue
            if not setting:
                continue
            keys = table + tuple(_toml_keys(setting[1]))
            for end in range(len(table) + 1, len(keys) + 1):
                lines.setdefault(keys[:end], number)
            line = setting[2]
        ends, depth = _toml_rest(line, ends, depth)
    return lines


def _toml_keys(text: str) -> List[str]:
    return [json.loads(key) if key.startswith('"') else key.strip("'") for key in re.findall(_TOML_KEY, text)]


def _numbered(names: List[str], counts: Dict[KeyPath, int], is_new: bool) -> KeyPath:
    """Returns the keys that lead to a table: within each list of tables on the way it is the last one."""
    keys: KeyPath = ()
    for depth, name in enumerate(names):
        keys += (name,)
        if is_new and depth == len(names) - 1:
            counts[keys] = counts.get(keys, -1) + 1
        if keys in counts:
            keys += (counts[keys],)
    return keys


def _toml_rest(line: str, ends: str, depth: int) -> Tuple[str, int]:
    """Returns the string and the number of brackets that are open at the end of a line."""
    while True:
        if ends:
            at = line.find(ends)
            if at < 0:
                return ends, depth
            line, ends = line[at + 3:], ""
        match = next((found for found in _TOML_STRING.finditer(line) if found[0] in ('"""', "'''")), None)
        before = _TOML_STRING.sub("", line[:match.start()] if match else line)
        depth += sum(before.count(one) for one in "[{") - sum(before.count(one) for one in "]}")
        if not match:
            return "", depth
        line, ends = line[match.end():], match[0]


def _read_python(source: Source) -> Any:
    """Runs the file. Its `__name__` is "shoal_job", so code under `if __name__ == "__main__"` does not run."""
    source.path.read_bytes()  # raises the usual errors if the file is missing
    sys.path.insert(0, str(source.folder))
    try:
        names = runpy.run_path(str(source.path), run_name="shoal_job")
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(source.path)]
        line = f"line {at[-1]}: " if at else ""
        _fail(source, f"{line}{type(error).__name__}: {error}")
    finally:
        sys.path.remove(str(source.folder))
    return _data_of_python(names, source)


def _data_of_python(names: Dict[str, Any], source: Source) -> Any:
    """Returns `job`, else the only estimator, with `inputs` as the argument of its fit()."""
    found = [names["job"]] if "job" in names else [one for name, one in names.items() if callable(getattr(one, "as_job", None))
                                                   and not isinstance(one, type)]
    if len(found) != 1:
        _fail(source, ("has several estimators; call one of them `job`" if found else
                       "has neither `job = Job(...)` nor an estimator at the top level"))
    job = found[0]
    if callable(getattr(job, "as_job", None)):
        job = job.as_job(names.get("inputs"))
    if isinstance(job, Job):
        return as_data(job)
    if isinstance(job, dict):
        return job
    _fail(source, f"is a {type(job).__name__}, and a Job, an estimator or a dict is needed", ("job",))
