"""Elastic training as far as restarts serve it: a state that is committed to a file, from which all workers go on after a restart.

    HOROVOD_ELASTIC_STATE=/shared/state shoal run -n 2 --restarts 3 python3 train.py

    state = hvd.elastic.TorchState(model, optimizer, epoch=0)       train() is called with the state of the latest commit,
    hvd.elastic.run(train)(state)                                   or with that of rank 0 where there is none

The number of workers stays as it is; a worker that dies ends all of them, and the launcher starts them again."""
from __future__ import annotations

import copy
import functools
import os
import pickle

PATH = "HOROVOD_ELASTIC_STATE"


class State:
    """Values that all ranks have alike: attributes, and parts, {name: (function that gives it, function that takes it)}. A front
    end's class says by _broadcast(value) and _rank() how ranks communicate."""

    def __init__(self, parts=(), **values):
        self._parts, self._names, self._reset_callbacks = dict(parts), list(values), []
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def register_reset_callbacks(self, callbacks):
        """Functions that are called when training goes on from a commit, such as one that sets the learning rate."""
        self._reset_callbacks += callbacks

    def save(self):
        """Keeps what restore() brings back, in memory."""
        self._saved = copy.deepcopy(self._now())

    def restore(self):
        self._take(copy.deepcopy(self._saved))

    def commit(self):
        """Keeps it, in the file of HOROVOD_ELASTIC_STATE too. All ranks."""
        self.save()
        path = os.environ.get(PATH)
        if path and self._rank() == 0:
            with open(f"{path}.part", "wb") as file:
                pickle.dump(self._saved, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.part", path)
        self.check_host_updates()

    def sync(self):
        """rank 0's state on every rank."""
        self._take(self._broadcast(self._now() if self._rank() == 0 else None))
        self.save()

    def check_host_updates(self):
        """Hosts do not come or go while a job runs."""

    def load(self):
        """The state of the latest commit, on rank 0; sync() brings it to the others. All ranks. Returns whether there is one."""
        path = os.environ.get(PATH)
        is_there = self._broadcast(bool(path and os.path.exists(path)) if self._rank() == 0 else None)
        if is_there and self._rank() == 0:
            self._take(_read(path, set(self._now())))
        return is_there

    def forget(self):
        """The file is no longer needed: training has come to its end."""
        path = os.environ.get(PATH)
        if path and self._rank() == 0 and os.path.exists(path):
            os.unlink(path)

    def _now(self):
        return {**{name: getattr(self, name) for name in self._names}, **{name: give() for name, (give, _) in self._parts.items()}}

    def _take(self, values):
        for name, value in values.items():
            if name in self._parts:
                self._parts[name][1](value)
            else:
                setattr(self, name, value)


def _read(path, names):
    try:
        with open(path, "rb") as file:
            values = pickle.load(file)
        if set(values) == names:
            return values
        fault = f"it holds {', '.join(sorted(values))}, and the program's state {', '.join(sorted(names))}"
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        fault = error
    raise RuntimeError(f"shoal: rank 0 cannot go on from the state in {path}: {fault}. Remove the file to begin anew, or set {PATH} to another "
                       "one")


def run(function):
    """Wraps function(state, ...): it begins with the latest commit, where there is one, else with rank 0's state."""

    @functools.wraps(function)
    def begun(state, *args, **options):
        is_again = state.load()
        state.sync()
        for callback in state._reset_callbacks if is_again else ():
            callback()
        result = function(state, *args, **options)
        state.forget()
        return result
    return begun
