"""Stores of objects, by URI: folders of this machine, S3 through boto3, and HTTP(S), which is read-only. channels.py,
checkpoints.py and serve.py use this interface and never the packages behind it.

    store, key = store_open("s3://bucket/train")
    for item in store.list(key): store.read(item, 0, item.size, take)

An `Item` is an object as it was when it was listed. `read` returns the bytes of that version or raises ChangedError. Every
method raises StorageError; its message is one line: what failed and what to do. Several threads may use a store."""
from __future__ import annotations

import contextlib
import errno
import html.parser
import os
import pathlib
import shutil
import stat
import threading
import time
import urllib.error
import urllib.request
import uuid
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, TypeVar
from urllib.parse import quote, unquote, urljoin

from shoal.job.document import local_path

CHUNK_BYTES = 1 << 20
PART_BYTES = 16 << 20  # larger objects are written in parts
PARTS_MAX = 10_000  # of one object: a limit of S3
COPY_BYTES = 512 << 20  # larger objects are copied within S3 in parts
PUTS_AT_ONCE = 4
ASKS_AT_ONCE = 16
RETRIES = 5
CALL_TIMEOUT_S = 120.0
SWAP_STALE_S = 30.0  # a writer that has not replaced a file within this time has been killed
FOLDERS_DEEP = 32  # most levels of folders below a page of links

One = TypeVar("One")


class StorageError(RuntimeError):
    """The message is one line: what failed, where, what to do."""


class ChangedError(StorageError):
    """The object has changed since it was listed."""


class FullError(StorageError):
    """The local disk is full."""


class Stopped(BaseException):
    """Another thread has failed, or the caller has been interrupted."""


class Item(NamedTuple):
    """An object, as it was when it was listed. `version` changes with its bytes; it is empty if the store has no versions."""

    key: str
    size: int
    version: str = ""


Take = Callable[[bytes], None]


def store_open(uri: str) -> Tuple["Store", str]:
    """Returns the store of a URI and the key in it."""
    path = local_path(uri)
    if path is not None:
        return LocalStore(), str(path.absolute()) + ("/" if uri.endswith("/") else "")
    scheme, rest = uri.split("://", 1)
    if scheme in ("s3", "s3a"):
        if not rest.split("/", 1)[0]:
            raise StorageError(f"{uri} names no bucket: write s3://BUCKET/PREFIX")
        return S3Store(), rest if "/" in rest else rest + "/"
    if scheme not in ("http", "https"):
        raise StorageError(f"{uri}: {scheme}:// is not served, only s3://, http://, https://, file:// and paths: copy the data to one of "
                           "these, or set AWS_ENDPOINT_URL_S3 if that store speaks S3's language")
    if "?" in rest or "#" in rest:
        raise StorageError(f"{uri}: a query is not served: write the address of a file, or of a folder with / at its end")
    return HttpStore(scheme), unquote(rest if "/" in rest else rest + "/")


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def at_once(wanted: Iterable[One], work: Callable[[One], object], count: int, stop: threading.Event,
            look: Callable[[], object] = lambda: None) -> None:
    """Calls `work` with each of `wanted` in `count` threads, and `look` meanwhile. Returns when all are done; raises the first
    failure. In any case it sets `stop` at the end; `work` should then raise Stopped. The threads are daemons, so an interrupted
    process does not wait for the network."""
    queue, lock = iter(wanted), threading.Lock()
    failures: List[BaseException] = []

    def run() -> None:
        try:
            while not stop.is_set():
                with lock:
                    one = next(queue, queue)
                if one is queue:
                    return
                work(one)  # type: ignore[arg-type]
        except Stopped as error:
            failures.append(error)
        except BaseException as error:
            failures.insert(0, error)
            stop.set()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.05)
                look()
    finally:
        stop.set()
    if failures:
        raise failures[0]


class Store:
    """The operations of all stores. A key is the URI without its scheme; a folder is a key with which other keys begin."""

    scheme = "file"
    has_ranges = True  # true if reading a part of an object transfers only that part

    def uri(self, key: str) -> str:
        return f"{self.scheme}://{key}"

    def list(self, prefix: str) -> List[Item]:
        """Returns the objects whose key begins with the text `prefix`, sorted by key."""
        raise NotImplementedError

    def info(self, key: str) -> Optional[Item]:
        raise NotImplementedError

    def read(self, item: Item, start: int, end: int, take: Take) -> None:
        """Passes bytes [start, end) to `take`, in order, piece by piece."""
        raise NotImplementedError

    def put(self, path: pathlib.Path, key: str) -> Item:
        """Stores the whole file at `key`, or nothing."""
        raise self._is_read_only(key)

    def copy(self, source: str, key: str) -> Item:
        """Copies within the store, whole or not at all."""
        raise self._is_read_only(key)

    def delete(self, key: str) -> None:
        """Deletes an object. A missing one is not an error."""
        raise self._is_read_only(key)

    def swap(self, data: bytes, key: str, before: Optional[Item]) -> Item:
        """Stores `data` at `key` if the object there is still `before` (None: no object). Otherwise raises ChangedError."""
        raise self._is_read_only(key)

    def is_below(self, top: str, key: str) -> bool:
        """Returns true if no link on the way to the object leads out of `top`."""
        return True

    def read_all(self, item: Item) -> bytes:
        pieces: List[bytes] = []
        self.read(item, 0, item.size, pieces.append)
        return b"".join(pieces)

    def changed(self, item: Item) -> ChangedError:
        return ChangedError(f"{self.uri(item.key)} has changed since it was listed ({item.size:,} bytes then): "
                            "start again when nothing writes there")

    def _is_read_only(self, key: str) -> StorageError:
        return StorageError(f"{self.uri(key)}: nothing can be written there: name a folder, or s3://BUCKET/PREFIX")


# ---- this machine ----

class LocalStore(Store):
    """Files of this machine, or of a shared file system."""

    def uri(self, key: str) -> str:
        return key

    def list(self, prefix: str) -> List[Item]:
        with self._errors(prefix):
            top = pathlib.Path(prefix)
            if top.is_file():
                return [_file_item(top)]
            found = []
            for folder, folders, names in os.walk(top, followlinks=True, onerror=_raise) if top.exists() else ():
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
            raise self.changed(item)

    def is_below(self, top: str, key: str) -> bool:
        whole = os.path.realpath(top)
        return os.path.commonpath([whole, os.path.realpath(os.path.dirname(key))]) == whole

    def put(self, path: pathlib.Path, key: str) -> Item:
        """Stores the file with its mode."""
        with self._coming(key) as coming:
            with open(path, "rb") as source, open(coming, "xb") as target:
                os.fchmod(target.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o777)
                shutil.copyfileobj(source, target, CHUNK_BYTES)
            return _file_place(coming, key)

    def copy(self, source: str, key: str) -> Item:
        with self._coming(key) as coming:
            try:
                os.link(source, coming)
            except OSError:
                shutil.copy2(source, coming)
            return _file_place(coming, key)

    def delete(self, key: str) -> None:
        with self._errors(key), contextlib.suppress(FileNotFoundError):
            os.unlink(key)

    def swap(self, data: bytes, key: str, before: Optional[Item]) -> Item:
        """Replaces an object. A writer first takes the name KEY.next, which only one can have; that file then becomes KEY."""
        following = key + ".next"
        with self._coming(key) as clock:
            try:
                descriptor = _name_take(following, clock)
            except FileExistsError:
                raise ChangedError(f"{key} is being replaced by another writer") from None
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                if _file_present(key) != before:
                    raise self.changed(before or Item(key, 0))
                if before and os.stat(following).st_mtime_ns <= int(before.version):  # within one tick of the file clock
                    os.utime(following, ns=(int(before.version) + 1,) * 2)
                return _file_place(following, key)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(following)
                raise

    @contextlib.contextmanager
    def _coming(self, key: str) -> Iterator[str]:
        """Yields a temporary name in the folder of `key`. Removes the file at the end."""
        target = pathlib.Path(key)
        coming = target.with_name(f".shoal-{uuid.uuid4().hex}")
        with self._errors(key):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                yield str(coming)
            finally:  # rename does nothing if both are one file already
                coming.unlink(missing_ok=True)

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


def _file_present(key: str) -> Optional[Item]:
    """Returns the file as it is on the file server: NFS may answer a stat() from its cache, but asks the server at open()."""
    try:
        with open(key, "rb") as file:
            status = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return Item(key, status.st_size, str(status.st_mtime_ns))


def _name_take(name: str, clock: str) -> int:
    """Makes a file that does not exist yet, and returns its descriptor. Needs no hard links, which some file systems lack. First
    removes a file whose writer was killed. `clock` is the name of a temporary file, which shows the file server's time."""
    pathlib.Path(clock).touch()
    with contextlib.suppress(FileNotFoundError):
        if os.stat(clock).st_mtime - os.stat(name).st_mtime > SWAP_STALE_S:
            os.unlink(name)
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def sync(path: Any) -> None:
    """Makes the content of a file, or the names in a folder, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_place(coming: str, key: str) -> Item:
    sync(coming)
    os.replace(coming, key)
    sync(os.path.dirname(key))
    return _file_item(pathlib.Path(key))


# ---- remote stores ----

class RemoteStore(Store):
    """A store behind a network. If a connection breaks, the missing bytes are requested again."""

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
        """Reads until the end, or until the connection breaks. Returns how far it came, and what broke it."""
        body = self._body(item, start, end)
        try:
            while start < end:
                data = body.read(min(CHUNK_BYTES, end - start))
                if not data:
                    return start, EOFError()
                start += len(data)
                take(data)
        except StorageError:
            raise
        except Exception as error:  # each library has its own exceptions
            return start, error
        finally:
            body.close()
        return start, None

    def _body(self, item: Item, start: int, end: int) -> Any:
        raise NotImplementedError

    @contextlib.contextmanager
    def _errors(self, key: str, item: Optional[Item] = None) -> Iterator[None]:
        """Turns errors of any package into a StorageError of one line. Passes on a StorageError, including one raised by
        `take`."""
        try:
            yield
        except StorageError:
            raise
        except ImportError as error:
            raise StorageError(f"{self.scheme}:// needs a package that is not installed ({error}): "
                               "pip install 'shoal[job]'") from error
        except Exception as error:  # each package has its own exceptions
            code, status = _code(error)
            if item and code != "NoSuchBucket" and status in (404, 409, 410, 412):
                raise self.changed(item) from error
            raise StorageError(f"{self.uri(key)}: {self._reason(error)}") from error

    def _reason(self, error: BaseException) -> str:
        kind, (code, status) = type(error).__name__, _code(error)
        if status in (401, 403):
            return f"access is denied ({code}): check the credentials and what they may do"
        if kind in ("EOFError", "IncompleteRead", "IncompleteReadError", "ResponseStreamingError"):
            return "the connection ended early, again and again"
        unreached = ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError", "ReadTimeoutError", "URLError")
        if kind in unreached or isinstance(error, (ConnectionError, TimeoutError)):
            return f"the store cannot be reached: {error}"
        return "nothing is there" if status == 404 else f"{kind}: {' '.join(str(error).split())}"


class S3Store(RemoteStore):
    """S3 and compatible stores. Keys are BUCKET/KEY. The endpoint is that of AWS_ENDPOINT_URL_S3. Credentials are found as by
    the AWS command line; without any, public buckets can be read. Parts are of the version that was listed (If-Match)."""

    scheme = "s3"

    def __init__(self) -> None:
        with self._errors(""):
            import boto3
            from botocore import UNSIGNED
            from botocore.config import Config
            session = boto3.session.Session()
            self.is_anonymous = session.get_credentials() is None
            more = {"signature_version": UNSIGNED} if self.is_anonymous else {}
            named = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
            self.client = session.client("s3", endpoint_url=None if named else os.environ.get("S3_ENDPOINT_URL"), config=Config(
                max_pool_connections=64, request_checksum_calculation="when_required", response_checksum_validation="when_required",
                **more))

    def _call(self, call: str, key: str, **arguments: Any) -> Dict[str, Any]:
        bucket, _, name = key.partition("/")
        return getattr(self.client, call)(Bucket=bucket, Key=name, **arguments)  # type: ignore[no-any-return]

    def list(self, prefix: str) -> List[Item]:
        bucket, _, name = prefix.partition("/")
        with self._errors(prefix):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=name)
            found = [Item(f"{bucket}/{entry['Key']}", entry["Size"], entry["ETag"]) for page in pages for entry in page.get("Contents", [])]
            return sorted(found, key=lambda item: item.key.encode())

    def info(self, key: str) -> Optional[Item]:
        with self._errors(key):
            try:
                head = self._call("head_object", key)
            except self.client.exceptions.ClientError as error:
                if _code(error)[1] == 404:
                    return None
                raise
            return Item(key, head["ContentLength"], head["ETag"])

    def _body(self, item: Item, start: int, end: int) -> Any:
        answer = self._call("get_object", item.key, Range=f"bytes={start}-{end - 1}", IfMatch=item.version)
        if answer.get("ETag") != item.version:
            raise self.changed(item)
        return answer["Body"]

    def put(self, path: pathlib.Path, key: str) -> Item:
        with self._errors(key), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= PART_BYTES:
                self._call("put_object", key, Body=file.read(size))
            else:
                self._in_parts(key, size, PART_BYTES, lambda start, end, part: self._call(
                    "upload_part", key, Body=os.pread(file.fileno(), end - start, start), **part)["ETag"])
        return self._there(key)

    def copy(self, source: str, key: str) -> Item:
        bucket, _, name = source.partition("/")
        whence = {"Bucket": bucket, "Key": name}
        size = self._there(source).size
        with self._errors(key):
            if size <= COPY_BYTES:
                self._call("copy_object", key, CopySource=whence)
            else:
                self._in_parts(key, size, COPY_BYTES, lambda start, end, part: self._call(
                    "upload_part_copy", key, CopySource=whence, CopySourceRange=f"bytes={start}-{end - 1}", **part)["CopyPartResult"]["ETag"])
        return self._there(key)

    def _in_parts(self, key: str, size: int, least: int, send: Callable[[int, int, Dict[str, Any]], str]) -> None:
        """Writes an object in parts. `send` writes bytes [start, end) as a part and returns its ETag."""
        upload = self._call("create_multipart_upload", key)["UploadId"]
        step = max(least, -(-size // PARTS_MAX))
        tags: Dict[int, str] = {}

        def part(start: int) -> None:
            number = start // step + 1
            tags[number] = send(start, min(start + step, size), {"PartNumber": number, "UploadId": upload})

        try:
            at_once(range(0, size, step), part, PUTS_AT_ONCE, threading.Event())
            parts = [{"PartNumber": number, "ETag": tags[number]} for number in sorted(tags)]
            self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            with contextlib.suppress(Exception):
                self._call("abort_multipart_upload", key, UploadId=upload)
            raise

    def _there(self, key: str) -> Item:
        item = self.info(key)
        if item is None:
            raise StorageError(f"{self.uri(key)} is not there, although it was written")
        return item

    def delete(self, key: str) -> None:
        with self._errors(key):
            self._call("delete_object", key)

    def swap(self, data: bytes, key: str, before: Optional[Item]) -> Item:
        condition = {"IfMatch": before.version} if before else {"IfNoneMatch": "*"}
        with self._errors(key, before or Item(key, 0)):
            try:
                answer = self._call("put_object", key, Body=data, **condition)
            except self.client.exceptions.ClientError as error:
                if _code(error)[1] != 501:
                    raise
                if self.info(key) != before:  # a store without conditional writes
                    raise self.changed(before or Item(key, 0)) from error
                answer = self._call("put_object", key, Body=data)
            return Item(key, len(data), answer["ETag"])

    def _reason(self, error: BaseException) -> str:
        code, status = _code(error)
        if code == "NoSuchBucket":
            return "there is no such bucket"
        if "Credential" in type(error).__name__ or self.is_anonymous and status in (401, 403):
            return ("no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a "
                    "role; only a public bucket needs none")
        return super()._reason(error)


class HttpStore(RemoteStore):
    """Files behind a web server. Keys are HOST/PATH without quoting. A folder is a page of links, as web servers make it."""

    has_ranges = False  # not all servers support ranges

    def __init__(self, scheme: str):
        self.scheme = scheme

    def _ask(self, key: str, method: str, start: int = 0) -> Any:
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
        request = urllib.request.Request(f"{self.scheme}://{quote(key, safe='/:@[]')}", headers=headers, method=method)
        return urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S)

    def list(self, prefix: str) -> List[Item]:
        item = None if prefix.endswith("/") else self.info(prefix)
        if item:
            return [item]
        keys = sorted(self._links(join(prefix, ""), FOLDERS_DEEP))
        found: Dict[str, Optional[Item]] = {}
        at_once(keys, lambda key: found.update({key: self.info(key)}), ASKS_AT_ONCE, threading.Event())
        gone = next((key for key in keys if not found[key]), None)
        if gone:
            raise StorageError(f"{self.uri(gone)}: the page of its folder has a link to it, and nothing is there")
        return [one for one in map(found.get, keys) if one]

    def _links(self, folder: str, depth: int) -> List[str]:
        """Returns the keys of files below a folder."""
        with self._errors(folder):
            try:
                with self._ask(folder, "GET") as answer:
                    page = _Links()
                    if answer.headers.get_content_type() == "text/html":
                        page.feed(answer.read().decode("utf-8", "replace"))
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return []
                raise
            if answer.headers.get_content_type() != "text/html" or not depth:
                raise StorageError(f"{self.uri(folder)} is not a page of links to files: name a file, or a folder that the server lists")
            top = f"{self.scheme}://{quote(folder, safe='/:@[]')}"
            urls = {urljoin(top, link.split("#")[0]) for link in page.found if "?" not in link}
            keys = {unquote(url.split("://", 1)[-1]) for url in urls if url.startswith(f"{self.scheme}://")}
            below = [key for key in keys if key.startswith(folder) and key != folder]
            deeper = [found for key in below if key.endswith("/") for found in self._links(key, depth - 1)]
            return [key for key in below if not key.endswith("/")] + deeper

    def info(self, key: str) -> Optional[Item]:
        with self._errors(key):
            try:
                with self._ask(key, "HEAD") as answer:
                    size = answer.headers.get("Content-Length")
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                raise
            if answer.url.endswith("/"):  # a folder's page
                return None
            if size is None:
                raise StorageError(f"{self.uri(key)}: the server does not say how many bytes it has")
            return Item(key, int(size), _http_version(answer))

    def _body(self, item: Item, start: int, end: int) -> Any:
        answer = self._ask(item.key, "GET", start)
        if _http_version(answer) != item.version:
            raise self.changed(item)
        while start and answer.status != 206:  # the server sends the whole file
            skipped = len(answer.read(min(CHUNK_BYTES, start)))
            if not skipped:
                raise self.changed(item)
            start -= skipped
        return answer


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: List[str] = []

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _http_version(answer: Any) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _code(error: BaseException) -> Tuple[str, int]:
    """Returns S3's own name of an error, and the HTTP status."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", "")), response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return (f"{error.code} {error.reason}", error.code) if isinstance(error, urllib.error.HTTPError) else ("", 0)
