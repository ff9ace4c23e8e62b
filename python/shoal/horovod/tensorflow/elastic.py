"""Elastic training as far as restarts serve it (shoal.horovod._common.elastic). Eagerly only."""
from __future__ import annotations

import numpy as np

from .._common import elastic
from .._common.elastic import run  # noqa: F401
from ._world import rank
from .functions import broadcast_object


class ObjectState(elastic.State):
    """Attributes, given by name."""

    _rank = staticmethod(rank)
    _broadcast = staticmethod(broadcast_object)


class TensorFlowState(ObjectState):
    """A list of variables, and attributes."""

    def __init__(self, variables, **values):
        self.variables = list(variables)
        super().__init__({"variables": values_of(lambda: self.variables)}, **values)


class TensorFlowKerasState(ObjectState):
    """A model of Keras 3, its optimizer (the model's, where none is given), and attributes. The optimizer's variables are kept as far as it
    is built."""

    def __init__(self, model, optimizer=None, **values):
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        if self.optimizer and model.built and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)  # else a restart has nothing to put its state into
        super().__init__({"model": values_of(lambda: self.model.variables),
                          "optimizer": values_of(lambda: self.optimizer.variables if self.optimizer else [])}, **values)


def values_of(variables):
    """A part of a state: functions that give and take the values of the variables that a function gives."""
    def take(values):
        mine = list(variables())
        if len(mine) != len(values):
            raise RuntimeError(f"shoal: the state has {len(values)} variables and the program {len(mine)}: build the same model, and build it "
                               "before the state")
        for variable, value in zip(mine, values):
            variable.assign(value)
    return lambda: [np.array(variable.numpy()) for variable in variables()], take
