#!/usr/bin/env python3
"""A job watched while it runs: the server's answers, the page in a browser, the table in a terminal."""
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import platform
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import folders  # noqa: E402
from folders import BEGAN, TOP, expect  # noqa: E402
from shoal.job.watching import report, watch  # noqa: E402
from shoal.job.watching.metrics import Reader  # noqa: E402
from tap import run_cases  # noqa: E402

PATIENCE_S = 60  # for events that normally take moments


@contextlib.contextmanager
def served(folder):
    server = watch.Server(watch.View(folder), 0)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def ask(server, path, token=None, **headers):
    """Returns status, type and body. Uses the server's token unless another one is passed."""
    path += f"?token={server.token if token is None else token}"
    connection = http.client.HTTPConnection(*server.server_address, timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read().decode()
    finally:
        connection.close()


def end(folder, name="Completed"):
    status = folder.status()
    status.status, status.ended, status.exit_code = name, BEGAN + 70, 0
    folder.status_write(status)


class Events:
    """A browser's side of server-sent events."""

    def __init__(self, server):
        self.connection = http.client.HTTPConnection(*server.server_address, timeout=PATIENCE_S)
        self.connection.request("GET", f"/events?token={server.token}")
        self.answer = self.connection.getresponse()
        expect(self.answer.getheader("Content-Type") == "text/event-stream; charset=utf-8" or
               self.answer.getheader("Content-Type") == "text/event-stream", self.answer.getheaders())

    def next(self):
        """Returns (event, data), or None at the end of the stream."""
        name, data = "message", None
        while True:
            line = self.answer.readline().decode()
            if not line:
                return None
            if line == "\n" and data is not None:
                return name, data
            if line.startswith("event: "):
                name = line[7:].strip()
            if line.startswith("data: "):
                data = json.loads(line[6:])

    def until(self, section, what):
        """Returns the section's HTML once it contains this."""
        while True:
            event = self.next()
            expect(event, f"the stream ended before {what}")
            if event[1].get("id") == section and what in event[1]["html"]:
                return event[1]["html"]


def a_browser_is_told_what_changes():
    with folders.jobs() as place:
        folder = folders.job(place, status="Training", seconds=10)
        with served(folder) as server:
            code, kind, page = ask(server, "/")
            expect(code == 200 and kind == "text/html; charset=utf-8" and 'id="curves"' in page and "EventSource" in page, code, kind)
            events = Events(server)
            first = [events.next()[1]["id"] for _ in range(8)]
            expect(first == ["head", "losses", "ranks", "events", "logs", "curves", "timeline", "settings"], first)
            folders.numbers(folder, ["algo-1", "algo-2"], 2, 5, first=10)
            expect("14 s" in events.until("curves", "14 s"), "")
            with open(folder.log("algo-1"), "a") as log:
                log.write("0| a new line\n")
            events.until("logs", "a new line")
            end(folder)
            events.until("head", "Completed")
            while (event := events.next())[0] != "end":
                pass
            expect(events.next() is None, event)


def the_server_answers_this_machine_alone():
    with folders.jobs() as place:
        with served(folders.job(place, seconds=3, traced=False)) as server:
            expect(server.server_address[0] == "127.0.0.1", server.server_address)
            port = server.server_address[1]
            for host, code in ((f"127.0.0.1:{port}", 200), (f"localhost:{port}", 200), ("localhost", 200), (f"evil.example:{port}", 403), ("evil.example", 403),
                               (f"127.0.0.1.evil.example:{port}", 403)):
                for path in ("/", "/metrics", "/events"):
                    expect(ask(server, path, Host=host)[0] == code, host, path)
            expect(ask(server, "/nothing")[0] == 404 and ask(server, "/../../etc/passwd")[0] == 404, "a path")
            code, kind, text = ask(server, "/metrics")
            expect(code == 200 and kind.startswith("text/plain; version=0.0.4") and 'shoal_job_status{shoal_job="fashion",status="Completed"} 1' in text, kind, text)


def other_users_of_the_machine_see_no_log():
    """They can reach the port, but do not know the token. Metrics are public, because a scraper has no token."""
    with folders.jobs() as place:
        with served(folders.job(place, seconds=3, traced=False)) as server:
            for token in ("", "x", server.token[:-1]):
                for path in ("/", "/events"):
                    code, _, text = ask(server, path, token=token)
                    expect(code == 403 and "loss=" not in text and "with its token" in text, path, token, code, text)
            expect(ask(server, "/metrics", token="")[0] == 200 and ask(server, "/")[0] == 200, "")
            expect(server.url.endswith(f"/?token={server.token}") and len(server.token) >= 22, server.url)


def a_job_that_stands_still_looks_so():
    """Ranks 0 and 2 wait for rank 1, and rank 3 for rank 2."""
    with folders.jobs() as place:
        folder, now = folders.job(place, status="Training", seconds=3, traced=False), time.time()
        with open(folder.metrics, "a") as file:
            for rank, waits_for in ((0, [1]), (2, [1]), (3, [2])):
                line = json.loads(folders.record(0, f"algo-{rank // 2 + 1}", rank, "shoal/waiting_s", 338.0))
                file.write(json.dumps({**line, "time": now, "waits_for": waits_for}) + "\n")
        wanted = re.compile("rank 1 on algo-1 holds up 3 ranks for 5 min (3[89]|[45]\\d) s")  # it grows until the page is read
        with served(folder) as server:
            page, text = ask(server, "/")[2], ask(server, "/metrics")[2]
            expect(wanted.search(page) and "The job stands still" in page, page[-3000:])
            expect('shoal_job_waiting_seconds{shoal_job="fashion",host="algo-2",rank="3",waits_for="2"} 338.0' in text, text)
        reader = Reader(folder)
        reader.read()
        table = watch.table(folder.status(), reader, "http://x/", 200, 50)
        expect(re.search("the job stands still: " + wanted.pattern, table), table)
        expect(wanted.fullmatch(report.stall_of(folder, folder.status())), "the newest numbers alone")
        expect(reader.stall(now + 60) is None, "what was seen a minute ago holds no longer")
        status = folder.status()
        status.status = "Completed"
        expect(report.stall_of(folder, status) is None, "a job that has ended")


def a_page_of_many_ranks_takes_a_tenth_of_a_core():
    with folders.jobs() as place:
        view = watch.View(folders.job(place, status="Training", seconds=3, traced=False))
        made = []
        view._make = lambda make=view._make: (made.append(time.monotonic()), make())
        view.look()
        expect(view.due_at - made[0] >= watch.INTERVAL_S / 2, view.due_at - made[0])
        view.due_at = time.monotonic() + PATIENCE_S
        view.look()
        expect(len(made) == 1, "made again before it is due")
        slow, report.head = report.head, lambda *words: time.sleep(0.2) or slow(*words)
        try:
            view.due_at = 0
            view.look()
        finally:
            report.head = slow
        expect(view.due_at - made[-1] >= 1.9, view.due_at - made[-1])


def numbers_are_scraped_while_a_timeline_is_made():
    with folders.jobs() as place:
        with served(folders.job(place, status="Training", seconds=3, traced=False)) as server:
            begun, go, timeline = threading.Event(), threading.Event(), report.timeline
            report.timeline = lambda folder: begun.set() or str(go.wait(PATIENCE_S))
            try:
                page = threading.Thread(target=ask, args=(server, "/"))
                page.start()
                expect(begun.wait(PATIENCE_S) and ask(server, "/metrics")[0] == 200 and not go.is_set(), "")
            finally:
                go.set()
                page.join()
                report.timeline = timeline


def a_browser_that_goes_harms_nobody():
    with folders.jobs() as place:
        folder = folders.job(place, status="Training", seconds=3, traced=False)
        with served(folder) as server:
            for _ in range(5):
                events = Events(server)
                events.next()
                events.connection.sock.close() if events.connection.sock else events.answer.close()
            expect(ask(server, "/")[0] == 200, "")


def the_table_has_the_room_of_its_terminal():
    with folders.jobs() as place:
        folder = folders.job(place, status="Failed", failure="rank 3 died", seconds=20, traced=False)
        reader = Reader(folder)
        reader.read()
        wide = watch.table(folder.status(), reader, "http://x/", 200, 50)
        lines = wide.splitlines()
        expect(lines[0].startswith("fashion: Failed, 25 s; 2 hosts") and lines[1] == "failure: rank 3 died", wide)
        row = next(line for line in lines if line.startswith("    3 algo-2"))
        expect(row.split()[2:] == ["42", "354", "409", "MiB/s", "90.6", "MiB/s", "5", "%", "–", "–", "70", "%", "4.1", "ms", "0.983", "603", "MiB"], row)
        expect(lines[-1].startswith("metrics: train:loss 1.4"), lines[-1])
        narrow = watch.table(folder.status(), reader, "http://x/", 40, 5)
        expect(len(narrow.splitlines()) == 4 and max(map(len, narrow.splitlines())) <= 40, narrow)


def command(folder, *words, stdout=subprocess.PIPE):
    """Starts `shoal job watch` as a separate process."""
    code = "import pathlib, sys; from shoal.job.document import folder; from shoal.job.watching import watch; place = pathlib.Path(sys.argv[1]); " \
           "sys.exit(watch.main(folder.JobFolder(place.name, place.parent), *map(int, sys.argv[2:])))"
    return subprocess.Popen([sys.executable, "-c", code, folder.path, *map(str, words)], stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
                            text=True, env={**os.environ, "PYTHONPATH": str(TOP / "python")})


def the_command_ends_with_the_job():
    with folders.jobs() as place:
        for name, code in (("Completed", 0), ("Failed", 1), ("Stopped", 3)):
            folder = folders.job(place, name=name, status=name, seconds=3, traced=False)
            watching = command(folder)
            out, err = watching.communicate(timeout=PATIENCE_S)
            expect(watching.returncode == code and out.startswith(f"{name}: {name}") and "    3 algo-2" in out, watching.returncode, out, err)
            expect(re.match(rf"http://127.0.0.1:\d+/\?token=\S+ shows {name} in a browser", err), err)


def a_job_that_nobody_runs_any_more_ends_the_command():
    """The runner was killed, so the folder's status stays "Training" forever."""
    with folders.jobs() as place:
        folder = folders.job(place, status="Training", seconds=3, traced=False)
        gone = subprocess.Popen(["true"])
        gone.wait()
        process = folders.processes.identity(os.getpid()).replace(f" {os.getpid()} ", f" {gone.pid} ")
        folder.status_write(dataclasses.replace(folder.status(), machine=platform.node(), pid=gone.pid, process=process))
        out, err = command(folder).communicate(timeout=PATIENCE_S)
        expect(out.startswith("fashion: Failed") and f"the process that ran the job (pid {gone.pid}) is gone" in out, out, err)


def ctrl_c_ends_the_command_and_not_the_job():
    with folders.jobs() as place:
        folder = folders.job(place, status="Training", seconds=3, traced=False)
        main, other = pty.openpty()
        watching = command(folder, stdout=other)
        os.close(other)
        told, until = "", time.monotonic() + PATIENCE_S
        while told.count("fashion: Training") < 2 and time.monotonic() < until:  # the line is redrawn
            if select.select([main], [], [], 1)[0]:
                told += os.read(main, 65536).decode(errors="replace")  # a read may cut a character
        expect(told.count("\033[H\033[2J") >= 2 and told.count("fashion: Training") >= 2, told)
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=PATIENCE_S)
        os.close(main)
        expect(watching.returncode == 0 and "Traceback" not in err and folder.status().status == "Training", watching.returncode, err)


def a_port_in_use_is_told():
    with folders.jobs() as place:
        folder = folders.job(place, seconds=3, traced=False)
        with served(folder) as server:
            port = server.server_address[1]
            watching = command(folder, port)
            _, err = watching.communicate(timeout=PATIENCE_S)
            expect(watching.returncode == 2 and err.startswith(f"shoal job watch: cannot listen at port {port} of 127.0.0.1: Address already in use"), err)
            expect(len(err.splitlines()) == 1, err)
        watching = command(folder, 99999)
        _, err = watching.communicate(timeout=PATIENCE_S)
        expect(watching.returncode == 2 and "0 to 65535, not 99999" in err, err)


def a_real_browser_shows_changes():
    """Chromium loads the page and receives an event afterwards. Then the job ends, so that Chromium's virtual time ends."""
    folders.chromium()
    with folders.jobs() as place:
        folder = folders.job(place, status="Training", seconds=10)
        with served(folder) as server:
            asked = threading.Event()
            original = watch.Handler._events

            def events(handler):
                asked.set()
                original(handler)

            def change():
                asked.wait(PATIENCE_S)
                folders.numbers(folder, ["algo-1", "algo-2"], 2, 55, first=10)
                time.sleep(1.5 * watch.INTERVAL_S)
                end(folder)
            watch.Handler._events = events
            thread = threading.Thread(target=change)
            thread.start()
            try:
                out, err = folders.browse(server.url, "--dump-dom", f"--screenshot={place / 'live.png'}", "--window-size=800,1900", "--hide-scrollbars",
                                          "--virtual-time-budget=20000", "--timeout=90000")
            finally:
                watch.Handler._events = original
                asked.set()
                thread.join()
        expect("1 min 10 s" in out and "The job has ended." in out and "Completed" in out, out[:200], out[-600:], err)
        picture = folders.Picture(place / "live.png")
        expect((picture.width, picture.height) == (800, 1900), picture.width, picture.height)
        folders.expect_drawn(picture, (0x00, 0x72, 0xb2))
        green = [y for y in range(100) if folders.longest_run(picture.columns_of((0x1a, 0x7f, 0x37), y)) > 50]
        expect(green, "the frame of the word Completed, on top")


if __name__ == "__main__":
    run_cases([a_browser_is_told_what_changes, the_server_answers_this_machine_alone, a_browser_that_goes_harms_nobody,
               other_users_of_the_machine_see_no_log, a_job_that_stands_still_looks_so, a_page_of_many_ranks_takes_a_tenth_of_a_core,
               numbers_are_scraped_while_a_timeline_is_made,
               the_table_has_the_room_of_its_terminal, the_command_ends_with_the_job, a_job_that_nobody_runs_any_more_ends_the_command,
               ctrl_c_ends_the_command_and_not_the_job, a_port_in_use_is_told, a_real_browser_shows_changes])
