"""S3 for tests: moto's server over HTTP, behind a proxy that counts requests and can delay answers."""
import contextlib
import logging
import os
import pathlib
import re
import socket
import tempfile
import threading
import time
import urllib.parse

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
               "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/nonexistent",
               "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
REQUEST = re.compile(rb"(?:^|\r\n)(GET|PUT|HEAD|POST|DELETE) (\S+) HTTP/1\.1\r\n")


class Proxy:
    """Forwards bytes. `requests` has (method, path) of each request."""

    def __init__(self, port):
        self.behind = port
        self.requests = []
        self.answer_bytes = 0  # sent to clients
        self.hold_after = None  # after this many bytes all further answers wait until this is None
        self.cut_after = None  # after this many bytes a connection is cut, `cuts` times in all
        self.cuts = 0
        self.may_cut = threading.Event()  # a cut waits for this event
        self.may_cut.set()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.behind))
                for side in (client, server):
                    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._forth, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _forth(self, client, server):
        with contextlib.suppress(OSError):
            while True:
                data = client.recv(1 << 16)
                for method, path in REQUEST.findall(data):
                    self.requests.append((method.decode(), urllib.parse.unquote(path.decode())))
                if not data:
                    break
                server.sendall(data)
        _shut(server)

    def _back(self, server, client):
        sent = 0
        with contextlib.suppress(OSError):
            while True:
                data = server.recv(1 << 16)
                if not data:
                    break
                if self.cut_after is not None and self.cuts > 0 and sent + len(data) > self.cut_after:
                    self.cuts -= 1
                    client.sendall(data[:self.cut_after - sent])
                    self.may_cut.wait(60)
                    break
                sent += len(data)
                while self.hold_after is not None and self.answer_bytes >= self.hold_after:
                    time.sleep(0.01)
                client.sendall(data)
                self.answer_bytes += len(data)
        _shut(client)
        _shut(server)

    def gets(self, text=""):
        """Returns the paths of GET requests for objects."""
        return [path for method, path in self.requests if method == "GET" and "list-type" not in path and text in path]

    def forget(self):
        self.requests.clear()
        self.answer_bytes = 0


def _shut(side):
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)


class S3:
    """A server with one bucket, `data`."""

    def __init__(self):
        os.environ.update(CREDENTIALS, MOTO_S3_DEFAULT_MAX_KEYS="7")  # so that listings have several pages
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        import boto3
        from moto.server import ThreadedMotoServer
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        port = self.server.get_host_and_port()[1]
        self.proxy = Proxy(port)
        os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{self.proxy.port}"
        self.client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        self.client.create_bucket(Bucket="data")

    def put(self, key, body=None):
        body = key.encode() * 3 if body is None else body
        self.client.put_object(Bucket="data", Key=key, Body=body)
        return body

    def listed(self, prefix):
        """Returns the objects below a prefix as {key: bytes}, from boto3's list_objects_v2."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="data", Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {key: self.client.get_object(Bucket="data", Key=key)["Body"].read() for key in keys}


def files_below(folder):
    """Returns the files below a folder as {name: bytes}."""
    folder = pathlib.Path(folder)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Said(list):
    """Collects lines of output."""

    def __call__(self, text):
        self.append(text)


@contextlib.contextmanager
def job_folder(hosts=1):
    """Makes a job's folder and the channel folders of its hosts."""
    with tempfile.TemporaryDirectory(prefix="shoal-test-job-") as name:
        top = pathlib.Path(name) / "jobs/one"
        for host in range(hosts):
            (top / f"hosts/algo-{host + 1}/input/data").mkdir(parents=True)
        (top / "job.json").write_text("{}")
        yield top


def channel_folder(job, host=0, name="training"):
    return job / f"hosts/algo-{host + 1}/input/data/{name}"


def message(function, *arguments, **more):
    """Returns the text, one line, of the StorageError (or other RuntimeError) that a call raises."""
    try:
        function(*arguments, **more)
    except RuntimeError as error:
        if "\n" in str(error):
            raise AssertionError(f"more than a line: {error}") from error
        return str(error)
    raise AssertionError("no error came")


def wait_for(condition, what, deadline_s=120, every_s=0.02):
    until = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"{what}: not within {deadline_s} s")
        time.sleep(every_s)
