#!/usr/bin/env python3
"""The messages of ranks under Horovod's names before tensors move (shoal.horovod._common.controller): how many rounds they
need, and what they agree on. Ranks are threads of this process, and no tensors move."""
import contextlib
import sys
import threading
import time

from shoal.horovod._common import controller as controllers
from shoal.horovod._common.controller import ALLREDUCE, JOIN, Controller, Request
from shoal.horovod._common.errors import HorovodInternalError
from tap import call, expect, run_cases

TIMEOUT_S = 60
FOR_EVER_S = 1e6


class Job:
    """Controllers of `size` ranks. gathers: number of rounds; batches: for each rank, the names and forms that it had to
    execute."""

    def __init__(self, size):
        self.size, self.gathers, self.batches = size, 0, [[] for _ in range(size)]
        self._meeting, self._blocks = threading.Barrier(size), [b""] * size
        self.ranks = [Controller(rank, size, _Executor(self, rank)) for rank in range(size)]

    def gather(self, rank, block):
        self._blocks[rank] = block
        if self._meeting.wait(TIMEOUT_S) == 0:
            self.gathers += 1
        blocks = list(self._blocks)
        self._meeting.wait(TIMEOUT_S)
        return blocks

    def post(self, rank, name, held_bytes=None, form=("float32", [4])):
        return self.ranks[rank].post(Request(ALLREDUCE, name, [list(form)], [0, 1.0, 1.0], held_bytes=held_bytes))

    def post_everywhere(self, names, held_bytes=None):
        """Posts all names on each rank. Rank 0 begins with the first name, and each rank with the name after that of the
        rank before it."""
        return [[self.post(rank, name, held_bytes) for name in names[rank:] + names[:rank]] for rank in range(self.size)]

    def abort(self):
        self._meeting.abort()

    def end(self):
        for controller in self.ranks:
            controller.post_end()
        threads = [threading.Thread(target=controller.end) for controller in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
            expect(not thread.is_alive(), "a controller does not end")


class _Executor:
    timeout_s = TIMEOUT_S

    def __init__(self, job, rank):
        self._job, self._rank = job, rank

    def abort(self):
        self._job.abort()

    def gather(self, block):
        return self._job.gather(self._rank, block)

    def execute(self, batch):
        self._job.batches[self._rank].append([(one.name, one.forms) for one in (next(iter(told.values())) for _, told, _ in batch)])
        for _, _, request in batch:
            if request:
                request.finish(request.name)


@contextlib.contextmanager
def held_for(seconds):
    """Requests that may be held are held for this long."""
    before_s, controllers.HELD_S = controllers.HELD_S, seconds
    try:
        yield
    finally:
        controllers.HELD_S = before_s


def wait_for_all(requests):
    """Each rank waits for its requests on its own thread, as its program would."""
    results = [None] * len(requests)

    def wait(rank):
        results[rank] = [request.wait() for request in requests[rank]]
    threads = [threading.Thread(target=wait, args=(rank,), daemon=True) for rank in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    expect(None not in results, results)
    return results


def comes_true(condition, *told):
    """Polls a condition. The controller does not see that anybody waits."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        expect(time.monotonic() < deadline_s, *told)
        time.sleep(1e-3)


def names_of(batches):
    return [[name for name, _ in batch] for batch in batches]


def refused(request, *words):
    try:
        request.wait()
    except HorovodInternalError as error:
        expect(all(word in str(error) for word in words), error)
        return
    raise AssertionError("no HorovodInternalError")


# ---- How many rounds ----


def a_step_is_one_round():
    """Ranks post 40 gradients in different orders. Their names fill two blocks, their numbers one."""
    names = [f"layers.{i}.attention.weight" for i in range(40)]
    with held_for(FOR_EVER_S):
        job, gathers = Job(3), []
        for _ in range(4):
            before = job.gathers
            wait_for_all(job.post_everywhere(names, held_bytes=4))
            gathers.append(job.gathers - before)
        job.end()
    expect(gathers == [2, 1, 1, 1], gathers)
    expect([names_of(batches) for batches in job.batches] == [[names] * 4] * 3, job.batches)


def enough_bytes_begin_a_round():
    """Nobody waits for these gradients."""
    most = controllers.HELD_BYTES
    with held_for(FOR_EVER_S):
        job = Job(2)
        job.post_everywhere(["a"], held_bytes=most - 1)
        time.sleep(0.05)
        expect(job.gathers == 0, "a round began for less")
        requests = job.post_everywhere(["b"], held_bytes=1)
        comes_true(lambda: all(one.is_done() for each in requests for one in each), "no round began")
        job.post_everywhere(["c"], held_bytes=most - 1)
        time.sleep(0.05)
        expect(job.gathers == 1, "those that are done count")
        job.end()
    expect(names_of(job.batches[0]) == [["a", "b"]], job.batches)


def nothing_is_held_for_long():
    """Rank 1 waits for a tensor that rank 0 posted and does not wait for."""
    with held_for(0.01):
        job = Job(2)
        held = job.post(0, "a", held_bytes=1)
        expect(job.post(1, "a").wait() == "a", "the other rank's")
        comes_true(held.is_done, "it is held")
        job.end()


def what_is_held_goes_with_others():
    with held_for(FOR_EVER_S):
        job = Job(2)
        held = job.post_everywhere(["gradient"], held_bytes=1)
        wait_for_all(job.post_everywhere(["loss"]))
        expect(all(one.is_done() for each in held for one in each) and job.gathers == 1, job.gathers)
        job.end()


# ---- What they agree on ----


def numbers_stand_for_what_was_agreed_on():
    """A tensor may have another shape next time, if all ranks agree; with another shape on one rank only it fails, and the
    numbers remain."""
    long, short = ("float32", [4]), ("float64", [2, 2])
    job = Job(2)
    for form in (long, long, short, short, long):
        wait_for_all([[job.post(rank, "a", form=form)] for rank in range(2)])
    requests = [job.post(rank, "a", form=(long, short)[rank]) for rank in range(2)]
    for request in requests:
        refused(request, "Mismatched data types", "float32", "float64", "ranks 0 and 1", "tensor a")
    wait_for_all(job.post_everywhere(["a", "new"]))
    job.end()
    wanted = [[("a", [list(form)])] for form in (long, long, short, short, long)]
    expect(job.batches[0][:5] == job.batches[1][:5] == wanted, job.batches)
    expect(sorted(sum(names_of(job.batches[1][5:]), [])) == ["a", "new"], job.batches)


def ranks_that_joined_know_the_numbers():
    """Rank 2 takes part in operations that it posted before and in one that is new to it, and later posts both."""
    with held_for(FOR_EVER_S):
        job = Job(3)
        wait_for_all(job.post_everywhere(["a", "b"], held_bytes=1))
        joins = [job.ranks[2].post(Request(JOIN, JOIN))]
        for names in (["a", "b"], ["b", "new"], ["b", "new"]):
            wait_for_all([[job.post(rank, name, held_bytes=1) for name in names] for rank in range(2)])
        joins += [job.ranks[rank].post(Request(JOIN, JOIN)) for rank in (0, 1)]
        wait_for_all([[each] for each in joins])
        before = job.gathers
        wait_for_all(job.post_everywhere(["new", "a"], held_bytes=1))
        expect(job.gathers - before == 1, job.gathers - before)
        job.end()
    wanted = [["a", "b"], ["a", "b"], ["b", "new"], ["b", "new"], ["new", "a"]]
    expect([names_of(batches) for batches in job.batches] == [wanted] * 3, job.batches)


def names_that_come_once_are_forgotten():
    """There are more names than numbers: the numbers begin anew on all ranks at once."""
    most, controllers.KNOWN_MAX = controllers.KNOWN_MAX, 5
    try:
        job = Job(2)
        for i in range(8):
            wait_for_all(job.post_everywhere(["a", f"once.{i}", "b"]))
            expect(all(len(each._known._told) <= 5 for each in job.ranks), "numbers are kept")
        job.end()
    finally:
        controllers.KNOWN_MAX = most
    done = [sorted(sum(names_of(batches), [])) for batches in job.batches]
    expect(done == [sorted([*"ab"] * 8 + [f"once.{i}" for i in range(8)])] * 2, done)


def what_an_ended_rank_lacks_fails():
    """Such operations fail at once, and the job ends when the other rank does. Operations that the ended rank has posted
    are completed first."""
    job = Job(2)
    posted = [job.post(0, "both")]
    job.ranks[0].post_end()
    ending = threading.Thread(target=job.ranks[0].end)
    ending.start()
    requests = [job.post(1, name) for name in ("both", "lonely")] + [job.ranks[1].post(Request(JOIN, JOIN))]
    for request in (*posted, requests[0]):
        expect(request.wait() == "both", request.result)
    for request, name in zip(requests[1:], ("lonely", "join")):
        comes_true(request.is_done, name, "is waited for")
        refused(request, name, "rank 0", "shutdown()")
    job.ranks[1].post_end()
    job.ranks[1].end()
    ending.join(TIMEOUT_S)
    expect(not ending.is_alive(), "rank 0 does not end")


def a_job_begins_anew():
    """As after an elastic restart: the previous job's numbers mean nothing."""
    for names in (["a", "b"], ["b", "c", "a"]):
        job = Job(2)
        for _ in range(2):
            wait_for_all(job.post_everywhere(names))
        job.end()
        expect(sorted(sum(names_of(job.batches[1]), [])) == sorted(names * 2), job.batches)


# ---- How it ends ----


def what_ranks_do_not_have_in_common_ends_in_time():
    """The error names what the other rank lacks."""
    job = Job(2)
    for controller in job.ranks:
        controller._executor.timeout_s = 0.2
    requests = [job.post(0, "here"), job.post(1, "there")]
    for request in requests:
        comes_true(request.is_done, request.name, "is waited for")
    texts = [str(request.error) for request in requests]
    expect(any("rank 0 has waited 0 s for here, which ranks 1 have not posted" in text for text in texts)
           or any("rank 1 has waited 0 s for there, which ranks 0 have not posted" in text for text in texts), texts)


def a_rank_that_joined_waits_while_others_work():
    job = Job(2)
    joins = [job.ranks[1].post(Request(JOIN, JOIN))]
    job.ranks[1]._executor.timeout_s = 1
    until = time.monotonic() + 3
    while time.monotonic() < until:
        expect(job.post(0, "a").wait() == "a")
    joins.append(job.ranks[0].post(Request(JOIN, JOIN)))
    wait_for_all([[each] for each in joins])
    job.end()


def a_round_ends_with_the_program():
    """No thread is left behind, even if another rank does not come to the round."""
    job = Job(2)
    request = job.post(0, "a")
    comes_true(lambda: job._meeting.n_waiting == 1, "no round began")
    job.ranks[0]._stop()
    expect(not job.ranks[0]._thread.is_alive(), "its thread lives on")
    refused(request, "")
    job.ranks[1]._stop()


PROGRAM = """
import threading
import time
from shoal.horovod._common.controller import Controller, Request
class Executor:
    timeout_s = 60
    def gather(self, block):
        print("begun", flush=True)
        begun.set()
        time.sleep(0.3)
        print("ended", flush=True)
        return [block]
    def execute(self, batch):
        pass
begun = threading.Event()
controller = Controller(0, 1, Executor())
controller.post(Request("barrier", "barrier"))
begun.wait(60)
"""


def the_interpreter_ends_after_the_thread():
    code, out, err = call(sys.executable, "-c", PROGRAM)
    expect((code, out.count("begun")) == (0, out.count("ended")) and "begun" in out, code, out, err)


if __name__ == "__main__":
    run_cases([a_step_is_one_round, enough_bytes_begin_a_round, nothing_is_held_for_long, what_is_held_goes_with_others,
               numbers_stand_for_what_was_agreed_on, ranks_that_joined_know_the_numbers, names_that_come_once_are_forgotten,
               what_an_ended_rank_lacks_fails, a_job_begins_anew, what_ranks_do_not_have_in_common_ends_in_time,
               a_rank_that_joined_waits_while_others_work, a_round_ends_with_the_program, the_interpreter_ends_after_the_thread])
