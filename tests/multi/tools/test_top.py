#!/usr/bin/env python3
"""`shoal top`: what it reports about live jobs, which processes it accepts as a job, what it refuses."""
import fcntl
import json
import os
import pathlib
import pty
import re
import signal
import struct
import subprocess
import tempfile
import termios
import time

from tap import Skip, call, expect, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
PROBE = os.environ["SHOAL_TOP_PROBE"]
PATIENCE_S = 30  # for events that take moments, on a busy machine


class Job:
    """`shoal run` of the probe. The end of the with statement ends it and waits for it."""

    def __init__(self, mode, ranks=2, program=(PROBE,), **env):
        self.run = subprocess.Popen([SHOAL, "run", "-n", str(ranks), *program, mode], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                    stdin=subprocess.DEVNULL, text=True, env={**os.environ, **env})
        self.pids = {}
        self.before = ""
        while len(self.pids) < ranks:
            line = self.run.stdout.readline()
            expect(line, "the job ended early", self.pids)
            match = re.fullmatch(r"(\d+)\| ready (\d+)\n", line)
            if match:
                self.pids[int(match.group(1))] = int(match.group(2))
            else:
                self.before += line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.pids.values():
            os.kill(pid, signal.SIGCONT)
        self.run.terminate()
        self.run.communicate(timeout=30)

    def look(self, *words):
        """Returns the processes by world rank, and the whole object."""
        code, out, err = call(SHOAL, "top", "--once", "--format", "json", *words)
        expect(code == 0 and err == "", code, out, err)
        look = json.loads(out)
        mine = {p["world_rank"]: p for p in look["processes"] if p["pid"] in self.pids.values()}
        return mine, look

    def look_until(self, is_right, *words):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            mine, look = self.look(*words)
            if is_right(mine, look):
                return mine, look
            time.sleep(0.05)
        raise AssertionError(look)


def world(process):
    (comm,) = (comm for comm in process["communicators"] if comm["name"] == "world")
    return comm


def a_rank_that_others_wait_for_is_named():
    with Job("late", 3) as job:
        pid = job.pids[1]
        mine, look = job.look_until(lambda mine, look: all(world(mine[r])["waits_for"] == [1] and world(mine[r])["waits_us"] > 1e6
                                                           for r in (0, 2)), str(pid))
        expect(sorted(mine) == [0, 1, 2] and len(look["processes"]) == 3, look)
        for rank in (0, 2):
            comm = world(mine[rank])
            expect(comm["operation"] == "all-reduce 1000 float32 sum" and comm["sequence"] == comm["called"] == 101, comm)
            expect(comm["under_way"] == 1 and comm["arrived_us"] is None and comm["posted_us"] >= comm["waits_us"] - 1, comm)
            expect(comm["operations"] == 100 and comm["bytes"] == 100 * 4096 and comm["status"] == "SHOAL_OK", comm)
        comm = world(mine[1])
        expect((comm["under_way"], comm["called"], comm["operation"], comm["waits_for"]) == (0, 100, None, []), comm)
        expect(comm["idle_us"] > 1e6 and mine[1]["state"] == "sleeping" and mine[1]["memory_bytes"] > 1 << 20, mine[1])
        expect(look["held_up_by"]["pid"] == pid and look["held_up_by"]["held"] == 2, look["held_up_by"])
        _, out, _ = call(SHOAL, "top", "--once", pid)
        expect("rejected" not in out and all(p["rejected"] == 0 for p in mine.values()), out, mine)
        expect("threads" not in out and all(p["threads"] == 1 for p in mine.values()), out, mine)
        expect("; waits for rank 1 for " in out and "  in no call for " in out and f"py-spy dump --pid {pid}, or gdb -p {pid}" in out, out)


def a_training_tells_its_noise_scale():
    with Job("training") as job:
        mine, look = job.look(str(job.pids[0]))
        for process in mine.values():
            comm = world(process)
            expect((comm["batch"], comm["noise_scale"], comm["noise_error"]) == (300, 1000, 52.5), comm)
        _, table, _ = call(SHOAL, "top", "--once", job.pids[0])
        expect(table.count("your global batch is 0.3 times the noise scale (1000 samples, error 52): doubling it should cost 23 % more samples "
                           "and save 38 % of the steps") == 1, table)
        _, counters, _ = call(SHOAL, "top", "--format", "prometheus", job.pids[0])
        expect(len(re.findall(r"^shoal_noise_scale_samples\{.*\} 1000$", counters, re.M)) == 2, counters)
        expect(len(re.findall(r"^shoal_batch_samples\{.*\} 300$", counters, re.M)) == 2, counters)
    with Job("late") as job:
        mine, look = job.look(str(job.pids[0]))
        expect(all(world(process)[name] is None for process in mine.values() for name in ("batch", "noise_scale", "noise_error")), look)
        expect("noise" not in call(SHOAL, "top", "--once", job.pids[0])[1], look)


def threads_of_a_rank_are_shown():
    with Job("late", 2, SHOAL_THREADS="3", SHOAL_LOG_FILE="/dev/null") as job:
        pid = str(job.pids[0])
        mine, _ = job.look_until(lambda mine, look: all(mine[rank]["threads"] == 3 for rank in (0, 1)), pid)
        expect(sorted(mine) == [0, 1], mine)
        _, out, _ = call(SHOAL, "top", "--once", pid)
        expect(out.count("; 3 threads") == 2, out)


def threads_at_the_network_are_shown():
    with Job("busy", program=("sh", "-c", 'SHOAL_NETWORK_THREADS=3 SHOAL_HOST_ID=host-$RANK exec "$0" "$1"', PROBE)) as job:
        pid = str(job.pids[0])
        mine, _ = job.look_until(lambda mine, look: all(process["network_threads"] == 3 for process in mine.values()), pid)
        _, out, _ = call(SHOAL, "top", "--once", pid)
        expect(out.count("; 3 threads at the network") == len(mine), out)


def ranks_that_have_just_begun_to_wait_are_told_by_the_numbers():
    """Within the half second in which no rank reports whom it waits for."""
    with Job("late", 3) as job:
        job.look_until(lambda mine, look: world(mine[0])["waits_for"] == world(mine[2])["waits_for"] == [1], str(job.pids[0]),
                       "--interval", "0.01")


def a_stopped_process_is_told_and_how_it_goes_on():
    with Job("late") as job:
        os.kill(job.pids[1], signal.SIGSTOP)
        mine, look = job.look_until(lambda mine, look: mine[1]["state"] == "stopped" and world(mine[0])["waits_us"] is not None and
                                    world(mine[0])["waits_us"] > 1.1e6, str(job.pids[1]))
        code, out, err = call(SHOAL, "top", "--once", str(job.pids[0]))
        expect(code == 0 and f"a signal has stopped it; kill -CONT {job.pids[1]} continues it" in out, out, err)


def rates_and_lateness_are_told():
    def is_busy(mine, look):
        return all(world(process)["operations"] > 100 and world(process)["operations_per_s"] > 5 for process in mine.values())

    with Job("busy") as job:
        mine, look = job.look_until(is_busy, str(job.pids[0]), "--interval", "0.5")
        for process in mine.values():
            comm = world(process)
            expect(abs(comm["bytes_per_s"] - 262144 * comm["operations_per_s"]) < 2 * 262144, comm)
        late, early = world(mine[1]), world(mine[0])
        expect(late["came_last"] > early["came_last"] and late["late_us"] / late["came_last"] > 1000, late, early)
        expect(look["interval_s"] >= 0.5, look["interval_s"])
        expect(early["waited_us"] > 1000 * late["came_last"] and early["waited_us"] > late["waited_us"] > 0, late, early)
        expect(early["sent_bytes"] == late["sent_bytes"] == 0, late, early)
        job.look_until(lambda again, _: world(again[0])["operations"] > early["operations"], str(job.pids[0]))


def bytes_on_the_network_are_told():
    """Two ranks of one machine that act as separate hosts."""
    with Job("busy", program=("sh", "-c", 'SHOAL_HOST_ID=host-$RANK exec "$0" "$1"', PROBE)) as job:
        mine, _ = job.look_until(lambda mine, look: all(world(mine[rank])["operations"] > 150 for rank in (0, 1)), str(job.run.pid))
        for process in mine.values():
            comm = world(process)
            expect(0.5 < comm["sent_bytes"] / comm["bytes"] < 2, comm)  # each sends half of a vector twice


def a_receive_waits_for_its_peer():
    with Job("receive") as job:
        mine, _ = job.look_until(lambda mine, look: world(mine[0])["under_way"] == 1, str(job.pids[0]))
        comm = world(mine[0])
        expect(comm["operation"] == "receive 77 float32 from 1" and comm["waits_for"] == [1], comm)


def track(process):
    (comm,) = (comm for comm in process["communicators"] if comm["is_track"])
    return comm


def a_rank_of_a_pipeline_is_in_an_action():
    """Rank 0 is stopped in its second forward pass, so rank 1 waits for it, and rank 2 for rank 1."""
    with subprocess.Popen([SHOAL, "bench", "pipeline", "-n", "3", "--schedule", "gpipe", "--microbatches", "4", "--forward", "2s"],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        job = Job.__new__(Job)
        stopped = None
        try:
            def is_begun(mine, look):
                job.pids = {p["world_rank"]: p["pid"] for p in look["processes"]}
                return len(look["processes"]) == 3 and all(any(c["is_track"] and c["under_way"] for c in p["communicators"])
                                                           for p in look["processes"])
            wait_for(lambda: call(SHOAL, "top", "--once", bench.pid)[0] == 0)
            job.pids = {}
            job.look_until(is_begun, str(bench.pid))
            stopped = job.pids[0]
            os.kill(stopped, signal.SIGSTOP)
            mine, look = job.look_until(lambda mine, _: all(track(mine[r])["waits_for"] == [r - 1] for r in (1, 2)), str(bench.pid))
            for rank in (1, 2):
                comm = track(mine[rank])
                expect(comm["name"] == "pipeline actions" and comm["operation"].startswith(f"forward of stage {rank}, microbatch "), comm)
                expect((comm["stage"], comm["waits_for_stage"], comm["arrived_us"]) == (rank, rank - 1, None), comm)
            expect(track(mine[0])["waits_for"] == [] and track(mine[0])["arrived_us"] is not None, track(mine[0]))
            job.look_until(lambda _, look: look["held_up_by"] and look["held_up_by"]["pid"] == stopped and
                           look["held_up_by"]["held"] == 2, str(bench.pid))
            _, out, _ = call(SHOAL, "top", "--once", bench.pid)
            expect(re.search(r"waits for stage 0 \(rank 0\): forward of stage 1, microbatch \d, step 1 of pipeline actions, for ", out) and
                   re.search(r"computes forward of stage 0, microbatch \d, step 1 of pipeline actions, for ", out), out)
            lines = [json.loads(line) for line in call(SHOAL, "top", "--dump", bench.pid)[1].splitlines()]
            (action,) = [line for line in lines if line["rank"] == 2 and line["comm"] == "pipeline actions" and not line["done_ticks"]]
            expect((action["kind"], action["count"], action["peer"], action["step"]) == ("forward", 2, 1, 1), action)
        finally:
            if stopped:
                os.kill(stopped, signal.SIGCONT)
            bench.terminate()
            bench.wait(PATIENCE_S)


def a_job_is_found_by_any_of_its_processes_and_by_its_number():
    with Job("late") as job, Job("late") as other:
        number = job.look(str(job.pids[0]))[1]["processes"][0]["job"]
        another = other.look(str(other.pids[0]))[1]["processes"][0]["job"]
        for words in ([str(job.run.pid)], [str(job.pids[1])], [number], [number[:9]]):
            _, look = job.look(*words)
            expect(sorted(p["pid"] for p in look["processes"]) == sorted(job.pids.values()), words, look)
        for words in ([f"{number},{another}"], [f"{number[:9]},{another[:9]}"], [str(os.getpid())]):
            _, look = job.look(*words)
            expect(sorted(p["pid"] for p in look["processes"]) == sorted([*job.pids.values(), *other.pids.values()]), words, look)
        _, look = job.look()
        pids = {p["pid"] for p in look["processes"]}
        expect(pids >= set(job.pids.values()) | set(other.pids.values()), pids)
        _, out, _ = call(SHOAL, "top", "--once")
        expect(out.count(f"job {number}: 2 processes on ") == 1, out)


def process_groups_are_of_one_job():
    """Each is a world of its own; all are shown as one job, whichever was made last."""
    with Job("groups", 4) as job:
        mine, look = job.look(str(job.run.pid))
        expect(sorted(mine) == [0, 1, 2, 3] and len({p["job"] for p in look["processes"]}) == 1, look)
        jobs = {c["job"] for p in mine.values() for c in p["communicators"] if "job" in c}
        expect(len(jobs) <= 1, jobs)
        _, out, _ = call(SHOAL, "top", "--once", str(job.pids[2]))
        expect(f"job {mine[0]['job']}: 4 processes on " in out and "of a world of 4 ranks" in out and out.count("job ") == 1, out)


def children_with_a_ranks_descriptors_are_no_ranks():
    with Job("fork") as job:
        _, look = job.look(str(job.run.pid))
        expect(sorted(p["pid"] for p in look["processes"]) == sorted(job.pids.values()), look)


def counters_are_as_prometheus_reads_them():
    with Job("late") as job:
        job.look_until(lambda mine, _: world(mine[0])["waits_us"] is not None, str(job.pids[0]))
        code, out, err = call(SHOAL, "top", "--format", "prometheus", job.run.pid)
        expect(code == 0 and err == "", code, err)
        number = r'\{shoal_job="[0-9a-f]{16}",host="[^"]+",pid="\d+",world_rank="(\d)"'
        sums = re.findall(r"^shoal_operations_total" + number + r',comm="world",comm_id="[0-9a-f]{16}",rank="\d"\} (\d+)$', out, re.M)
        expect(sorted(sums) == [("0", "100"), ("1", "100")], sums, out)
        for line in out.splitlines():
            expect(re.fullmatch(r"# (HELP|TYPE) shoal_\w+ .+|shoal_\w+\{.*\} [-+.e0-9]+", line), line)
        expect(len(re.findall(r"^shoal_resident_bytes" + number + r"\} \d+$", out, re.M)) == 2, out)
        expect(re.search(r'^shoal_waiting_seconds.*world_rank="0".*\} 0\.\d+|^shoal_waiting_seconds.*world_rank="0".*\} [1-9]', out, re.M), out)


def a_dump_is_what_trace_reads():
    with Job("late", 3) as job:
        job.look_until(lambda mine, look: all(world(mine[r])["called"] == 101 for r in (0, 2)), str(job.pids[0]))
        os.kill(job.pids[2], signal.SIGSTOP)  # it cannot help
        code, lines, err = call(SHOAL, "top", "--dump", job.pids[0])
        expect(code == 0 and err == "", code, err)
        records = [json.loads(line) for line in lines.splitlines()]
        expect(len(records) == 302 and {r["pid"] for r in records} == set(job.pids.values()), len(records), records[:1])
        expect(all(r["algorithm"] == "direct" for r in records if r["done_ticks"]), records[:1])
        expect(sorted(r["rank"] for r in records if r["status"] == "SHOAL_PENDING") == [0, 2], "who is under way")
        done = subprocess.run([SHOAL, "trace", "--json", "-o", "/dev/null", "-"], input=lines, capture_output=True, text=True)
        sums = json.loads(done.stdout)
        expect(sums["records"] == 302 and sums["failed"][0]["ranks_without_record"] == [1], done)


def the_table_is_repeated_until_the_job_ends():
    with Job("busy") as job:
        top = subprocess.Popen([SHOAL, "top", "--interval", "0.05", str(job.run.pid)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, tables = "", 0
        while tables < 2:
            line = top.stdout.readline()
            expect(line, "it ended while the job lived", out)
            tables += line.startswith("job ")
            out += line
        job.run.terminate()
        job.run.wait(timeout=30)
        job.pids = {}
        rest, err = top.communicate(timeout=30)
        out += rest
        expect(top.returncode == 0, top.returncode, out)
        expect("\033" not in out and err.startswith("shoal top: no process that may be looked at belongs to a job "), out, err)


def screen_of(job, rows, columns):
    """Returns the lines of the second look on a terminal of that size."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    top = subprocess.Popen([SHOAL, "top", "--interval", "0.05", str(job.run.pid)], stdin=subprocess.DEVNULL, stdout=theirs)
    os.close(theirs)
    shown = b""
    while shown.count(b"\033[H\033[2J") < 3:
        shown += os.read(mine, 4096)
    top.kill()
    top.wait()
    os.close(mine)
    page = shown.split(b"\033[H\033[2J")[1].decode().split("\r\n")
    expect(page[0].startswith("job ") and len(page) <= rows and page[-1] == "" and max(map(len, page)) <= columns, page)
    return page


def a_terminal_gets_what_it_has_room_for():
    """On a narrow one each rank has two lines, and the rank that it waits for is on the screen."""
    with Job("late", 4) as job:
        page = screen_of(job, 6, 50)
        expect(len(page) == 6 and page[3].split()[0] == "0", page)
        for _ in range(100):
            page = screen_of(job, 24, 80)
            if any(re.match(r"        waits for rank 1 for ", line) for line in page):
                break
        else:
            raise AssertionError("\n".join(page))
        expect([line.split()[0] for line in page[3:11:2]] == ["0", "1", "2", "3"], page)
        wide = screen_of(job, 24, 200)
        expect(wide[1].split()[-1] == "doing" and [line.split()[0] for line in wide[2:6]] == ["0", "1", "2", "3"], wide)


def refused(*words, about, code=1, before=()):
    got, out, err = call(*before, SHOAL, "top", "--once", *words)
    expect((got, out) == (code, "") and err.startswith("shoal top: ") and err.count("\n") == 1 and about in err, got, out, err)


def what_is_no_job_is_refused():
    refused("4194305", about="there is no process 4194305 on this host")
    refused(os.getpid(), about=f"process {os.getpid()} has no communicator of Shoal, nor has a process that it has started")
    refused("0123456789abcdef", about="belongs to a job 0123456789abcdef")
    refused("train.py", code=2, about="'train.py' is neither the number of a process nor that of a job")
    refused("1", "2", code=2, about="one PID or JOB, not also '2'")
    refused("--format", "xml", code=2, about="--format takes table, json, prometheus or lines, not 'xml'")
    refused("--interval", "0", code=2, about="0.01 or more")


def another_version_is_told():
    fd = os.memfd_create("shoal-flight")
    os.write(fd, struct.pack("<QIIIIIi16s64s", 0x544C464C414F4853, 99, 1, 1, 1, 0, os.getpid(), b"9.9.9", b"node") + bytes(1 << 20))
    try:
        refused(os.getpid(), about=f"process {os.getpid()} runs Shoal 9.9.9, whose flight recorder has another layout")
    finally:
        os.close(fd)


def recorders_of_a_rank():
    """Returns the bytes of a rank's recorders, as if they belonged to this process."""
    with Job("late") as job:
        (name,) = [f for f in os.listdir(f"/proc/{job.pids[0]}/fd")
                   if os.readlink(f"/proc/{job.pids[0]}/fd/{f}").startswith("/memfd:shoal-flight")]
        with open(f"/proc/{job.pids[0]}/fd/{name}", "rb") as file:
            good = bytearray(file.read())
    struct.pack_into("<i", good, 28, os.getpid())
    return good


def garbage_harms_nobody():
    """A root user who runs the command reads data that other users wrote."""
    good = recorders_of_a_rank()
    for step in range(1, 40):
        bad = bytearray(good)
        for at in range(52 + step, len(bad), 31 * step):  # everything after the version
            bad[at] = (bad[at] * 7 + at + step) & 255
        fd = os.memfd_create("shoal-flight")
        os.write(fd, bad if step % 2 else bad[:step * 1000])
        for words in (["--once"], ["--once", "--format", "json"], ["--dump"]):
            done = subprocess.run([SHOAL, "top", *words, str(os.getpid())], capture_output=True)
            expect(done.returncode in (0, 1), step, words, done)
        os.close(fd)


def a_rank_that_is_none_is_not_told():
    """A caller of shoal_watch may use a rank as an index."""
    good = recorders_of_a_rank()
    expect(struct.unpack_from("<iii", good, 160) == (0, 2, 0), struct.unpack_from("<iii", good, 160))
    struct.pack_into("<Q", good, 6800, 7)
    for ranks in ((0, 2, 0), (2, 2, 0), (-1, 2, 0), (0, 0, 0), (0, -5, 0), (0, 1 << 30, 0), (0, 2, 1 << 30), (0, 2, -2)):
        struct.pack_into("<iii", good, 160, *ranks)
        fd = os.memfd_create("shoal-flight")
        os.write(fd, good)
        code, out, err = call(SHOAL, "top", "--once", "--format", "json", os.getpid())
        table, counters = (call(SHOAL, "top", "--once", *words, os.getpid())[1] for words in ((), ("--format", "prometheus")))
        info = call(SHOAL, "info", "--jobs")
        os.close(fd)
        row = [line for line in info[1].splitlines() if line.split()[2:3] == [str(os.getpid())]]
        expect(info[0] == 0 and len(row) == (ranks == (0, 2, 0)) and all(line.endswith(" 7") for line in row), ranks, *info)
        expect((code == 0) == ("; 7 messages rejected\n" in table) == bool(re.search(r"^shoal_rejected_messages_total\{.*\} 7$", counters, re.M)),
               table, counters)
        if ranks == (0, 2, 0):
            expect(code == 0 and json.loads(out)["processes"][0]["communicators"][0]["operations"] in (100, 101), out, err)
            expect(json.loads(out)["processes"][0]["rejected"] == 7, out)
        else:
            expect(code == 1 and out == "" and err.startswith("shoal top: "), ranks, out, err)


def a_process_of_another_user_is_told():
    if os.getuid() != 0:
        raise Skip("only root can become another user")
    probe = call("setpriv", "--reuid", "65534", "--clear-groups", SHOAL, "--version")
    if probe[0] != 0:
        raise Skip("another user cannot run the command here")
    with Job("late") as job:
        refused(job.pids[0], about=f"process {job.pids[0]} cannot be read: Permission denied",
                before=("setpriv", "--reuid", "65534", "--clear-groups"))


def fail(folder, **more):
    """Runs a job that fails; returns its output and the files that it leaves."""
    env = {**os.environ, "TMPDIR": folder, **more}
    code, out, err = call(SHOAL, "run", "-n", "3", PROBE, "mismatch", env=env)
    expect(code == 3, code, out, err)
    kept = os.path.join(folder, f"shoal-{os.geteuid()}")
    return err.split("shoal run: rank ")[0], sorted(os.listdir(kept)) if os.path.exists(kept) else None, kept


def a_failure_keeps_the_recorders_and_one_rank_says_where():
    with tempfile.TemporaryDirectory(prefix="shoal-top-") as folder:
        told, files, kept = fail(folder)
        said = re.findall(r"\[engine\] flight recorder: `shoal trace (\S+)` shows what the ranks of this host did; docs/errors.md", told)
        expect(len(said) == 1 and told.count("flight recorder") == 1, told)
        expect([re.fullmatch(r"flight-[0-9a-f]{16}-r(\d)-\d+", name).group(1) for name in files] == ["0", "1", "2"], files)
        expect(all(os.stat(os.path.join(kept, name)).st_mode & 0o777 == 0o600 for name in files), files)
        code, out, err = call("sh", "-c", f"{SHOAL} trace -o /dev/null {said[0]}")
        expect(code == 0 and "SHOAL_ERR_MISMATCH on rank" in out and "3 ranks on 1 machine" in out, out, err)


def recorders_go_where_the_setting_says():
    with tempfile.TemporaryDirectory(prefix="shoal-top-") as folder:
        told, files, _ = fail(folder, SHOAL_TRACE_FILE="no")
        expect(files is None and "flight recorder" not in told, told, files)
        told, files, _ = fail(folder, SHOAL_TRACE_FILE=f"{folder}/flight.%r")
        expect(files is None and sorted(os.listdir(folder)) == ["flight.0", "flight.1", "flight.2"], files)
        expect(told.count(f"flight recorder: {folder}/flight.0; `shoal trace`, with the files of all ranks") == 1, told)
        told, files, _ = fail(f"{folder}/flight.0")
        expect(told.count("cannot write the flight recorder to ") == 3 and "Not a directory; set SHOAL_TRACE_FILE to another" in told, told)


VIA = """#!/bin/sh
# A host: its own name in what it tells, which is of the ranks whose digits follow in its name. Those of d... wait for rank 3.
host=$1
shift
case $host in
gone) echo "no route to host" >&2; exit 255;;
slow) exec sleep 60;;
junk) echo '{"pid":1}'; echo '{"pid":'; echo hello; exit 0;;
empty) echo "shoal top: no process that may be looked at has a communicator of Shoal" >&2; exit 1;;
esac
case $host in d*) waits='s/"waits_for":1,/"waits_for":3,/';; esac
sh -c "$*" | sed "$waits" | sed "s/\\"host\\":\\"[^\\"]*\\"/\\"host\\":\\"$host\\"/" | grep -E "\\"world_rank\\":[${host#?}]"
"""


def hosts_are_asked_and_told_together():
    with tempfile.TemporaryDirectory(prefix="shoal-top-") as folder, Job("late", 4) as job:
        via, hosts = os.path.join(folder, "via"), os.path.join(folder, "hosts")
        with open(via, "w", encoding="ascii") as file:
            file.write(VIA)
        os.chmod(via, 0o755)

        def ask(names, *words):
            with open(hosts, "w", encoding="ascii") as file:
                file.write("".join(name + "\n" for name in names))
            return call(SHOAL, "top", "--hosts", hosts, "--via", via, "--once", *words)
        job.look_until(lambda mine, look: all(world(mine[r])["waits_for"] == [1] and world(mine[r])["waits_us"] > 1.2e6 for r in (0, 2, 3)),
                       str(job.run.pid))
        code, out, err = ask(["n02", "n13", "empty"], "--format", "json", job.run.pid)
        look = json.loads(out)
        expect(code == 0 and err == "" and look["note"] is None, out, err)
        expect([(p["world_rank"], p["host"], p["pid"]) for p in look["processes"]] ==
               [(r, "n02" if r in (0, 2) else "n13", job.pids[r]) for r in range(4)], look)
        expect([world(p)["waits_for"] for p in look["processes"]] == [[1], [], [1], [1]], look)
        expect(look["held_up_by"]["pid"] == job.pids[1] and look["held_up_by"]["held"] == 3, look)
        number = look["processes"][0]["job"]
        again = json.loads(ask(["n02", "m02", "n13"], "--format", "json", number)[1])  # a machine by two of its names
        expect([(p["host"], p["pid"]) for p in again["processes"]] == [(p["host"], p["pid"]) for p in look["processes"]], again)
        expect(again["held_up_by"]["held"] == 3, again)
        code, out, err = ask(["n02", "n13"], number[:8])
        expect(code == 0 and f"job {number}: 4 processes on 2 hosts, of a world of 4 ranks\n" in out, out, err)
        expect(f"rank 1 (process {job.pids[1]} on n13, sleeping) holds up 3 ranks" in out, out)
        code, out, err = ask(["d02", "d13"], "--format", "json", number)
        look = json.loads(out)
        expect([(world(p)["waits_for"], world(p)["waits_for_device"]) for p in look["processes"]] ==
               [([3], False), ([], False), ([3], False), ([3], True)] and look["held_up_by"]["pid"] == job.pids[3], look)
        code, out, err = ask(["d02", "d13"], number)
        expect("; waits for its own device for " in out and out.count("; waits for rank 3 for ") == 2, out)
        expect(re.search(r"\nrank 3 .* holds up 2 ranks for .*: its own operand is not ready on its device\n", out), out)
        code, out, err = ask(["n02", "gone", "junk"], number)
        expect(code == 0 and "\nhost gone gave no answer: exit code 255: no route to host\n" in out and "2 processes on n02" in out, out, err)
        code, out, err = ask(["slow"], "--timeout", "0.5", number)
        expect((code, out, err) == (1, "", "shoal top: host slow gave no answer: no end within 0.5 s (--timeout)\n"), code, out, err)
        code, out, err = ask(["empty"], number)
        expect((code, out, err) == (1, "", f"shoal top: no host has a process of job {number} that may be looked at\n"), code, out, err)
        refused("--via", "ssh", about="--via is for other hosts: also set --hosts FILE", code=2)
        refused("--hosts", hosts, "--dump", about="--dump and --hosts cannot be combined", code=2)


def wait_for(is_right):
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if is_right():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


if __name__ == "__main__":
    run_cases([threads_of_a_rank_are_shown, threads_at_the_network_are_shown, a_rank_that_others_wait_for_is_named, a_training_tells_its_noise_scale, ranks_that_have_just_begun_to_wait_are_told_by_the_numbers,
               a_stopped_process_is_told_and_how_it_goes_on, rates_and_lateness_are_told, bytes_on_the_network_are_told,
               a_receive_waits_for_its_peer, a_rank_of_a_pipeline_is_in_an_action,
               a_job_is_found_by_any_of_its_processes_and_by_its_number, process_groups_are_of_one_job,
               children_with_a_ranks_descriptors_are_no_ranks,
               counters_are_as_prometheus_reads_them, a_dump_is_what_trace_reads, hosts_are_asked_and_told_together,
               the_table_is_repeated_until_the_job_ends, a_terminal_gets_what_it_has_room_for,
               a_failure_keeps_the_recorders_and_one_rank_says_where,
               recorders_go_where_the_setting_says, a_rank_that_is_none_is_not_told, what_is_no_job_is_refused, another_version_is_told, garbage_harms_nobody, a_process_of_another_user_is_told])
