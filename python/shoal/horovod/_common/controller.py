"""Decides which operation is next: ranks post tensors by name, in any order, and agree on those that all have posted.

A controller serves one set of ranks. Its thread runs rounds as long as this rank has requests. In a round each rank sends all
others its requests (one all-gather of a small block). Every rank then finds, by the same rule, which requests all ranks have,
in which order they are executed, and which differ between ranks. So a rank that has posted nothing delays the others' requests
without a message, and ranks may post in different order.

    rank 0: a b      round: all have b         executed: b
    rank 1: b   c    waiting: a (rank 0), c (rank 1)

A round costs as much as a small all-reduce, so there should be few: gradients of an optimizer are held until there are many of
them, or until the program waits for one. Each rank decides that by itself, because a round at any time finds what all ranks
have. An all-reduce on which ranks have agreed before is sent as a number.

A rank that has joined takes part in all-reduces with zeros. This module is independent of the framework: an executor gathers
blocks and moves tensors."""
from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time

from .errors import HorovodInternalError

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER = "allreduce", "allgather", "broadcast", "alltoall", "reducescatter"
BARRIER, JOIN, END = "barrier", "join", "end"
BLOCK_BYTES = 1024  # of each rank's block in a round's first all-gather; longer lists of requests need a second one
LENGTH_BYTES = 4
PAUSE_S, PAUSE_MAX_S = 100e-6, 5e-3  # between two rounds that found nothing
HELD_BYTES = 25 << 20  # size of held requests at which a round begins
HELD_S = 50e-3  # a request held for that long begins a round, as another rank may wait for it
KNOWN_MAX = 4096  # all-reduces that have numbers
STALL_S = 60  # after that, requests that some ranks lack are printed on stderr
ROUND_ENDS_S, STOP_S = 1, 5  # time for a round to end when the program ends, and after an abort of the round
DUPLICATE = ("Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
             "being processed. If you want to request another tensor, use a different tensor name. The tensor is \"{}\"")


class Request:
    """One operation of this rank. forms: a [type, shape] for each tensor. must_agree: arguments that must be equal on all
    ranks. held_bytes: the request's size if it may be held until there are more; None begins a round."""

    def __init__(self, kind, name, forms=(), must_agree=(), splits=(), payload=None, held_bytes=None):
        self.kind, self.name, self.payload = kind, name, payload
        self.forms, self.must_agree, self.splits = list(forms), list(must_agree), list(splits)
        self.held_bytes = held_bytes
        self.hurry = None  # a wait calls this while the request is held
        self.result = self.error = None
        self._done = threading.Event()
        self.posted_s = time.monotonic()

    def told(self):
        """Returns the description that other ranks receive."""
        return [self.kind, self.name, self.forms, self.must_agree, self.splits]

    def finish(self, result=None, error=None):
        self.result, self.error, self.payload = result, error, None
        self._done.set()

    def is_done(self):
        return self._done.is_set()

    def wait(self):
        if self.held_bytes is not None and not self.is_done():
            self.hurry()
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self.result


class Told:
    """The description of a request, of this rank or another one."""

    def __init__(self, fields):
        self.fields = fields
        self.kind, self.name, self.forms, self.must_agree, self.splits = fields


class _Known:
    """All-reduces on which ranks have agreed, by number. A number means the same on every rank, because all learn the same in
    each round."""

    def __init__(self):
        self._numbers, self._told = {}, []

    def shorten(self, request):
        """Returns the description of this rank's request for the other ranks: a number if it is unchanged since ranks last
        agreed on it."""
        number = self._numbers.get(request.name)
        fields = request.told()
        return number if number is not None and self._told[number].fields == fields else fields

    def find(self, fields):
        return self._told[fields] if isinstance(fields, int) else Told(fields)

    def learn(self, told):
        """Adds a description. When the table is full, for example of names used once, it is cleared."""
        if told.name in self._numbers:
            self._told[self._numbers[told.name]] = told
            return
        if len(self._told) == KNOWN_MAX:
            self._numbers, self._told = {}, []
        self._numbers[told.name] = len(self._told)
        self._told.append(told)


class Controller:
    """executor: gather(bytes) returns a list of the bytes of all ranks, which have the same length. execute(batch) finishes the
    requests of a list of (kind, {rank: Told}, Request or None) on which ranks agree, in order. abort() ends both with an error,
    on all ranks. timeout_s is how long a request waits for other ranks."""

    def __init__(self, rank, size, executor):
        self.rank, self.size = rank, size
        self._executor = executor
        self._pending, self._changed = {}, threading.Condition()
        self._held_bytes = 0  # of pending requests
        self._counters = {}  # of requests without a name
        self._known = _Known()
        self._failure = None
        self._ending = None  # the request to end
        self._last_joined = []  # ranks whose request to join arrived in the latest round that had one
        self._warned_s, self._progress_s = 0.0, time.monotonic()
        self._must_stop, self._owner = False, os.getpid()
        self._thread = threading.Thread(target=self._serve, name="shoal-horovod", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def name_of(self, kind, name):
        """Returns a name. If the program passes none, it contains the number of the call."""
        if name:
            return f"{kind}.{name}"
        with self._changed:
            self._counters[kind] = self._counters.get(kind, -1) + 1
            return f"{kind}.noname.{self._counters[kind]}"

    def post(self, request):
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if request.name in self._pending:
                raise ValueError(DUPLICATE.format(request.name))
            if request.kind == JOIN:
                request.must_agree = [self._counters]
            self._pending[request.name] = request
            self._held_bytes += request.held_bytes or 0
            request.hurry = self._hurry
            if len(self._pending) == 1 or request.held_bytes is None or self._held_bytes >= HELD_BYTES:
                self._changed.notify()
        return request

    def _hurry(self):
        """Releases all held requests, because the program waits."""
        with self._changed:
            for request in self._pending.values():
                request.held_bytes = None
            self._held_bytes = 0
            self._changed.notify()

    def post_end(self):
        """Declares that this rank posts nothing more; requests of the others that it lacks fail. Call end() next."""
        try:
            self._ending = self.post(Request(END, END))
        except (HorovodInternalError, ValueError):
            pass  # another rank has left already

    def end(self):
        """Waits until all ranks have posted their end; pending requests then fail."""
        try:
            if self._ending is not None:
                self._ending.wait()
        except HorovodInternalError:
            pass  # another rank has left already
        self._stop()
        atexit.unregister(self._stop)

    def _stop(self):
        """Stops the thread. Also called before the interpreter ends, because a thread that returns to it from C++ afterwards
        would crash the process."""
        if self._owner != os.getpid():  # a forked child does not have this thread
            return
        with self._changed:
            self._must_stop = True
            self._changed.notify()
        self._thread.join(ROUND_ENDS_S)
        if self._thread.is_alive():
            self._executor.abort()
            self._thread.join(STOP_S)

    # ---- The thread ----

    def _serve(self):
        try:
            pause = PAUSE_S
            while self._wait_for_requests():
                has_progress = self._round()
                if has_progress is None:
                    self._fail(HorovodInternalError("Horovod has been shut down. This was caused by a call of shutdown() on all "
                                                    "ranks while the operation was pending."))
                    return
                pause = PAUSE_S if has_progress else min(2 * pause, PAUSE_MAX_S)
                if not has_progress:
                    time.sleep(pause)
            self._fail(HorovodInternalError("the program ends"))
        except BaseException as error:
            self._fail(HorovodInternalError(str(error)))

    def _wait_for_requests(self):
        with self._changed:
            while not self._must_stop and not self._is_time():
                self._changed.wait(HELD_S if self._pending else None)
        return not self._must_stop

    def _is_time(self):
        """Returns true if one request, or all held ones together, begin a round."""
        late_s = time.monotonic() - HELD_S
        return self._held_bytes >= HELD_BYTES or any(
            request.held_bytes is None or request.posted_s <= late_s for request in self._pending.values())

    def _fail(self, error):
        with self._changed:
            self._failure, pending, self._pending = error, self._pending, {}
        for request in pending.values():
            request.finish(error=error)

    def _round(self):
        """Runs one round. Returns true if something was executed, and None at the end."""
        with self._changed:
            own = list(self._pending.values())
        told = self._exchange([self._known.shorten(request) for request in own])
        joined = {rank for rank, requests in enumerate(told) if JOIN in requests}
        news = sorted(joined - set(self._joined_before()))
        if news:
            self._last_joined = news
        self._joined = joined
        if all(END in requests for requests in told):
            self._take(END).finish()
            return None
        if len(joined) == self.size:
            self._finish_join(told)
            return True
        names = ready(told, joined)
        if not names:
            self._fail_what_cannot_come(told)
            self._warn(told, joined)
            self._expect_in_time(told, joined)
            return False
        self._progress_s = time.monotonic()
        self._execute(names, told, joined)
        return True

    def _joined_before(self):
        return getattr(self, "_joined", ())

    def _exchange(self, requests):
        """Returns the requests of all ranks, by name."""
        text = json.dumps(requests).encode()
        room = BLOCK_BYTES - LENGTH_BYTES
        blocks = self._executor.gather(len(text).to_bytes(LENGTH_BYTES, "little") + text[:room].ljust(room, b" "))
        lengths = [int.from_bytes(block[:LENGTH_BYTES], "little") for block in blocks]
        texts = [block[LENGTH_BYTES:] for block in blocks]
        if max(lengths) > room:
            texts = self._executor.gather(text.ljust(max(lengths), b" "))
        found = {text: {each.name: each for each in map(self._known.find, json.loads(text))} for text in set(texts)}
        return [found[text] for text in texts]

    def _take(self, name):
        with self._changed:
            request = self._pending.pop(name, None)
            self._held_bytes -= (request.held_bytes or 0) if request else 0
            return request

    def _finish_join(self, told):
        """Ends a join. Sets the counters of generated names to the same values on all ranks."""
        with self._changed:
            for requests in told:
                for kind, number in requests[JOIN].must_agree[0].items():
                    self._counters[kind] = max(number, self._counters.get(kind, -1))
        self._joined = set()
        self._take(JOIN).finish(max(self._last_joined))

    def _execute(self, names, told, joined):
        batch = []
        for name in names:
            requests = {rank: told[rank][name] for rank in range(self.size) if name in told[rank]}
            request = self._take(name)
            fault = fault_of(requests, joined)
            if fault and request:
                request.finish(error=HorovodInternalError(f"{fault} (tensor {name})"))
            elif not fault:
                first = next(iter(requests.values()))
                if first.kind == ALLREDUCE:
                    self._known.learn(first)
                batch.append((first.kind, requests, request))
        try:
            if batch:
                self._executor.execute(batch)
        except BaseException as error:
            for _, _, request in batch:
                if request and not request.is_done():
                    request.finish(error=HorovodInternalError(str(error)))
            raise

    def _fail_what_cannot_come(self, told):
        """Fails this rank's requests that an ended rank lacks, because that rank posts nothing more."""
        ended = [rank for rank, requests in enumerate(told) if END in requests]
        for name in told[self.rank]:
            absent = [rank for rank in ended if name not in told[rank]]
            if absent:
                self._take(name).finish(error=HorovodInternalError(
                    f"{name} needs rank {absent[0]}, which has called shutdown() or removed this process set"))

    def _expect_in_time(self, told, joined):
        """Ends everything on all ranks if a request has waited too long for the others. Requests to join or to end may wait
        while others work."""
        now = time.monotonic()
        with self._changed:
            begun = {request.name: max(request.posted_s, self._progress_s if request.kind in (JOIN, END) else 0)
                     for request in self._pending.values()}
        late = [name for name in told[self.rank] if now - begun.get(name, now) > self._executor.timeout_s]
        if late:
            absent = [rank for rank in range(self.size) if rank not in joined and late[0] not in told[rank]]
            self._executor.abort()
            raise TimeoutError(f"shoal: rank {self.rank} has waited {self._executor.timeout_s:.0f} s for {late[0]}, which ranks "
                               f"{', '.join(map(str, absent))} have not posted")

    def _warn(self, told, joined):
        """Prints which ranks wait for which tensors of other ranks."""
        now = time.monotonic()
        with self._changed:
            oldest = min((request.posted_s for request in self._pending.values()), default=now)
        if now - max(oldest, self._warned_s) < STALL_S:
            return
        self._warned_s = now
        for name in told[self.rank]:
            absent = [rank for rank in range(self.size) if rank not in joined and name not in told[rank]]
            if absent and name != JOIN:
                print(f"shoal: rank {self.rank} waits for {name}, which ranks {', '.join(map(str, absent))} have not posted for "
                      f"{now - oldest:.0f} s", file=sys.stderr)


def ready(told, joined):
    """Returns the names that all ranks except joined ones have posted, in the order of the first such rank."""
    names = {name: None for requests in told for name in requests if name not in (JOIN, END)}
    return [name for name in names if all(name in requests or rank in joined for rank, requests in enumerate(told))]


def fault_of(requests, joined):
    """Returns why ranks cannot do this together, or "". requests: by rank. The text is the same on every rank."""
    first_rank, first = next(iter(requests.items()))
    absent = joined - set(requests)
    if absent and first.kind not in (ALLREDUCE, BARRIER):
        return f"{first.kind} is not supported with Join: rank {min(absent)} has joined"
    for rank, other in requests.items():
        fault = _difference(first, other) if other is not first else None
        if fault:
            return f"{fault[0]}: One rank had {fault[1]}, but another rank had {fault[2]}: ranks {first_rank} and {rank}"
    if first.kind == ALLTOALL:
        return _fault_of_splits(requests)
    return ""


def _difference(one, other):
    """Returns (what differs, its value in one, its value in other), or None."""
    if one.kind != other.kind:
        return "Mismatched operations", f"operation {one.kind}", f"operation {other.kind}"
    if len(one.forms) != len(other.forms):
        return "Mismatched number of tensors in a group", f"{len(one.forms)} tensors", f"{len(other.forms)}"
    for (type1, shape1), (type2, shape2) in zip(one.forms, other.forms):
        if type1 != type2:
            return "Mismatched data types", f"type {type1}", f"type {type2}"
        skip = 1 if one.kind in (ALLGATHER, ALLTOALL) else 0  # first dimensions may differ
        if len(shape1) != len(shape2) or shape1[skip:] != shape2[skip:]:
            return f"Mismatched {one.kind} tensor shapes", f"shape {shape1}", f"shape {shape2}"
    if one.must_agree != other.must_agree:
        return f"Mismatched {one.kind} arguments", str(one.must_agree), str(other.must_agree)
    return None


def _fault_of_splits(requests):
    for rank, told in requests.items():
        if sum(told.splits) > told.forms[0][1][0]:
            return f"Sum of splits entries is greater than the first dimension of the tensor on rank {rank}"
    return ""
