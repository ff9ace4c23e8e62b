"""Elastic training based on restarts: a state is committed to a file, from which all workers continue after a restart.

    HOROVOD_ELASTIC_STATE=/shared/state shoal run -n 2 --restarts 3 python3 train.py

    state = hvd.elastic.TorchState(model, optimizer, epoch=0)       train() is called with the state of the latest commit,
    hvd.elastic.run(train)(state)                                   or with that of rank 0 if there is none

The number of workers does not change. A worker that dies ends all of them, and the launcher starts them again."""
from __future__ import annotations

import copy
import functools
import os
import pickle

PATH = "HOROVOD_ELASTIC_STATE"


class State:
    """Values that are equal on all ranks: attributes, and parts, {name: (function that gets it, function that sets it)}. A
    front end's class defines in _broadcast(value) and _rank() how ranks communicate."""

    def __init__(self, parts=(), **values):
        self._parts, self._names, self._reset_callbacks = dict(parts), list(values), []
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def register_reset_callbacks(self, callbacks):
        """Registers functions that are called when training continues from a commit, for example to set the learning rate."""
        self._reset_callbacks += callbacks

    def save(self):
        """Keeps in memory what restore() brings back."""
        self._saved = copy.deepcopy(self._now())

    def restore(self):
        self._take(copy.deepcopy(self._saved))

    def commit(self):
        """Keeps the state, also in the file of HOROVOD_ELASTIC_STATE. All ranks call it."""
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
        """Copies rank 0's state to every rank."""
        self._take(self._broadcast(self._now() if self._rank() == 0 else None))
        self.save()

    def check_host_updates(self):
        """Does nothing: hosts do not come or go while a job runs."""

    def load(self):
        """Loads the state of the latest commit on rank 0; sync() copies it to the others. All ranks call it. Returns true if
        there is a commit."""
        path = os.environ.get(PATH)
        is_there = self._broadcast(bool(path and os.path.exists(path)) if self._rank() == 0 else None)
        if is_there and self._rank() == 0:
            self._take(_read(path, set(self._now())))
        return is_there

    def forget(self):
        """Deletes the file at the end of training."""
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
    raise RuntimeError(f"shoal: rank 0 cannot continue from the state in {path}: {fault}. Remove the file to begin anew, or set {PATH} to another "
                       "one")


def run(function):
    """Wraps function(state, ...): it begins with the state of the latest commit, or with rank 0's state if there is none."""

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
