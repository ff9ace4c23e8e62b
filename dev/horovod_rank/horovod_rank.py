"""A pytest plugin for the ranks of dev/horovod.py. Before any test is imported, it makes Horovod's module names refer to
Shoal's. It writes the outcome of each test."""
import contextlib
import functools
import gc
import importlib
import json
import os
import pathlib
import sys
import threading
import types

RANK = os.environ["RANK"]
VENV, MODE = os.environ["HOROVOD_TESTS_VENV"], os.environ["HOROVOD_TESTS_MODE"]
SHUTS_DOWN = os.environ["HOROVOD_TESTS_SHUT_DOWN"] == "1"
OUTCOMES = pathlib.Path(os.environ["HOROVOD_TESTS_LOGS"], f"rank{RANK}")

# As Horovod's own launcher sets them.
os.environ.update(HOROVOD_RANK=RANK, HOROVOD_SIZE=os.environ["WORLD_SIZE"])


def register(name, module):
    """Registers the module under Horovod's name, also as an attribute of its parent."""
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            register(parent, types.ModuleType(parent))
        setattr(sys.modules[parent], child, module)


def register_helper(name, **functions):
    module = types.ModuleType(name)
    vars(module).update(functions)
    register(name, module)


def in_thread(target, args=(), daemon=True):
    thread = threading.Thread(target=target, args=args, daemon=daemon)
    thread.start()
    return thread


def is_version_greater_equal_than(version, least):
    from packaging.version import parse
    return parse(version) >= parse(least)


def internals_of(world):
    """Returns the internals that tests of process sets read."""
    return types.SimpleNamespace(_get_process_set_ids_and_ranks=lambda: {id: list(each.ranks) for id, each in world._sets.items()})


def register_horovod():
    register_helper("horovod.runner.util.threads", in_thread=in_thread)
    register_helper("horovod.runner.common.util.env", get_env_rank_and_size=lambda: (int(RANK), int(os.environ["WORLD_SIZE"])))
    register_helper("horovod.common.util", is_version_greater_equal_than=is_version_greater_equal_than)
    front_ends = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow.util", "tensorflow.keras", "keras")}
    for name in front_ends[VENV]:
        register(f"horovod.{name}", importlib.import_module(f"shoal.horovod.{name}"))
    names = vars(importlib.import_module(f"shoal.horovod.{VENV}"))
    world = importlib.import_module(f"shoal.horovod.{VENV}._world")
    operations = {name: value for name, value in names.items() if callable(value)}
    register_helper(f"horovod.{VENV}.mpi_ops", _basics=internals_of(world), **operations)


def forget_muon():
    """Makes Muon no longer a subclass of Optimizer, because tests iterate over the subclasses."""
    import torch
    del torch.optim.Muon, torch.optim._muon.Muon
    gc.collect()


def in_graphs(kind):
    """Returns a class of tests, each of which builds a graph and runs it in a session."""
    from tensorflow.python.eager import context

    def in_graph(function):
        @functools.wraps(function)
        def test(self):
            with context.graph_mode(), self.test_session(use_gpu=False):
                function(self)
        return test
    for name in dir(kind):
        if name.startswith("test_") and name != "test_session":
            setattr(kind, name, in_graph(getattr(kind, name)))
    return kind


def choose_mode():
    if MODE == "without Muon":
        forget_muon()
    if VENV == "tensorflow":
        from tensorflow.python.framework import test_util
        test_util.run_all_in_graph_and_eager_modes = in_graphs if MODE == "in graphs" else lambda kind: kind


def pytest_runtest_logreport(report):
    """Writes one line for each test: the outcome of its call, or of the step before or after it that failed or was skipped."""
    if report.when == "call" or report.outcome != "passed":
        lines = str(getattr(report, "longrepr", "") or "").strip().splitlines()
        with OUTCOMES.open("a") as file:
            file.write(json.dumps([report.nodeid.split("::")[-1], report.outcome, lines[-1][:300] if lines else ""]) + "\n")


def pytest_runtest_setup(item):
    if SHUTS_DOWN:
        sys.modules[f"horovod.{VENV}"].init()  # a test may rely on earlier tests for this


def pytest_runtest_teardown(item, nextitem):
    if SHUTS_DOWN:
        with contextlib.suppress(Exception):  # if a test has broken the communicator
            sys.modules[f"horovod.{VENV}"].shutdown()


register_horovod()
choose_mode()
