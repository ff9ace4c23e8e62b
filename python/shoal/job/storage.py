"""Stores of objects, by URI: a local folder, S3 through s3fs, anything else that fsspec opens. channels.py, checkpoints.py and
serve.py see this interface and never a package behind it.

    store, key = store_open("s3://bucket/train")
    for item in store.list(key): store.read(item, 0, item.size, take)

An `Item` is an object as it was when it was listed. `read` gives the bytes of that version or raises ChangedError. Every method
raises StorageError, whose text is one line that says what failed and what to do. Objects may be used from several threads."""
from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
import shutil
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple
from urllib.parse import unquote, urlparse

CHUNK_BYTES = 1 << 20
PART_BYTES = 16 << 20  # of an object that is written
PUTS_AT_ONCE = 4
RETRIES = 5
CALL_TIMEOUT_S = 120.0


class StorageError(RuntimeError):
    """One line: what failed, where, what to do."""


class ChangedError(StorageError):
    """The object is no longer what it was when it was listed."""


class FullError(StorageError):
    """The local disk is full."""


@dataclasses.dataclass(frozen=True)
class Item:
    """An object, as it was when it was listed. `version` is what changes with its bytes, empty where the store has no such
    thing."""

    key: str
    size: int
    version: str = ""


Take = Callable[[bytes], None]


def local_path(uri: str) -> Optional[pathlib.Path]:
    """The path that a URI names on this machine; nothing for a place elsewhere."""
    if uri.startswith("file://"):
        return pathlib.Path(unquote(urlparse(uri).path))
    return None if "://" in uri else pathlib.Path(uri)


def store_open(uri: str) -> Tuple["Store", str]:
    """The store of a URI and the key in it."""
    path = local_path(uri)
    if path is not None:
        return LocalStore(), str(path.absolute()) + ("/" if uri.endswith("/") else "")
    scheme, rest = uri.split("://", 1)
    if scheme in ("s3", "s3a"):
        if not rest.split("/", 1)[0]:
            raise StorageError(f"{uri} names no bucket: write s3://BUCKET/PREFIX")
        return S3Store(), rest if "/" in rest else rest + "/"
    return FsspecStore(scheme), rest


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


class Store:
    """What all stores can do. A key is the URI without its scheme; a folder is a key that others begin with."""

    scheme = "file"
    has_ranges = True  # a part of an object costs no more than its own bytes

    def uri(self, key: str) -> str:
        return f"{self.scheme}://{key}"

    def list(self, prefix: str) -> List[Item]:
        """Objects whose key begins with the text `prefix`, sorted by key."""
        raise NotImplementedError

    def info(self, key: str) -> Optional[Item]:
        raise NotImplementedError

    def read(self, item: Item, start: int, end: int, take: Take) -> None:
        """Gives bytes [start, end) to `take`, in order, piece by piece."""
        raise NotImplementedError

    def put(self, path: pathlib.Path, key: str) -> Item:
        """The whole file or nothing comes to stand at `key`."""
        raise NotImplementedError

    def copy(self, source: str, key: str) -> Item:
        """Within the store, at once or not at all."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        """An object that is not there is no error."""
        raise NotImplementedError

    def read_all(self, item: Item) -> bytes:
        pieces: List[bytes] = []
        self.read(item, 0, item.size, pieces.append)
        return b"".join(pieces)

    def put_bytes(self, data: bytes, key: str) -> Item:
        with tempfile.TemporaryDirectory(prefix="shoal-put-") as folder:
            path = pathlib.Path(folder) / "data"
            path.write_bytes(data)
            return self.put(path, key)


# ---- this machine ----

class LocalStore(Store):
    """Files; a shared file system is one, too."""

    def uri(self, key: str) -> str:
        return key

    def list(self, prefix: str) -> List[Item]:
        with self._errors(prefix):
            top = pathlib.Path(prefix)
            if top.is_file():
                return [_file_item(top)]
            found = []
            for folder, folders, names in os.walk(top, followlinks=True, onerror=_raise):
                folders.sort()
                found += [path for path in (pathlib.Path(folder) / name for name in names) if path.is_file()]
            return [_file_item(path) for path in sorted(found)]

    def info(self, key: str) -> Optional[Item]:
        with self._errors(key):
            path = pathlib.Path(key)
            return _file_item(path) if path.is_file() else None

    def read(self, item: Item, start: int, end: int, take: Take) -> None:
        with self._errors(item.key), open(item.key, "rb") as file:
            file.seek(start)
            while start < end:
                data = file.read(min(CHUNK_BYTES, end - start))
                if not data:
                    break
                start += len(data)
                take(data)
        if start < end or self.info(item.key) != item:
            raise changed(self, item)

    def put(self, path: pathlib.Path, key: str) -> Item:
        def fill(temporary: str) -> None:
            with open(path, "rb") as source, open(temporary, "wb") as target:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
                target.flush()
                os.fsync(target.fileno())
        return self._replace(key, fill)

    def copy(self, source: str, key: str) -> Item:
        def fill(temporary: str) -> None:
            os.unlink(temporary)
            try:
                os.link(source, temporary)
            except OSError:
                shutil.copyfile(source, temporary)
        return self._replace(key, fill)

    def _replace(self, key: str, fill: Callable[[str], None]) -> Item:
        target = pathlib.Path(key)
        temporary = None
        try:
            with self._errors(key):
                target.parent.mkdir(parents=True, exist_ok=True)
                descriptor, temporary = tempfile.mkstemp(prefix=".shoal-", dir=target.parent)
                os.close(descriptor)
                fill(temporary)
                os.chmod(temporary, 0o644)
                os.replace(temporary, target)
                return _file_item(target)
        finally:  # it also stays where both are one file already
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def delete(self, key: str) -> None:
        with self._errors(key), contextlib.suppress(FileNotFoundError):
            os.unlink(key)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = FullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
            raise kind(f"{error.strerror or error}: {error.filename or key}") from error


def _raise(error: OSError) -> None:
    raise error


def _file_item(path: pathlib.Path) -> Item:
    status = path.stat()
    return Item(str(path), status.st_size, str(status.st_mtime_ns))


def changed(store: Store, item: Item) -> ChangedError:
    return ChangedError(f"{store.uri(item.key)} has changed since it was listed ({item.size:,} bytes then): "
                        "start again when nothing writes there")


# ---- elsewhere ----

class FsspecStore(Store):
    """What fsspec opens: gs, abfs, hdfs, http, memory, ... An object is read from its beginning; only S3 has ranges of one
    version."""

    has_ranges = False

    def __init__(self, scheme: str, **options: Any):
        self.scheme = scheme
        with self._errors(""):
            import fsspec
            self.fs = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)

    def _path(self, key: str) -> str:
        return f"{self.scheme}://{key}"

    def _item(self, key: str, info: Dict[str, Any]) -> Item:
        names = ("ETag", "etag", "md5Hash", "generation", "checksum", "LastModified", "last_modified", "mtime", "updated",
                 "created")
        name = next((name for name in names if info.get(name)), "")
        value = info.get(name, "")  # a time may come as a number or as a datetime
        return Item(key, int(info["size"] or 0), f"{name}={value.timestamp() if hasattr(value, 'timestamp') else value}")

    def list(self, prefix: str) -> List[Item]:
        with self._errors(prefix):
            self.fs.invalidate_cache()
            start = self.fs._strip_protocol(self._path(prefix))
            try:
                infos = self.fs.find(start, detail=True) if prefix.endswith("/") or not prefix else self._find_text(start)
            except FileNotFoundError:
                return []
            lead = len(start) - len(prefix.rstrip("/"))  # some file systems put a slash before their keys
            files = ((name[max(lead, 0):], info) for name, info in infos.items() if info.get("type") != "directory")
            return sorted((self._item(key, info) for key, info in files), key=lambda item: item.key)

    def _find_text(self, start: str) -> Dict[str, Dict[str, Any]]:
        parent = start.rsplit("/", 1)[0] if "/" in start else ""
        infos = self.fs.find(parent, detail=True)
        return {name: info for name, info in infos.items() if name.startswith(start)}

    def info(self, key: str) -> Optional[Item]:
        with self._errors(key):
            try:
                self.fs.invalidate_cache()
                info = self.fs.info(self._path(key))
            except FileNotFoundError:
                return None
            return None if info.get("type") == "directory" else self._item(key, info)

    def read(self, item: Item, start: int, end: int, take: Take) -> None:
        with self._errors(item.key, item), self.fs.open(self._path(item.key), "rb") as file:
            if start:
                file.seek(start)
            while start < end:
                data = file.read(min(CHUNK_BYTES, end - start))
                if not data:
                    break
                start += len(data)
                take(data)
        now = self.info(item.key)
        if start < end or now is None or (now.size, now.version) != (item.size, item.version):
            raise changed(self, item)

    def put(self, path: pathlib.Path, key: str) -> Item:
        with self._errors(key):
            parent = self._path(key).rsplit("/", 1)[0]
            self.fs.makedirs(parent, exist_ok=True)
            self.fs.put_file(str(path), self._path(key))
        return self._there(key)

    def copy(self, source: str, key: str) -> Item:
        with self._errors(key):
            self.fs.cp_file(self._path(source), self._path(key))
        return self._there(key)

    def _there(self, key: str) -> Item:
        item = self.info(key)
        if item is None:
            raise StorageError(f"{self.uri(key)} was written and is not there")
        return item

    def delete(self, key: str) -> None:
        with self._errors(key), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(key))

    @contextlib.contextmanager
    def _errors(self, key: str, item: Optional[Item] = None) -> Iterator[None]:
        """Errors of any package as one line. A StorageError, also one of `take`, goes through as it is."""
        try:
            yield
        except StorageError:
            raise
        except ImportError as error:
            raise StorageError(f"{self.scheme}:// needs a package that is not installed ({error}): "
                               "pip install 'shoal[job]'") from error
        except Exception as error:  # each package has its own
            if item and (isinstance(error, FileNotFoundError) or _code(error) in ("PreconditionFailed", "412")):
                raise changed(self, item) from error
            raise StorageError(f"{self.uri(key)}: {_reason(error)}") from error


class S3Store(FsspecStore):
    """S3 and what speaks its language. Keys are BUCKET/KEY. The endpoint is that of AWS_ENDPOINT_URL_S3; credentials are found
    as by the AWS command line. Listing and reading use S3's own calls: exact keys, and ranges of the version that was listed
    (If-Match)."""

    has_ranges = True

    def __init__(self) -> None:
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")
        endpoint = next((os.environ[name] for name in names if os.environ.get(name)), None)
        super().__init__("s3", endpoint_url=endpoint, config_kwargs={"max_pool_connections": 64})

    def _call(self, call: str, key: str, **arguments: Any) -> Dict[str, Any]:
        bucket, _, name = key.partition("/")
        named = {"Prefix": name} if call == "list_objects_v2" else {"Key": name}
        return self.fs.call_s3(call, Bucket=bucket, **named, **arguments)

    def list(self, prefix: str) -> List[Item]:
        bucket = prefix.split("/", 1)[0]
        found: List[Item] = []
        more: Dict[str, str] = {}
        with self._errors(prefix):
            while True:
                page = self._call("list_objects_v2", prefix, **more)
                found += [Item(f"{bucket}/{entry['Key']}", entry["Size"], entry["ETag"]) for entry in page.get("Contents", [])]
                if not page.get("IsTruncated"):
                    return sorted(found, key=lambda item: item.key.encode())
                more = {"ContinuationToken": page["NextContinuationToken"]}

    def info(self, key: str) -> Optional[Item]:
        with self._errors(key):
            try:
                head = self._call("head_object", key)
            except FileNotFoundError:
                return None
            return Item(key, head["ContentLength"], head["ETag"])

    def read(self, item: Item, start: int, end: int, take: Take) -> None:
        with self._errors(item.key, item):
            failed = 0
            while start < end:
                start, trouble = self._read_some(item, start, end, take)
                failed = failed + 1 if trouble else 0
                if trouble and failed > RETRIES:
                    raise trouble
                if trouble:
                    time.sleep(0.1 * 2 ** failed)

    def _read_some(self, item: Item, start: int, end: int, take: Take) -> Tuple[int, Optional[Exception]]:
        """Until the end, or until the connection breaks. Returns how far it came, and what broke it."""
        from fsspec.asyn import sync
        from s3fs.core import S3_RETRYABLE_ERRORS
        answer = self._call("get_object", item.key, Range=f"bytes={start}-{end - 1}", IfMatch=item.version)
        body = answer["Body"]
        try:
            if answer.get("ETag") != item.version:
                raise changed(self, item)
            while start < end:
                data = sync(self.fs.loop, body.read, min(CHUNK_BYTES, end - start), timeout=CALL_TIMEOUT_S)
                if not data:
                    return start, EOFError()
                start += len(data)
                take(data)
        except S3_RETRYABLE_ERRORS as error:
            return start, error
        finally:
            body.close()
        return start, None

    def put(self, path: pathlib.Path, key: str) -> Item:
        with self._errors(key):
            self.fs.put_file(str(path), self._path(key), chunksize=PART_BYTES, max_concurrency=PUTS_AT_ONCE)
        return self._there(key)

    def delete(self, key: str) -> None:
        with self._errors(key):
            self._call("delete_object", key)


def _code(error: BaseException) -> str:
    """S3's own name of an error, also where s3fs has translated it."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


CREDENTIALS = ("no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the "
               "machine a role; FSSPEC_S3_ANON=true for a public bucket")


def _reason(error: BaseException) -> str:
    kind, code = type(error).__name__, _code(error)
    if kind in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return CREDENTIALS
    if code == "NoSuchBucket":
        return "there is no such bucket"
    if isinstance(error, PermissionError):
        return f"access is denied ({code or error}): check the credentials and what they may do"
    if kind in ("EOFError", "ClientPayloadError", "IncompleteReadError", "ResponseStreamingError"):
        return "the connection ended early, again and again"
    unreached = ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError")
    if kind in unreached or isinstance(error, ConnectionError):
        return f"the store cannot be reached: {error}"
    if isinstance(error, FileNotFoundError):
        return "nothing is there"
    return f"{kind}: {' '.join(str(error).split())}"
