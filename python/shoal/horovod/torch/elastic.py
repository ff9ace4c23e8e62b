"""Elastic training as far as restarts serve it (shoal.horovod._common.elastic)."""
from __future__ import annotations

from .._common import elastic
from .._common.elastic import run  # noqa: F401
from ._world import rank
from .functions import broadcast_object


class ObjectState(elastic.State):
    """Attributes, given by name."""

    _rank = staticmethod(rank)
    _broadcast = staticmethod(broadcast_object)


class TorchState(ObjectState):
    """model, optimizer and whatever else has a state_dict, and attributes."""

    def __init__(self, model=None, optimizer=None, **values):
        given = {"model": model, "optimizer": optimizer, **values}
        parts = {name: value for name, value in given.items() if hasattr(value, "state_dict") and hasattr(value, "load_state_dict")}
        for name, value in parts.items():
            setattr(self, name, value)
        super().__init__({name: (value.state_dict, value.load_state_dict) for name, value in parts.items()},
                         **{name: value for name, value in values.items() if name not in parts})
