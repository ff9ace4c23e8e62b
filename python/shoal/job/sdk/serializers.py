"""Conversion of data to requests to an endpoint, and of answers to data. Names, defaults and content types are those of
sagemaker.serializers and sagemaker.deserializers. numpy, pandas and torch are imported only for data of their types."""
from __future__ import annotations

import csv
import io
import json
import os
from typing import Any, List, Optional, Tuple

EMPTY = "Cannot serialize empty array."


class BaseSerializer:
    """Has CONTENT_TYPE and serialize(data)."""

    CONTENT_TYPE = "application/octet-stream"

    def serialize(self, data: Any) -> Any:
        raise NotImplementedError


class SimpleBaseSerializer(BaseSerializer):
    """A serializer with a configurable content type."""

    CONTENT_TYPE = "application/json"

    def __init__(self, content_type: Optional[str] = None):
        self.content_type = type(self).CONTENT_TYPE if content_type is None else content_type
        if not isinstance(self.content_type, str):
            raise ValueError("content_type must be a string specifying the MIME type of the data sent in requests: "
                             f"e.g., 'application/json', 'text/csv', etc. Got {content_type}")
        self.CONTENT_TYPE = self.content_type


class IdentitySerializer(SimpleBaseSerializer):
    CONTENT_TYPE = "application/octet-stream"

    def serialize(self, data: Any) -> Any:
        return data


class StringSerializer(SimpleBaseSerializer):
    CONTENT_TYPE = "text/plain"

    def serialize(self, data: Any) -> bytes:
        if isinstance(data, str):
            return data.encode("utf-8")
        raise ValueError(f"Object of type {type(data)} is not String serializable.")


class DataSerializer(SimpleBaseSerializer):
    """Sends bytes, or the content of a file."""

    CONTENT_TYPE = "file-path/raw-bytes"

    def serialize(self, data: Any) -> bytes:
        if isinstance(data, bytes):
            return data
        if not isinstance(data, (str, os.PathLike)):
            raise ValueError(f"Object of type {type(data)} is not Data serializable.")
        try:
            with open(data, "rb") as file:
                return file.read()
        except OSError as error:
            raise ValueError(f"Could not open/read file: {data}. {error}") from None


class JSONSerializer(SimpleBaseSerializer):
    CONTENT_TYPE = "application/json"

    def serialize(self, data: Any) -> str:
        return data.read() if hasattr(data, "read") else json.dumps(_plain(data))


class JSONLinesSerializer(SimpleBaseSerializer):
    CONTENT_TYPE = "application/jsonlines"

    def serialize(self, data: Any) -> str:
        if isinstance(data, str):
            return data
        if not hasattr(data, "read") and not hasattr(data, "__iter__"):
            raise ValueError(f"Object of type {type(data)} is not JSON Lines serializable.")
        return data.read() if hasattr(data, "read") else "\n".join(json.dumps(one) for one in data)


class CSVSerializer(SimpleBaseSerializer):
    CONTENT_TYPE = "text/csv"

    def serialize(self, data: Any) -> str:
        if hasattr(data, "read"):
            return data.read()
        if isinstance(data, str):
            return data
        if not hasattr(data, "__len__"):
            raise ValueError(f"Unable to handle input format: {type(data)}")
        is_table = hasattr(data, "__setitem__") and len(data) > 0 and _is_row(data[0])
        return "\n".join(map(_csv_row, data)) if is_table else _csv_row(data)


class LibSVMSerializer(SimpleBaseSerializer):
    CONTENT_TYPE = "text/libsvm"

    def serialize(self, data: Any) -> str:
        if hasattr(data, "read"):
            return data.read()
        if isinstance(data, str):
            return data
        raise ValueError(f"Unable to handle input format: {type(data)}")


class NumpySerializer(SimpleBaseSerializer):
    """Sends anything that numpy can convert to an array, as an .npy file."""

    CONTENT_TYPE = "application/x-npy"

    def __init__(self, dtype: Any = None, content_type: Optional[str] = None):
        super().__init__(content_type)
        self.dtype = dtype

    def serialize(self, data: Any) -> bytes:
        if hasattr(data, "read"):
            return data.read()
        import numpy
        array = data if isinstance(data, numpy.ndarray) else numpy.array(data, self.dtype)
        if not array.size:
            raise ValueError(EMPTY)
        file = io.BytesIO()
        numpy.save(file, array)
        return file.getvalue()


class SparseMatrixSerializer(SimpleBaseSerializer):
    CONTENT_TYPE = "application/x-npz"

    def serialize(self, data: Any) -> bytes:
        import scipy.sparse
        file = io.BytesIO()
        scipy.sparse.save_npz(file, data)
        return file.getvalue()


class TorchTensorSerializer(SimpleBaseSerializer):
    CONTENT_TYPE = "tensor/pt"

    def serialize(self, data: Any) -> bytes:
        import torch
        if not isinstance(data, torch.Tensor):
            raise ValueError(f"Object of type {type(data)} is not a torch.Tensor")
        file = io.BytesIO()
        torch.save(data, file)
        return file.getvalue()


def _plain(data: Any) -> Any:
    """Converts arrays to lists, also arrays that are values of a table."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    return data.tolist() if hasattr(data, "tolist") else data


def _is_row(data: Any) -> bool:
    return hasattr(data, "__iter__") and hasattr(data, "__getitem__")


def _csv_row(row: Any) -> str:
    if isinstance(row, str):
        return row
    row = row.flatten() if hasattr(row, "flatten") else row
    if not hasattr(row, "__len__"):
        raise ValueError(f"Unable to handle input format: {type(row)}")
    if not len(row):
        raise ValueError("Cannot serialize empty array")
    file = io.StringIO()
    csv.writer(file).writerow(row)
    return file.getvalue().rstrip("\r\n")


# ------------------------------------------------------------ answers

class BaseDeserializer:
    """Has ACCEPT, the content types that it reads, and deserialize(stream, content_type), which closes the stream."""

    ACCEPT: Tuple[str, ...] = ("*/*",)

    def deserialize(self, stream: Any, content_type: str) -> Any:
        raise NotImplementedError


class SimpleBaseDeserializer(BaseDeserializer):
    """A deserializer with configurable content types."""

    def __init__(self, accept: Any = None):
        chosen = type(self).ACCEPT if accept is None else accept
        self.accept = chosen
        self.ACCEPT = (chosen,) if isinstance(chosen, str) else tuple(chosen)

    def deserialize(self, stream: Any, content_type: str) -> Any:
        with _closing(stream):
            return self._read(stream.read(), content_type)

    def _read(self, data: bytes, content_type: str) -> Any:
        raise NotImplementedError


class _closing:
    def __init__(self, stream: Any):
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *_: Any) -> None:
        self.stream.close()


class BytesDeserializer(SimpleBaseDeserializer):
    def _read(self, data: bytes, content_type: str) -> bytes:
        return data


class StringDeserializer(SimpleBaseDeserializer):
    ACCEPT = ("application/json",)

    def __init__(self, encoding: str = "UTF-8", accept: Any = None):
        super().__init__(accept)
        self.encoding = encoding

    def _read(self, data: bytes, content_type: str) -> str:
        return data.decode(self.encoding)


class CSVDeserializer(SimpleBaseDeserializer):
    ACCEPT = ("text/csv",)

    def __init__(self, encoding: str = "utf-8", accept: Any = None):
        super().__init__(accept)
        self.encoding = encoding

    def _read(self, data: bytes, content_type: str) -> List[List[str]]:
        return list(csv.reader(data.decode(self.encoding).splitlines()))


class StreamDeserializer(SimpleBaseDeserializer):
    """Returns the stream itself and its content type; the caller closes the stream."""

    def deserialize(self, stream: Any, content_type: str) -> Tuple[Any, str]:
        return stream, content_type


class NumpyDeserializer(SimpleBaseDeserializer):
    ACCEPT = ("application/x-npy",)

    def __init__(self, dtype: Any = None, accept: Any = None, allow_pickle: bool = False):
        super().__init__(accept)
        self.dtype = dtype
        self.allow_pickle = allow_pickle

    def _read(self, data: bytes, content_type: str) -> Any:
        import numpy
        if content_type == "text/csv":
            return numpy.genfromtxt(io.StringIO(data.decode("utf-8")), delimiter=",", dtype=self.dtype)
        if content_type == "application/json":
            return numpy.array(json.loads(data), dtype=self.dtype)
        if content_type == "application/x-npy":
            return numpy.load(io.BytesIO(data), allow_pickle=self.allow_pickle)
        if content_type == "application/x-npz":
            return numpy.load(io.BytesIO(data), allow_pickle=self.allow_pickle)
        raise ValueError(f"{type(self).__name__} cannot read content type {content_type}.")


class JSONDeserializer(SimpleBaseDeserializer):
    ACCEPT = ("application/json",)

    def _read(self, data: bytes, content_type: str) -> Any:
        return json.loads(data)


class JSONLinesDeserializer(SimpleBaseDeserializer):
    ACCEPT = ("application/jsonlines",)

    def _read(self, data: bytes, content_type: str) -> List[Any]:
        return [json.loads(line) for line in data.decode("utf-8").rstrip().split("\n")]


class PandasDeserializer(SimpleBaseDeserializer):
    ACCEPT = ("text/csv", "application/json")

    def _read(self, data: bytes, content_type: str) -> Any:
        import pandas
        if content_type == "text/csv":
            return pandas.read_csv(io.BytesIO(data))
        if content_type == "application/json":
            return pandas.read_json(io.BytesIO(data))
        raise ValueError(f"{type(self).__name__} cannot read content type {content_type}.")


class TorchTensorDeserializer(SimpleBaseDeserializer):
    ACCEPT = ("tensor/pt",)

    def _read(self, data: bytes, content_type: str) -> Any:
        import torch
        return torch.load(io.BytesIO(data), weights_only=True)
