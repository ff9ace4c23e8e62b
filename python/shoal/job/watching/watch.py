"""A running job: a page in the browser on this machine, and a table in the terminal.

    GET /?token=T        the page of report.py, with a script that replaces its sections as they change
    GET /events?token=T  server-sent events: {"id": section, "html": ...}; "end" once the job has ended
    GET /metrics         the newest numbers, in the format that Prometheus scrapes

The server listens only on 127.0.0.1. It answers only requests that name this machine, so that a foreign page cannot read it
through a name of its own. Other users of this machine do not have the token, so they see no log and no settings. The server
only reads the job's folder, as `shoal job status` does: any number of servers may be started and ended at any time."""
from __future__ import annotations

import hmac
import http.server
import json
import math
import os
import secrets
import shutil
import signal
import sys
import threading
import time
import urllib.parse
from typing import Any, Dict, TextIO, Tuple

from shoal.job import engines, processes
from shoal.job.document.folder import ENDED, JobFolder, Status
from shoal.job.watching import losses, report
from shoal.job.watching.metrics import SHOAL_METRICS, Reader, prometheus_text

INTERVAL_S = 1.0
TRACE_EVERY_S = 30.0  # interval of redrawing the timeline, for which `shoal trace` must run
KEEP_ALIVE_S = 10.0
EXIT_OF = {"Completed": 0, "Failed": 1, "Stopped": 3}
EXIT_USAGE = 2

SCRIPT = """<p class="soft" id="live">Live.</p>
<script>
const live = document.getElementById("live");
const source = new EventSource("/events" + location.search);
source.onmessage = event => {
  const {id, html} = JSON.parse(event.data);
  const old = document.getElementById(id);
  // A log begins at its end, so scrollTop is 0 there and negative above. Who has scrolled up stays at the same lines.
  const tops = [...old.querySelectorAll("pre")].map(pre => pre.scrollTop < -4 ? pre.scrollHeight + pre.scrollTop : 0);
  old.innerHTML = html;
  old.querySelectorAll("pre").forEach((pre, at) => { pre.scrollTop = tops[at] ? tops[at] - pre.scrollHeight : 0; });
  live.textContent = "Live; last change " + new Date().toLocaleTimeString() + ".";
};
source.addEventListener("end", () => { source.close(); live.textContent = "The job has ended."; });
source.onerror = () => { live.textContent = "No connection: is shoal job watch still running?"; };
</script>
"""


# ---- the page ----

class View:
    """The sections of the page, made once for all browsers. Any thread may use it."""

    def __init__(self, folder: JobFolder):
        self.folder, self.reader = folder, Reader(folder)
        self.making = threading.Lock()  # held while a page is made, which may take as long as `shoal trace`
        self.lock = threading.Lock()  # protects the reader
        self.due_at = self.traced_at = -math.inf
        self.trace = ""
        self.sections: Dict[str, str] = {}
        self.has_ended = False

    def look(self) -> Tuple[Dict[str, str], bool]:
        """Returns the sections as they are now, and whether they are final."""
        with self.making:
            if time.monotonic() >= self.due_at and not self.has_ended:
                self._make()
            return dict(self.sections), self.has_ended

    def _make(self) -> None:
        """Makes the page. More ranks take longer, so the next page is made at the earliest after nine times this duration."""
        has_ended = engines.job_status(self.folder).status in ENDED  # first: all written before it is read below
        if has_ended or time.monotonic() - self.traced_at >= TRACE_EVERY_S:
            self.trace, self.traced_at = report.timeline(self.folder), time.monotonic()
        began = time.monotonic()
        with self.lock:
            self.reader.read()
            self.sections = dict(report.sections(self.folder, self.reader, self.trace))
        now = time.monotonic()
        self.due_at, self.has_ended = now + max(INTERVAL_S / 2, 9 * (now - began)), has_ended

    def prometheus(self) -> str:
        with self.lock:
            self.reader.read()
            return prometheus_text(self.folder, self.reader)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False  # with reuse, the server could share a port that another server listens on

    def __init__(self, view: View, port: int):
        self.view, self.is_stopping = view, threading.Event()
        self.token = secrets.token_urlsafe(16)
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        """Returns the address for a browser. Anyone who has it can read the job's log and settings."""
        return f"http://127.0.0.1:{self.server_address[1]}/?token={self.token}"

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="shoal-watch", daemon=True).start()

    def stop(self) -> None:
        self.is_stopping.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):  # a browser may disconnect at any time
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # of a client that sends nothing

    def do_GET(self) -> None:
        pages = {"/": self._page, "/events": self._events, "/metrics": self._metrics}
        path, _, query = self.path.partition("?")
        page = pages.get(path)
        if not processes.asks_this_machine(self.headers.get("Host")):
            self._answer(403, "text/plain", "this server answers only requests to localhost\n")
        elif page is None:
            self._answer(404, "text/plain", "there are /, /events and /metrics\n")
        elif path != "/metrics" and not self._is_known(query):
            self._answer(403, "text/plain", "open the whole address that `shoal job watch` printed, with its token\n")
        else:
            page()

    def _is_known(self, query: str) -> bool:
        token = urllib.parse.parse_qs(query).get("token", [""])[0]
        return hmac.compare_digest(token.encode(), self.server.token.encode())

    def _answer(self, code: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(data)

    def _page(self) -> None:
        sections, _ = self.server.view.look()
        self._answer(200, "text/html", report.page(f"{self.server.view.folder.name}: live", list(sections.items()), SCRIPT))

    def _metrics(self) -> None:
        self._answer(200, "text/plain; version=0.0.4", self.server.view.prometheus())

    def _events(self) -> None:
        """Sends events until the job has ended, or the browser has disconnected."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        shown: Dict[str, str] = {}
        told_at = time.monotonic()
        while not self.server.is_stopping.is_set():
            sections, has_ended = self.server.view.look()
            changed = {name: html for name, html in sections.items() if shown.get(name) != html}
            for name, html in changed.items():
                self._send("data: " + json.dumps({"id": name, "html": html}))
            if has_ended:
                self._send("event: end\ndata: {}")
                return
            if changed:
                shown, told_at = sections, time.monotonic()
            elif time.monotonic() - told_at > KEEP_ALIVE_S:
                self._send(": still here")
                told_at = time.monotonic()
            self.server.is_stopping.wait(INTERVAL_S)

    def _send(self, lines: str) -> None:
        self.wfile.write((lines + "\n\n").encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


# ---- the terminal ----

COLUMNS = (("steps/s", "shoal/steps_per_s"), ("ops/s", "shoal/operations_per_s"), ("bytes/s", "shoal/bytes_per_s"), ("network", "shoal/network_bytes_per_s"),
           ("exposed", "shoal/exposed"), ("input", "shoal/input"), ("waiting", "shoal/waiting_s"), ("last", "shoal/came_last"), ("late by", "shoal/late_s"), ("cores", "shoal/cpu"), ("memory", "shoal/memory_bytes"))
SHARES = ("shoal/exposed", "shoal/input", "shoal/came_last")


def table(status: Status, reader: Reader, url: str, columns: int, rows: int) -> str:
    """Returns the table, cut to the size of the terminal."""
    passed = f", {report.span_text((status.ended or time.time()) - status.started)}" if status.started else ""
    lines = [f"{status.name}: {status.status}{passed}; {len(status.hosts)} host{'s' if len(status.hosts) != 1 else ''}   {url}"]
    if status.failure_reason:
        lines.append(f"failure: {status.failure_reason}")
    stall = reader.stall(time.time()) if status.status not in ENDED else None
    if stall:
        lines.append(f"the job stands still: {report.stall_text(stall)}; `shoal top` on that host shows where it is")
    waits = losses.input_text(reader)
    if waits:
        lines.append(f"{waits}; `shoal doctor --data` measures the storage")
    lines += ["", f"{'rank':>5} {'host':12}" + "".join(f"{head:>12}" for head, _ in COLUMNS)]
    lines += [_row(rank) for rank in report.ranks_of(reader)]
    noise = reader.noise()
    if noise:
        lines += ["", noise]
    own = [name for name in reader.names() if name not in SHOAL_METRICS]
    if own:
        lines += ["", "metrics: " + ", ".join(f"{name} {_newest(reader, name)}" for name in own)]
    return "".join(line[:columns] + "\n" for line in lines[:max(rows - 1, 1)])


def _row(rank: "report.Rank") -> str:
    cells = []
    for _, name in COLUMNS:
        value = rank.last.get(name, math.nan)
        cells.append(f"{100 * value:.0f} %" if name in SHARES and math.isfinite(value) else report.number_text(value, SHOAL_METRICS[name][1].replace("1/s", "")))
    return f"{rank.rank:5} {rank.host:12.12}" + "".join(f"{cell:>12}" for cell in cells)


def _newest(reader: Reader, name: str) -> str:
    """Returns the newest value of any rank."""
    return report.number_text(max(series.last for series in reader.of(name).values())[1])


def show(view: View, url: str, out: TextIO, stop: threading.Event) -> Status:
    """Draws the table until the job has ended. Redraws it on a terminal; a file gets only the final table."""
    is_terminal, asker = out.isatty(), engines.Asker(view.folder)
    while True:
        status = asker.status()  # correct even if no process is left to write it
        with view.lock:
            view.reader.read()
            size = shutil.get_terminal_size() if is_terminal else os.terminal_size((200, 10000))
            drawn = table(status, view.reader, url, size.columns, size.lines)
        has_ended = status.status in ENDED
        if is_terminal:
            out.write("\033[H\033[2J" + drawn)
        elif has_ended or stop.is_set():
            out.write(drawn)
        out.flush()
        if has_ended or stop.wait(INTERVAL_S):
            return status


def main(folder: JobFolder, port: int = 0) -> int:
    """Shows the job until it has ended or Ctrl-C. Returns the job's exit code, or 0 while it runs. Shows an ended job once."""
    view = View(folder)
    try:
        server = Server(view, port)
    except OSError as error:
        print(f"shoal job watch: cannot listen at port {port} of 127.0.0.1: {error.strerror}: name another --port, or none to have one chosen", file=sys.stderr)
        return EXIT_USAGE
    except OverflowError:
        print(f"shoal job watch: --port takes a number from 0 to 65535, not {port}", file=sys.stderr)
        return EXIT_USAGE
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    server.start()
    print(f"{server.url} shows {folder.name} in a browser on this machine; Ctrl-C ends this, not the job", file=sys.stderr, flush=True)
    try:
        status = show(view, server.url, sys.stdout, stop)
        if status.status in ENDED:
            _last_look(server, stop)
        return EXIT_OF.get(status.status, 0)
    finally:
        server.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_look(server: Server, stop: threading.Event) -> None:
    """Waits so that browsers get the end of the job before the server stops."""
    stop.wait(2 * INTERVAL_S)
