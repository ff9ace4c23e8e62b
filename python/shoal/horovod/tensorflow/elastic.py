"""Elastic training based on restarts (shoal.horovod._common.elastic). Eager only."""
from __future__ import annotations

import numpy as np

from .._common import elastic
from .._common.elastic import run  # noqa: F401
from ._world import rank
from .functions import broadcast_object


class ObjectState(elastic.State):
    """A state of attributes, which are passed by name."""

    _rank = staticmethod(rank)
    _broadcast = staticmethod(broadcast_object)


class TensorFlowState(ObjectState):
    """A list of variables, and attributes."""

    def __init__(self, variables, **values):
        self.variables = list(variables)
        super().__init__({"variables": values_of(lambda: self.variables)}, **values)


class TensorFlowKerasState(ObjectState):
    """A model of Keras 3, its optimizer (by default the model's), and attributes. The optimizer's variables are included once
    they exist."""

    def __init__(self, model, optimizer=None, **values):
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        if self.optimizer and model.built and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)  # so that a restart can restore its state
        super().__init__({"model": values_of(lambda: self.model.variables),
                          "optimizer": values_of(lambda: self.optimizer.variables if self.optimizer else [])}, **values)


def values_of(variables):
    """Returns a part of a state: two functions that get and set the values of the variables that `variables` returns."""
    def take(values):
        mine = list(variables())
        if len(mine) != len(values):
            raise RuntimeError(f"shoal: the state has {len(values)} variables and the program {len(mine)}: build the same model, and build it "
                               "before the state")
        for variable, value in zip(mine, values):
            variable.assign(value)
    return lambda: [np.array(variable.numpy()) for variable in variables()], take
