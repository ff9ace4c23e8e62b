"""Ranks for tests of shoal.tensorflow, forked from the test program after it has imported TensorFlow, because importing
takes seconds. Neither TensorFlow nor Shoal may have run before the fork."""
import os
import pathlib
import secrets
import signal
import sys
import tempfile
import time
import traceback

from tap import free_port

TOP = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 330  # of a job; long, because other work shares the machine


def become(rank, size, port, job, body, log):
    """Runs a rank in this process until its end."""
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), SHOAL_JOB_ID=job)
        body(rank)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Ranks:
    """Runs a job. Holds the exit code and the output of each rank."""

    def __init__(self, size, body, timeout_s=TIMEOUT_S):
        port, job = free_port(), secrets.token_hex(8)
        sys.stdout.flush()
        with tempfile.TemporaryDirectory(prefix="shoal-tensorflow-") as folder:
            logs = [pathlib.Path(folder, f"rank{rank}") for rank in range(size)]
            self.pids = []
            for rank in range(size):
                self.pids.append(os.fork())
                if self.pids[-1] == 0:
                    become(rank, size, port, job, body, logs[rank])
            self.codes = self._wait(time.monotonic() + timeout_s)
            self.texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]

    def _wait(self, deadline):
        codes = {}
        while len(codes) < len(self.pids):
            for rank, pid in enumerate(self.pids):
                if rank in codes:
                    continue
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[rank] = "no end in time"
            time.sleep(0.01)
        return [codes[rank] for rank in range(len(self.pids))]

    def told(self):
        return "\n".join(f"rank {rank} ended with {code}:\n{text[-4000:]}"
                         for rank, (code, text) in enumerate(zip(self.codes, self.texts)))


class Cases:
    """Functions that one job runs in order on each rank. report() returns a case for each, for run_cases; it passes if
    every rank completed the function. Words after the program's name select the functions whose names contain one of them."""

    def __init__(self, size, functions, begin, end=lambda: None):
        words = sys.argv[1:]
        self.functions = [one for one in functions if not words or any(word in one.__name__ for word in words)]
        self.size, self.begin, self.end = size, begin, end
        self.ranks = None

    def _body(self, rank):
        self.begin()
        for function in self.functions:
            function(rank)
            print(f"passed {function.__name__}", flush=True)
        self.end()
        print("passed the end", flush=True)

    def _check(self, name):
        if self.ranks is None:
            self.ranks = Ranks(self.size, self._body)
        lines = [text.splitlines() for text in self.ranks.texts]
        if not all(f"passed {name}" in of_rank for of_rank in lines):
            raise AssertionError(self.ranks.told())

    def report(self):
        cases = []
        for name in [function.__name__ for function in self.functions] + ["the end"]:
            def case(name=name):
                self._check(name)
            case.__name__ = f"{name.replace(' ', '_')}_on_{self.size}_ranks"
            cases.append(case)
        return cases
