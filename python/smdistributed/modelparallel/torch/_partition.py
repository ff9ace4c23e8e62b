"""Which partition a module is in: the program's marks, and the units and cuts of a pipeline that follow from them."""
from __future__ import annotations

import contextlib

from torch import nn

from shoal.torch import _graph
from smdistributed.modelparallel.exceptions import SMPConfigError, SMPError
from smdistributed.modelparallel.torch._activation import MARK as CHECKPOINTED
from smdistributed.modelparallel.torch._state import log, state

MARK = "_smp_partition"
_stack = []  # of partition() contexts


@contextlib.contextmanager
def partition(index):
    """Modules that are made inside are in this partition; the innermost context counts. Ignored with auto_partition."""
    _check(index)
    plain = nn.Module.__init__

    def marked(module, *args, **kwargs):
        object.__setattr__(module, MARK, _stack[-1])
        plain(module, *args, **kwargs)
    _stack.append(index)
    nn.Module.__init__ = marked
    try:
        yield
    finally:
        nn.Module.__init__ = plain
        _stack.pop()


def set_partition(module, index):
    """Puts a module, and modules in it without a mark of their own, in a partition. Ignored with auto_partition."""
    _check(index)
    object.__setattr__(module, MARK, index)


def _check(index):
    state.require()
    if not isinstance(index, int) or not 0 <= index < state.cfg.pipeline_parallel_degree:
        raise SMPConfigError(f"smp.partition: {index!r} must be a number less than the number of partitions, "
                             f"{state.cfg.pipeline_parallel_degree}")


def schedule_text(pipeline, ranks, microbatches, active):
    """Returns a schedule in torch's form. `active`: how many microbatches of a rank may be on their way."""
    lines = []
    for rank in range(ranks):
        if pipeline == "simple":
            begins = range(0, microbatches, active)
            groups = [range(begin, min(microbatches, begin + active)) for begin in begins]
            order = [(kind, number) for group in groups for kind in "FB" for number in group]
        else:
            ahead = min(microbatches, ranks - rank, active)
            order = [("F", number) for number in range(ahead)]
            for number in range(microbatches):
                order.append(("B", number))
                if ahead + number < microbatches:
                    order.append(("F", ahead + number))
        lines.append(",".join(f"{rank}{kind}{number}" for kind, number in order))
    return "\n".join(lines) + "\n"


def units_and_cuts(model, args, kwargs):
    """Returns a function that chooses units, and the names of the units at which partitions begin, or None for the shortest step."""
    cfg, found = state.cfg, []
    for chooser in (_chooser(model), _leaves):
        found = _graph.record(model, (args, kwargs), chooser, takes_objects=True).units
        if len(found) >= cfg.pipeline_parallel_degree:
            return chooser, None if cfg.auto_partition else _cuts(model, found)
    raise SMPError(f"smp: the model has {len(found)} parts ({', '.join(found)}), and pipeline_parallel_degree is "
                   f"{cfg.pipeline_parallel_degree}: use fewer partitions")


def _chooser(model):
    """The members of lists are units, and modules that are checkpointed; modules that have parts in several partitions are none."""
    plain, mixed = _graph.unit_chooser(model), set() if state.cfg.auto_partition else _mixed(model)
    return lambda each: id(each) not in mixed and (plain(each) or getattr(each, CHECKPOINTED, False))


def _leaves(module):
    return not any(module.children()) or getattr(module, CHECKPOINTED, False)


def _mark_of(model, name):
    """Returns the mark of the innermost module around a unit, or None."""
    found, module = getattr(model, MARK, None), model
    for part in name.split("."):
        module = module.get_submodule(part)
        found = getattr(module, MARK, found)
    return found


def _mixed(model):
    """Returns the modules that have parts in several partitions, by their ids: they cannot be units."""
    found = set()

    def visit(module, around):
        own = getattr(module, MARK, around)
        below = set().union(*(visit(child, own) for child in module.children()))
        if below - {own}:
            found.add(id(module))
        return below | {own}
    visit(model, None)
    return found


def _cuts(model, units):
    """Returns the names of the first units of partitions 1, 2, ... Units without a mark are in the default partition, or, where
    the order of units does not allow it, with the unit before."""
    count, default, places, moved = state.cfg.pipeline_parallel_degree, state.cfg.default_partition, [], []
    marks = [_mark_of(model, name) for name in units]
    for number, (name, mark) in enumerate(zip(units, marks)):
        last, following = (places or [0])[-1], min([each for each in marks[number:] if each is not None], default=count)
        place = mark if mark is not None else min(max(default, last), following)
        if place < last:
            raise SMPConfigError(f"smp: {name} is marked for partition {mark}, but runs after a module of partition {last}: partitions "
                                 "must follow the order in which modules run")
        if mark is None and place != default:
            moved.append(name)
        places.append(place)
    missing = [number for number in range(count) if number not in places]
    if missing:
        raise SMPConfigError(f"smp: nothing is in partition {missing[0]}: mark modules with smp.partition({missing[0]}) or "
                             "smp.set_partition(), or set auto_partition")
    if moved:
        log(f"{', '.join(moved)} cannot be in the default partition {default}, as modules run in the order of partitions: in that "
            "of the module before")
    return [units[places.index(number)] for number in range(1, count)]
