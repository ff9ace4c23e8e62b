#!/usr/bin/env python3
"""Shoal under torchft (build/trainers): its process group through changing worlds, and a training by its Manager in which a
replica is killed. The others continue without it and end with the same parameters. If none is killed, they train as one
process does."""
import ast
import datetime
import functools
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import time

import tap
from tap import expect

try:
    import torchft
except ImportError as reason:
    print(f"1..0 # SKIP no torchft: {reason}")
    sys.exit(0)
import torch
import torch._dynamo  # noqa: F401: else each process's first optimizer imports it, in two seconds
import torch.distributed as dist
from torchft.coordination import LighthouseServer

LIMIT = datetime.timedelta(seconds=30)
REPLICAS = 3
STEPS = 12
DIES_AT = 4
FEATURES = 6


# ---- Functions of a process ----


def process_group():
    from shoal.torch.torchft import ProcessGroupShoal
    return ProcessGroupShoal(timeout=LIMIT)


def reconfigure(port, rank):
    """A group of three, then of the first two, then of three again; each sums its ranks' values."""
    group = process_group()
    for quorum, size in enumerate((3, 2, 3)):
        if rank >= size:
            continue
        group.configure(f"127.0.0.1:{port}/quorum/{quorum}", f"replica {rank}", rank, size, quorum_id=quorum)
        value = torch.full((1000,), float(rank + 1))
        group.allreduce([value], dist.AllreduceOptions()).wait()
        expect(value.tolist() == [size * (size + 1) / 2] * 1000, value)
        expect(group.size() == size and group.getBackendName() == "torchft-shoal")
    group.shutdown()


def aborted(port, rank):
    """An abort ends a collective that the other rank never joins. A new group then works."""
    group, told = process_group(), dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group.configure(f"127.0.0.1:{port}/first", f"replica {rank}", rank, 2, quorum_id=0)
    began_s = time.monotonic()
    if rank == 0:
        work = group.allreduce([torch.ones(10)], dist.AllreduceOptions())
        told.wait(["rank 1 is in the first group"], LIMIT)
        time.sleep(0.5)
        group.abort()
        try:
            work.wait()
        except RuntimeError as error:
            expect("abort" in str(error), error)
        else:
            expect(False, "an aborted collective succeeded")
        told.set("rank 0 has aborted", "")
    else:
        told.set("rank 1 is in the first group", "")
        told.wait(["rank 0 has aborted"], LIMIT)
    group.configure(f"127.0.0.1:{port}/second", f"replica {rank}", rank, 2, quorum_id=1)
    value = torch.ones(10)
    group.allreduce([value], dist.AllreduceOptions()).wait()
    expect(value.tolist() == [2.0] * 10 and time.monotonic() - began_s < LIMIT.total_seconds(), value)


def watch_over(pipe, least=2):
    """Runs torchft's lighthouse until it gets a message. There is no step with fewer than `least` replicas."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=least, join_timeout_ms=30000, quorum_tick_ms=50,
                                  heartbeat_timeout_ms=3000)
    pipe.send(lighthouse.address().replace("[::]", "127.0.0.1"))
    pipe.recv()
    lighthouse.shutdown()


def begun(seed):
    """Returns a model and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model, step, replica):
    features = torch.randn(32, FEATURES, generator=torch.Generator().manual_seed(1000 * step + replica))
    return ((model(features) - features.sum(dim=1, keepdim=True)) ** 2).mean()


def tell_parameters(model):
    print("parameters", [round(value, 6) for one in model.parameters() for value in one.flatten().tolist()], flush=True)


def train_alone():
    """Trains in one process on the batches of all replicas; prints the losses of each."""
    model, optimizer = begun(0)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, step, replica) for replica in range(REPLICAS)]
        (sum(losses) / REPLICAS).backward()
        optimizer.step()
        print("losses", [round(loss.item(), 4) for loss in losses])
    tell_parameters(model)


def train(port, replica, seed, dies, lighthouse):
    """Prints a line for each committed step (its replicas and the loss), and the parameters at the end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, optimizer = begun(seed)
    manager = torchft.Manager(pg=process_group(), min_replica_size=2, replica_id=f"replica {replica}",
                              load_state_dict=lambda state: (model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])),
                              state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                              store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1, lighthouse_addr=lighthouse,
                              hostname="127.0.0.1", timeout=LIMIT, quorum_timeout=LIMIT, connect_timeout=LIMIT, use_async_quorum=False)
    meeting = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    meeting.set(f"replica {replica}", "")
    meeting.wait([f"replica {other}" for other in range(REPLICAS)], LIMIT)  # so that all three make the first step
    wrapped = torchft.DistributedDataParallel(manager, model)
    step = torchft.Optimizer(manager, optimizer)
    while manager.current_step() < STEPS:
        if dies and manager.current_step() == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        step.zero_grad()
        loss = loss_of(wrapped, manager.current_step(), replica)
        loss.backward()
        step.step()
        print(f"step {manager.current_step()} of {manager.num_participants()} loss {loss.item():.4f}", flush=True)
    tell_parameters(model)
    # The replica that ends first must not take its part of the last collective away from the others.
    manager.shutdown(wait=False)


# ---- The cases ----


def begin(shim, output, function, words):
    """Runs a function in a child. It is forked because importing torch takes seconds; only children start threads."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(SHOAL_TORCH_SHIM=shim, OMP_NUM_THREADS="1")
    function(*words)


class Processes:
    """Processes that run functions of this file, each with its output in a file."""

    def __init__(self, shim):
        self.shim, self.folder, self.running = shim, tempfile.TemporaryDirectory(prefix="shoal-torchft-"), []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process, _ in self.running:
            process.kill()
            process.join()
        self.folder.cleanup()

    def start(self, function, *words):
        path = pathlib.Path(self.folder.name, str(len(self.running)))
        process = multiprocessing.get_context("fork").Process(target=begin, args=(self.shim, path, function, words))
        process.start()
        self.running.append((process, path))

    def expect_ends(self, expected, limit_s=120):
        """Waits for exit codes; returns outputs."""
        until_s = time.monotonic() + limit_s
        for process, _ in self.running:
            process.join(max(0.1, until_s - time.monotonic()))
        outputs = [path.read_text() for _, path in self.running]
        codes = [process.exitcode for process, _ in self.running]
        expect(codes == expected, f"exit codes {codes}", *outputs)
        return outputs


def serve_store(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


class Server:
    """A child that serves until the end of a with statement. Holds its first message."""

    def __init__(self, function):
        self.pipe, its_pipe = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=function, args=(its_pipe,))

    def __enter__(self):
        self.process.start()
        expect(self.pipe.poll(30), "a server did not start")
        return self.pipe.recv()

    def __exit__(self, *_):
        self.pipe.send("end")
        self.process.join(5)
        self.process.kill()


def together(shim, function, size):
    with Server(serve_store) as port, Processes(shim) as processes:
        for rank in range(size):
            processes.start(function, port, rank)
        processes.expect_ends([0] * size)


def lines_of(text, word):
    return [line for line in text.splitlines() if line.startswith(word)]


def numbers_of(text, word):
    """Returns one list of numbers for each line that begins with the word."""
    return [ast.literal_eval(line[len(word):].strip()) for line in lines_of(text, word)]


def are_near(ours, theirs, tolerance):
    return len(ours) == len(theirs) and all(abs(one - other) <= tolerance for one, other in zip(ours, theirs))


def trained_as_one_process(shim):
    with Server(serve_store) as port, Server(functools.partial(watch_over, least=REPLICAS)) as lighthouse, Processes(shim) as processes:
        for replica in range(REPLICAS):
            processes.start(train, port, replica, 0, False, lighthouse)
        processes.start(train_alone)
        *outputs, alone = processes.expect_ends([0] * (REPLICAS + 1))
    losses, (parameters,) = numbers_of(alone, "losses"), numbers_of(alone, "parameters")
    for replica, text in enumerate(outputs):
        told = [float(line.split(f" of {REPLICAS} loss ")[1]) for line in lines_of(text, "step")]
        expect(are_near(told, [each[replica] for each in losses], 2e-4), f"losses of replica {replica}:", told, alone)
        expect(are_near(numbers_of(text, "parameters")[0], parameters, 1e-5), f"replica {replica}:", text, alone)


def trained_through_a_loss(shim):
    with Server(serve_store) as port, Server(watch_over) as lighthouse, Processes(shim) as processes:
        for replica in range(REPLICAS):
            # Parameters differ at first: the manager sends a newcomer those of the others.
            processes.start(train, port, replica, replica, replica == 1, lighthouse)
        outputs = processes.expect_ends([0, -signal.SIGKILL, 0])
        expect(lines_of(outputs[0], "parameters") == lines_of(outputs[2], "parameters"), *outputs)
        for text in (outputs[0], outputs[2]):
            expect(f"step {DIES_AT} of 3" in text and f"step {STEPS} of 2" in text, text)


def cases():
    for shim in ("c++", "python"):
        for name, body in (("reconfigure", lambda shim=shim: together(shim, reconfigure, 3)),
                           ("aborted", lambda shim=shim: together(shim, aborted, 2)),
                           ("trained_as_one_process", lambda shim=shim: trained_as_one_process(shim)),
                           ("trained_through_a_loss", lambda shim=shim: trained_through_a_loss(shim))):
            body.__name__ = f"{shim} torchft_{name}"
            yield body


if __name__ == "__main__":
    tap.run_cases(list(cases()))
