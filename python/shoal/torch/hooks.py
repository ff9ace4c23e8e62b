"""Communication hooks for torch.nn.parallel.DistributedDataParallel: Shoal's gradient engine averages the gradients.

    from shoal.torch import hooks
    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(hooks.State(), hooks.int8_hook)          # or fp16_hook, bf16_hook

Inside a host gradients keep their precision. Between hosts float32 gradients travel in the named format; with int8 each rank
adds in the next step what quantizing has cut off in this one. Each bucket of DDP is a parameter of a reducer
(include/shoal/gradients.h): the hook marks it. The hook of a step's last bucket waits for all of them, when no computation is
left. docs/python.md has the details.

If an exception ends a backward pass, the other ranks are notified at once. They may wait in one of two places, and both fail:
in the reducer of the buckets, or in the meeting that precedes making a reducer at the end of a step.
"""
import ctypes
import weakref

import torch
from torch.autograd import Variable
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import distributed as torchs

from .. import _native
from . import _communicator, _gradients

MIB = 1 << 20
BUCKETS, RESIDUALS = "shoal buckets", "shoal residuals"  # keys of state_dict


class State:
    """What a hook keeps from step to step: its communicator, and what int8 has cut off. Each model needs its own, passed to
    register_comm_hook. All ranks make it together. process_group: the model's; None means the default group."""

    def __init__(self, process_group=None):
        self.process_group = process_group
        self._communicator, self._timeout = _join(process_group)
        self._meeting = _gradients.Reducer(self._communicator, ["buckets"], [torch.zeros(1)], results_in_views=0,
                                           timeout_ms=_communicator.milliseconds(self._timeout))
        self._compression = self._reducer = None
        self._saved = None  # from load_state_dict, until the buckets match it
        self._known = set()  # ids of the model's parameters
        self._buckets, self._futures, self._marked = [], [], 0  # of the current step; how many of them the reducer has
        self._task = -1  # the graph task whose end is watched
        _find_model(self)

    def average(self, bucket, compression):
        """Returns a future of the bucket's average, which is written into the bucket."""
        self._check(bucket, compression)
        self._backward_began()
        self._buckets.append(bucket.buffer())
        self._futures.append(torch.futures.Future())
        future = self._futures[-1]
        self._known.update(map(id, bucket.parameters()))
        if self._is_as_before(bucket):
            self._mark()
        if bucket.is_last():
            self._finish()
        return future

    # ---- Where a backward pass begins and ends ----

    @torch._disable_dynamo
    def watch(self, model, _, outputs):
        """A hook of the model's forward pass. An output has its gradient before any bucket is full: in the first step DDP has
        only one bucket, which is full at the end."""
        if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
            return
        state = weakref.ref(self)

        def began(_):
            alive = state()
            if alive is not None:
                alive._backward_began()
        for tensor in torchs._find_tensors(outputs):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(began)

    def _backward_began(self):
        task = torch._C._current_graph_task_id()
        if task >= 0 and task != self._task:  # a rank that has joined is not in a backward pass
            self._task = task
            Variable._execution_engine.queue_callback(_gradients.BackwardEnd(self, task))

    def backward_ended(self, _):
        pass

    def backward_broke(self, _):
        """Fails the reducers, even after the last bucket, because torch's class then refuses every later step on this rank."""
        for reducer in (self._reducer, self._meeting):
            if reducer:
                reducer.fail(_native.ERR_ABORTED, "an exception ended the backward pass")

    def _check(self, bucket, compression):
        tensor = bucket.buffer()
        if tensor.device.type != "cpu":
            raise ValueError(f"shoal: gradients are on {tensor.device}, but Shoal's hooks serve modules on the CPU: leave the hook out")
        if tensor.dtype not in _gradients.TYPES:
            raise TypeError(f"shoal: gradients are of {tensor.dtype}, but the hooks average those of "
                            f"{', '.join(str(each).removeprefix('torch.') for each in _gradients.TYPES)}")
        if self._compression not in (None, compression):
            raise RuntimeError(f"shoal: this hooks.State serves {self._compression}_hook and was also given to {compression}_hook: "
                               "make a State for each")
        self._compression = compression
        if bucket.index() != len(self._buckets):
            (self._reducer or self._meeting).begin()  # raises the cause if the backward pass before this one has failed
            raise RuntimeError(f"shoal: bucket {bucket.index()} came where bucket {len(self._buckets)} was expected: did an exception "
                               "end a backward pass, or do two models share a hooks.State? Make the module and its State again")
        if self._reducer and id(bucket.parameters()[0]) not in self._known:
            raise RuntimeError("shoal: a hooks.State was given to two models: make one for each")

    def _is_as_before(self, bucket):
        """Returns true if the reducer has this bucket and all buckets before it. DDP makes its buckets again after the first
        step."""
        index = bucket.index()
        return (self._reducer is not None and index == self._marked and index < self._reducer.count
                and bucket.is_last() == (index == self._reducer.count - 1)
                and self._reducer.is_of(index, self._buckets[index]))

    def _mark(self):
        if self._marked == 0:
            self._reducer.begin()
        self._reducer.ready(self._marked, self._buckets[self._marked])
        self._marked += 1

    def _finish(self):
        marked = self._mark_anew() if self._marked < len(self._buckets) else []
        self._reducer.finish()
        del marked  # kept until here, as it was written to
        done = list(zip(self._futures, self._buckets))
        self._buckets, self._futures, self._marked = [], [], 0
        for future, tensor in done:
            future.set_result(tensor)

    def _mark_anew(self):
        """Makes a new reducer. All ranks do so in the same step, because their buckets are the same. The old reducer averages
        the buckets that it has; the new one gets copies of them. Returns what was marked."""
        self._meet()
        averaged = self._marked
        if averaged:
            rest = self._reducer.zeros_from(averaged)
            for index, tensor in enumerate(rest, averaged):
                self._reducer.ready(index, tensor)
            self._reducer.finish()
        self._reducer = self._make_reducer()
        marked = [tensor.clone() if index < averaged else tensor for index, tensor in enumerate(self._buckets)]
        self._reducer.begin()
        for index, tensor in enumerate(marked):
            self._reducer.ready(index, tensor)
        return marked

    def _meet(self):
        """Waits for all ranks before they make a reducer. Raises the cause if one of them does not come."""
        zero = torch.zeros(1)
        self._meeting.begin()
        self._meeting.ready(0, zero)
        self._meeting.finish()

    # ---- Checkpoints ----

    def state_dict(self):
        """Returns what int8 has cut off on this rank, for DDP's current buckets. Each rank saves its own, between steps."""
        if not self._reducer:
            return {BUCKETS: [], RESIDUALS: torch.empty(0, dtype=torch.uint8)}
        return {BUCKETS: self._reducer.forms(), RESIDUALS: self._reducer.residuals()}

    def load_state_dict(self, state):
        """Restores state_dict(). All ranks call it before a step, each with its own state. It takes effect once DDP's buckets
        match the saved ones: at once if DDP never makes them again (find_unused_parameters), else after the first step."""
        if not {BUCKETS, RESIDUALS} <= set(state):
            raise ValueError(f"shoal: this is not a state_dict of hooks.State: it has no \"{BUCKETS}\" or no \"{RESIDUALS}\"")
        self._saved = state if state[BUCKETS] else None
        if self._reducer:
            self._take_saved(self._reducer)

    def _take_saved(self, reducer):
        if self._saved and reducer.forms() == self._saved[BUCKETS]:
            reducer.take_residuals(self._saved[RESIDUALS])
            self._saved = None

    def _make_reducer(self):
        count = len(self._buckets)
        longest = max(tensor.numel() * tensor.element_size() for tensor in self._buckets)
        reducer = _gradients.Reducer(
            self._communicator, [f"bucket {index}" for index in range(count)], self._buckets,
            order=(ctypes.c_uint32 * count)(*range(count)), results_in_views=0, buffer_bytes=min(max(longest, 1), 25 * MIB),
            first_buffer_bytes=min(max(longest, 1), MIB), compression=_gradients.COMPRESSIONS[self._compression],
            timeout_ms=_communicator.milliseconds(self._timeout))
        self._take_saved(reducer)
        return reducer


def _join(group):
    """Returns a communicator of the group's ranks, and the group's timeout."""
    group = group or torch.distributed.group.WORLD
    if not group:
        raise RuntimeError("shoal: there is no process group yet: call torch.distributed.init_process_group before hooks.State()")
    timeout = _communicator.timeouts.get(f"torch.{group.group_name}")
    store = torch.distributed.distributed_c10d._get_process_group_store(group)
    return _gradients.Communicator(store, group.rank(), group.size(), timeout, "gradients"), timeout


def _find_model(state):
    """Finds the State's model, which torch does not pass to it: checks each module that is called, until it finds the one whose
    hook has this State."""
    wanted = weakref.ref(state)

    @torch._disable_dynamo
    def called(module, _):
        alive = wanted()
        is_found = isinstance(module, torchs.DistributedDataParallel) and any(each is alive for _, each in module._comm_hooks)
        if alive is None or is_found:
            handle.remove()
        if alive is not None and is_found:
            module.register_forward_hook(alive.watch)
    handle = register_module_forward_pre_hook(called)


def _average(state, bucket, compression):
    if not isinstance(state, State):
        raise TypeError(f"shoal: the state of {compression}_hook is {type(state).__name__}, but must be a hooks.State: write "
                        f"model.register_comm_hook(hooks.State(process_group), hooks.{compression}_hook)")
    return state.average(bucket, compression)


def fp16_hook(state, bucket):
    """Sends float32 gradients as float16 between hosts. For register_comm_hook with a State."""
    return _average(state, bucket, "fp16")


def bf16_hook(state, bucket):
    """Sends float32 gradients as bfloat16 between hosts. For register_comm_hook with a State."""
    return _average(state, bucket, "bf16")


def int8_hook(state, bucket):
    """Sends blocks of 256 values with a scale between hosts, with error feedback. For register_comm_hook with a State."""
    return _average(state, bucket, "int8")
