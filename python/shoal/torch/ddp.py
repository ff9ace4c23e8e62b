"""DistributedDataParallel over Shoal's gradient engine.

    model = shoal.torch.DistributedDataParallel(model)       # instead of torch.nn.parallel.DistributedDataParallel

It is a subclass of torch's class, because programs test for that, but it shares only what torch's class does outside its
constructor: gradients go through include/shoal/gradients.h.

    forward          _Steps.open: the reducer's step begins; hooks on the outputs will show where a backward pass begins
    backward         AccumulateGrad of parameter i has run: its gradient is copied into its buffer, of which .grad becomes a view;
                     a full buffer is posted
    end of backward  a callback of the autograd engine waits for all buffers: .grad is the average

Gradients are copied once. If .grad is None, autograd keeps the tensor of the backward pass as .grad; that tensor is copied into
the buffer and freed, and the average stays in the buffer. On a device torch copies, because the engine would read the tensor
later. If .grad is still the view, as after zero_grad(set_to_none=False), autograd adds into it and nothing is copied.
docs/python.md has the details.
"""
from __future__ import annotations

import ctypes
import functools
import warnings
import weakref
import zlib

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import distributed as torchs

from .. import _native, _replicas, _scaling
from . import _checkpoint, _communicator, _divided, _gradients, _optimizer, _own_part, norm
from ._parameters import Parameters

MIB = 1 << 20
BUFFER_MIB = 25
ORDER, RESIDUALS = "shoal order", "shoal residuals"  # keys of gradient_state_dict
BROADCAST_BYTES = 250 * MIB  # size of one broadcast of parameters and buffers, as in torch
# IDLE: no forward pass waits for its backward pass. OPEN: one that averages does. LOCAL: one that averages nothing does, and
# its outputs hold no tensor that could show where its backward pass begins.
IDLE, OPEN, LOCAL = range(3)
CHANGED = "change the module before it is wrapped, or make a new DistributedDataParallel of it on all ranks"
PAST = ("a forward pass through the wrapper goes before each backward pass: was a second backward pass made after two forward "
        "passes, or the wrapped module called directly (model.module(x) instead of model(x))? Use no_sync() for backward passes "
        "that shall only add to the gradients of this rank")


class _Steps:
    """The gradients that are ready in the current step. This class calls no method of a module."""

    def __init__(self, communicator, watched, is_static, options, reduction, comparison, scaler):
        self._communicator, self._watched, self._options = communicator, watched, options
        self._reduction = reduction  # steps the optimizer, if there is one
        self._comparison, self._scaler = comparison, scaler
        self._samples = 0  # of forward passes since the last step
        self._names, self._parameters = watched.names, watched.tensors
        self.reducer = _gradients.Reducer(communicator, self._names, self._parameters, **options)
        self.is_renewed = reduction is not None  # the optimizer's states belong to the first layout
        self.is_static = is_static  # each step fires the hooks of the first one, and a parameter may have several
        self._state, self._finished, self._order_of_first = IDLE, 0, None
        self._is_begun = False  # the reducer waits for gradients
        self._expected = None  # how often each parameter's hook fires in a step of a static graph, once known
        # Graph tasks in progress: all; those that began at outputs of a step; those that began at outputs of a forward pass
        # inside no_sync(); and those that gave a parameter a gradient outside of both, with its name.
        self._tasks, self._whole_tasks, self._local_tasks, self._past = set(), set(), set(), {}
        self._is_opaque = False  # no output of the step's forward pass shows the start of its backward pass
        self._clear()
        self._nodes, self._hooks = [None] * len(self._parameters), [None] * len(self._parameters)
        self._hook_all()

    def _clear(self):
        self._ready = bytearray(len(self._parameters))
        self._ready_count = 0
        self._fired = [0] * len(self._parameters)
        self._order = {}  # parameters whose hooks fired, by the last time

    def follow(self):
        """Switches to the tensors with which the program has replaced parameters. A change that is not supported is an error on
        all ranks."""
        try:
            is_other = bool(self._watched.look())
        except RuntimeError as error:
            self.reducer.fail(_native.ERR_STATE, str(error).removeprefix("shoal: "))
            raise
        if is_other or not self._is_hooked(0):  # converting the module replaces the nodes of all parameters
            self._hook_all()

    def _is_hooked(self, index):
        return not self._parameters[index].requires_grad or _node_of(self._parameters[index]) is self._nodes[index]

    def _hook_all(self):
        """Hooks the nodes that accumulate gradients, after the hooks of others, so that their changes to a gradient are
        averaged. A tensor holds its node weakly, and has another one after a conversion. Returns true if a hook was missing."""
        missing = [index for index in range(len(self._parameters)) if not self._is_hooked(index)]
        for index in missing:
            if self._hooks[index]:
                self._hooks[index].remove()
            self._nodes[index] = _node_of(self._parameters[index])
            self._hooks[index] = self._nodes[index].register_hook(self._hook_of(index))
        return bool(missing)

    def _hook_of(self, index):
        steps = weakref.ref(self)

        def accumulated(*_):
            alive = steps()
            if alive is not None:
                alive.accumulated(index)
        return accumulated

    # ---- Forward ----

    def open(self, is_synced, is_watched, division=None):
        """Begins a step before its backward pass. is_watched: its outputs will show where the pass begins. division: see
        expect_uneven."""
        if division is not None:
            self.expect_uneven(division)
        if self._state == OPEN and self._ready_count:
            self.reducer.begin()  # raises, as the backward pass has not ended or failed
        if not is_synced:
            if not is_watched:
                self._state = LOCAL
            return
        self.follow()
        if torch._C._current_graph_task_id() < 0:  # false if a checkpoint repeats its forward pass in a backward pass
            self._clear()
            self._forget_tasks()
            self._is_opaque = not is_watched
        if self._reduction:
            self._reduction.before_step()
        self.reducer.begin()
        self._state, self._is_begun = OPEN, True

    def _forget_tasks(self):
        for tasks in (self._tasks, self._whole_tasks, self._local_tasks, self._past):
            tasks.clear()

    def _renew(self):
        """Makes the reducer again, on all ranks at the end of the first step, in the order that rank 0 saw in it. Gradients
        keep their memory until the program releases them, so that a program can always read one that it has kept."""
        self._order_of_first = self._communicator.numbers_of_first(self.reducer.order())
        self._make_again()
        self.is_renewed = True

    def _make_again(self):
        average = self.reducer.noise_average() if self.measures_noise else None
        self.reducer = _gradients.Reducer(self._communicator, self._names, self._parameters, order=self._order_of_first,
                                          **self._options)
        if average is not None:
            self.reducer.take_noise_average(average)

    # ---- The noise scale ----

    @property
    def measures_noise(self):
        return bool(self._options.get("noise_window"))

    def count_samples(self, samples):
        """Counts those of a forward pass whose gradients will be part of the step. A checkpoint may repeat a forward pass in the
        backward pass, when they have been counted."""
        if torch._C._current_graph_task_id() < 0:
            self._samples += samples
            self.reducer.set_batch(self._samples, 1 / self._scaler.get_scale() if self._scaler else 1)

    # ---- Checkpoints ----

    def state(self):
        order = torch.tensor(list(self._order_of_first or ()), dtype=torch.int64)
        return {ORDER: order, RESIDUALS: self.reducer.residuals()}

    def load(self, state):
        """Restores state() on all ranks. The layout of a step determines where sums are rounded; it follows the saved order."""
        count = len(self._parameters)
        order, residuals = state[ORDER].tolist(), state[RESIDUALS]
        if self._is_begun:
            raise RuntimeError("shoal: a forward pass waits for its backward pass: call load_gradient_state_dict between steps")
        if order and sorted(order) != list(range(count)):
            raise ValueError(f"shoal: this gradient state is of another model: it has {len(order)} parameters, here are {count}")
        if order and not self._reduction:  # else the layout stays, because the optimizer's states belong to it
            self._order_of_first = self._communicator.numbers_of_first((ctypes.c_uint32 * count)(*order))
            self._make_again()
            self.is_renewed = True
        self.reducer.take_residuals(residuals)

    # ---- Uneven numbers of batches ----

    def expect_uneven(self, division):
        """Prepares for ranks that join early. All ranks call it before the first step inside join(). division: sums are divided
        by the number of ranks that have not joined (1) or of all ranks (0)."""
        if self._reduction:
            raise NotImplementedError("shoal: join() with optimizer= is not supported: leave optimizer= out, or give all ranks equally "
                                      "many batches, as shoal.torch.DistributedSampler does")
        uneven = {"is_uneven": 1, "divides_by_active": division}
        if self._state != OPEN and not uneven.items() <= self._options.items():
            self._options.update(uneven)
            self._make_again()

    def join(self, division):
        """Takes part in a step of the others, on a rank without a further batch."""
        self.expect_uneven(division)
        if not self.reducer.join():
            raise RuntimeError("shoal: this rank joined a step that no rank made: do all make as many forward passes as backward "
                               "passes inside join()?")
        self._finished, self._samples = self._finished + 1, 0
        if not self.is_renewed:
            self._renew()

    def watch(self, outputs, is_synced):
        """Hooks the outputs. The first gradient of a backward pass is that of an output. It shows whether the pass averages,
        even if there were other forward passes in between. The outputs hold the steps, so a pass averages even if the module is
        gone."""
        def began(_):
            self._began(is_synced)
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.register_hook(began)

    def _began(self, is_synced):
        """A pass through outputs of both kinds averages, as in torch's class."""
        if is_synced and self._is_begun:
            self._state = OPEN
            self._local_tasks.discard(self._queue(self._whole_tasks))
        elif not is_synced and torch._C._current_graph_task_id() not in self._whole_tasks:
            self._queue(self._local_tasks)

    # ---- Backward ----

    def accumulated(self, index):
        """Runs when a parameter's gradient has been accumulated, for this backward pass or for one segment of a checkpoint."""
        if self._state == LOCAL or self._local_tasks:
            return
        task = self._queue()
        if self._state == IDLE:  # an error, unless an output inside no_sync() follows: raised at the end of the pass
            self._past.setdefault(task, self._names[index])
            return
        self._fired[index] += 1
        if self.is_static:
            self._order.pop(index, None)
            self._order[index] = True
            if self._expected is None or self._fired[index] != self._expected[index]:
                return
        self._mark(index)

    def _queue(self, *kinds):
        """Requests a call at the end of this graph task: of the whole backward pass, or of a reentrant checkpoint's segment.
        Adds the task to the given sets and returns it."""
        task = torch._C._current_graph_task_id()
        for kind in kinds:
            kind.add(task)
        if task not in self._tasks:
            self._tasks.add(task)
            Variable._execution_engine.queue_callback(_gradients.BackwardEnd(self, task))
        return task

    def _leave(self, task):
        """Ends the task. Returns whether it began at outputs of a step, whether it began at outputs of a forward pass inside
        no_sync(), and the name of a parameter that it gave a gradient outside of both."""
        kinds = task in self._whole_tasks, task in self._local_tasks, self._past.pop(task, None)
        for tasks in (self._tasks, self._whole_tasks, self._local_tasks):
            tasks.discard(task)
        return kinds

    def _mark(self, index):
        if self._ready[index]:
            self._fail(f"the gradient of {self._names[index]} became ready twice in one backward pass, as if a segment of a "
                       "reentrant checkpoint is used twice: pass static_graph=True, or use_reentrant=False to the checkpoint")
        gradient = self._parameters[index].grad  # None if autograd passed an undefined one
        if gradient is not None and gradient is not self.reducer.views[index]:
            self._check(index, gradient)
        tensor = self.reducer.place(index, gradient)
        self._ready[index] = 1
        self._ready_count += 1
        self.reducer.ready(index, tensor)
        self._let_go(index)

    def _let_go(self, index):
        """Releases the tensor of the backward pass. The next gradient reuses its memory, which is warm in the cache and needs
        no new page from the kernel."""
        parameter, view = self._parameters[index], self.reducer.views[index]
        if parameter.grad is not view:
            parameter.grad = view

    def _fail(self, text, status=_native.ERR_STATE, kind=RuntimeError):
        """Fails on all ranks."""
        self.reducer.fail(status, text)
        raise kind(f"shoal: {text}")

    def _check(self, index, gradient):
        parameter = self._parameters[index]
        if gradient.layout is torch.strided and gradient.dtype is parameter.dtype and gradient.device == parameter.device:
            return
        self._fail(f"the gradient of {self._names[index]} is a tensor of {gradient.layout}, {gradient.dtype} on "
                   f"{gradient.device}, but must be dense, {parameter.dtype} on {parameter.device}", _native.ERR_ARGUMENT, TypeError)

    # ---- The end of backward ----

    def backward_ended(self, task):
        is_whole, is_local, past = self._leave(task)
        if past and not is_local:
            raise RuntimeError(f"shoal: the gradient of {past} became ready outside a step: {PAST}")
        if self._state != OPEN or is_local:
            return
        if is_whole and self._is_for_parameters():
            self._finish()
        elif self._whole_tasks or is_whole:
            return
        elif self._ready_count == len(self._parameters):
            self._finish()
        elif self._is_opaque or self._options["allows_unused"]:
            self._finish_unseen()

    def _finish_unseen(self):
        """Ends a pass that began at no output, because outputs may be in an object that torch does not search. The end of a
        reentrant checkpoint's segment does not end the outer pass: a node of the outer pass is running then."""
        outer = torch._C._current_autograd_node()
        if outer is None:
            self._finish()
            return

        def asks(_):  # runs in the outer pass, and requests a call at its end
            for hook in hooks:
                hook.remove()
            self._queue()
        hooks = [node.register_prehook(asks) for node, _ in outer.next_functions if node is not None]

    def _is_for_parameters(self):
        """Returns false for torch.autograd.grad() of an output: it gives no parameter a gradient, and the step continues."""
        return any(self._fired) or self._options["allows_unused"] or self._hook_all()

    def backward_broke(self, task):
        _, is_local, _ = self._leave(task)
        if self._state == OPEN and not is_local:
            self.reducer.fail(_native.ERR_ABORTED, "an exception ended the backward pass")

    def _finish(self):
        """Waits for the averages. Only now is it certain which gradients are missing. For these, .grad may hold a value that a
        no_sync() or the step before has left; that value is averaged."""
        self._state, self._is_begun = IDLE, False
        if self.is_static:
            self._finish_static()
        if self._options["allows_unused"]:
            for index, parameter in enumerate(self._parameters):
                if not self._ready[index] and parameter.grad is not None:
                    self._mark(index)
        result = self.reducer.finish()
        self._finished, self._samples = self._finished + 1, 0
        if self._reduction:
            self._reduction.after_step(result)
        else:
            self._put_averages()
        self._compare_if_due()  # last, because it may raise

    def _put_averages(self):
        for index in range(len(self._parameters)):
            if not self._ready[index] and self.reducer.is_used(index):
                self._let_go(index)
        if not self.is_renewed:
            self._renew()

    def _compare_if_due(self):
        """Runs on all ranks at the end of a step that averages, because all ranks take part in that. Parameters are as the forward
        pass has used them, or as the optimizer in the reduction has left them. With join() a rank may hold older ones."""
        if not self._comparison.is_due(self._finished) or self._options.get("is_uneven"):
            return
        steps = self._finished if self._reduction else self._finished - 1
        different = self.reducer.difference(self._parameters, f"after step {steps}" if steps else "before the first step")
        if different:
            self._comparison.report(different)

    def _finish_static(self):
        if self._expected is None:
            self._expected = self._fired
            for index in self._order:
                self._mark(index)
        for index, (fired, expected) in enumerate(zip(self._fired, self._expected)):
            if fired != expected:
                self._fail(f"static_graph=True, but the gradient of {self._names[index]} became ready {fired} times in this "
                           f"step and {expected} times in the first one")


def _node_of(parameter):
    """The node that accumulates the parameter's gradient."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]


class _ReducerStandIn:
    """The part of torch's Reducer that other libraries use."""

    def __init__(self, module):
        self._module = weakref.ref(module)

    def prepare_for_backward(self, outputs):
        """Begins a step although the forward pass was made inside no_sync()."""
        self._module()._open(True, outputs)

    def _rebuild_buckets(self):
        return False

    def _set_static_graph(self):
        pass

    def _delay_all_reduce(self):
        pass

    def _push_all_rebuilt_params(self):
        pass


class _LoggerStandIn:
    def __init__(self, module):
        self._module = weakref.ref(module)

    def _set_static_graph(self):
        pass

    def _set_uneven_input_join(self):
        pass

    def _get_ddp_logging_data(self):
        return self._module()._get_ddp_logging_data()


def _parameters_of(module, ignored):
    """Returns names and tensors, each tensor once."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            found[name] = parameter
    return list(found), list(found.values())


class DistributedDataParallel(torchs.DistributedDataParallel):
    """torch.nn.parallel.DistributedDataParallel for modules on the CPU or on one device, over a group whose back-end is
    "shoal". It accepts torch's arguments; one that it does not support raises an error with the replacement. `compression`
    applies to the data that travel between hosts: "none", "fp16", "bf16" or "int8".

    With `optimizer` (torch.optim's SGD, Adam, AdamW or Adagrad over the module's parameters, without steps so far) each rank
    steps only its share of the parameters, as soon as their gradients are summed, and keeps only its share of the optimizer's
    states. The backward pass then ends with stepped parameters; optimizer.step() stays in the program and finds nothing to do.
    `max_norm` clips the norm of the averages before the step, in place of torch.nn.utils.clip_grad_norm_; see grad_norm().
    `grad_scaler` is the torch.amp.GradScaler that scales the loss: a step with an infinite gradient is skipped on all ranks.
    `steps_early`: with one of these two, parameters are stepped during the backward pass, and again if they have to be clipped.
    `is_atomic`: a step that fails leaves parameters and states as they were. `degree`: the number of ranks that share one copy of
    the states, or "host" for the ranks of a host; all ranks otherwise. `shard_weights`: a number for each of these ranks, whose
    share of the parameters is proportional to it; equal shares otherwise.

    `noise_scale`: True measures in each step how noisy gradients are, from norms that the engine sums anyway; see noise_scale().
    A number is the number of steps over which it is averaged, 100 otherwise. `samples_of(*inputs, **kwargs)` returns the samples of
    a forward pass; otherwise they are the first dimension of its first tensor. Without optimizer=, pass grad_scaler= also, if there
    is one.

    In the first step and every `compare_every` steps the ranks compare hashes of their parameters. If these differ, every rank
    warns once, with the name of the first such parameter and the ranks that differ from the majority. With `compare_raises` the
    backward pass raises an error instead. The default is 100, or 0 (never) if the module is on a device, from which its parameters
    would have to be copied. From the first join() on, ranks do not compare."""

    def __init__(self, module, device_ids=None, output_device=None, dim=0, broadcast_buffers=None, init_sync=True,
                 process_group=None, bucket_cap_mb=None, find_unused_parameters=False, check_reduction=False,
                 gradient_as_bucket_view=False, static_graph=False, delay_all_reduce_named_params=None,
                 param_to_hook_all_reduce=None, mixed_precision=None, device_mesh=None, skip_all_reduce_unused_params=False,
                 bucket_cap_mb_list=None, batched_grad_copy=False, forward_sync_buffers=None, lazy_bucket_allocation=False,
                 *, compression="none", optimizer=None, max_norm=None, grad_scaler=None,
                 steps_early=False, is_atomic=False, degree=None, shard_weights=None, compare_every=None, compare_raises=False,
                 noise_scale=False, samples_of=None):
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        _refuse(delay_all_reduce_named_params=delay_all_reduce_named_params, param_to_hook_all_reduce=param_to_hook_all_reduce,
                mixed_precision=mixed_precision, bucket_cap_mb_list=bucket_cap_mb_list)
        if compression not in _gradients.COMPRESSIONS:
            raise ValueError(f"shoal: compression is \"{compression}\", but must be one of {', '.join(_gradients.COMPRESSIONS)}")
        self._noise_window, self._samples_of = _scaling.window_of(noise_scale), samples_of or _samples_of
        if optimizer is None and not (max_norm is None and (grad_scaler is None or self._noise_window)):
            raise ValueError("shoal: max_norm and grad_scaler are for optimizer=: without it, call clip_grad_norm_ and scaler.unscale_")
        if optimizer is None and shard_weights is not None:
            raise ValueError("shoal: shard_weights are for optimizer=: without it, every rank steps all parameters")
        self.module = module
        if degree not in (None, "host") and not (isinstance(degree, int) and degree > 0):
            raise ValueError(f"shoal: degree is {degree!r}, but must be a number of ranks, \"host\" or None")
        _own_part.refuse_stages(module, "DistributedDataParallel")
        _divided.refuse_max_norm(module, max_norm)
        self._optimizer = (optimizer, max_norm, grad_scaler)
        self._shard_weights = shard_weights
        self._modes = {"steps_early": steps_early, "is_atomic": is_atomic,
                       "degree": _native.DEGREE_HOST if degree == "host" else degree or 0}
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.device = _device_of(*_parameters_of(module, self.parameters_to_ignore))
        every = first(compare_every, _replicas.EVERY if self.device.type == "cpu" else 0)
        self._comparison = _replicas.Comparison(every, compare_raises, _gradients.BackendError)
        self.device_ids, self.output_device = _check_device_ids(self.device, device_ids, output_device)
        self.process_group = _group_of(process_group, device_mesh, self.device.type)
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.compression, self.dim = gradient_as_bucket_view, compression, dim
        self.skip_all_reduce_unused_params, self.batched_grad_copy = skip_all_reduce_unused_params, batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.forward_sync_buffers = first(forward_sync_buffers, broadcast_buffers, True)
        if not isinstance(getattr(type(self), "broadcast_buffers", None), property):  # in older versions of torch
            self.broadcast_buffers = self.forward_sync_buffers
        self.bucket_bytes_cap = int(first(bucket_cap_mb, BUFFER_MIB) * MIB)
        self.bucket_bytes_cap_list, self.bucket_bytes_cap_default = [], bucket_cap_mb is None
        self._set_what_others_read()
        self._begin()
        if init_sync:
            _compare_shapes(self.process_group, *_parameters_of(module, self.parameters_to_ignore))
            _sync_module_states(self, first(None if forward_sync_buffers is None else True, broadcast_buffers, True))

    def _set_what_others_read(self):
        """Sets the attributes of torch's class that its methods or other libraries read."""
        self.device_type, self.mixed_precision = self.device.type, None
        self.is_multi_device_module, self.require_backward_grad_sync, self.require_forward_param_sync = False, True, True
        self.broadcast_bucket_size = BROADCAST_BYTES
        self.use_side_stream_for_tensor_copies = self._use_python_reducer = self._delay_all_reduce_all_params = False
        self._delay_all_reduce_params, self._comm_hooks, self._lazy_init_ran = [], [], True
        self._is_batch_seen = False

    def _begin(self):
        """Makes the communicator and the reducer, which compares the parameters of all ranks. A collective call."""
        watched = Parameters(self.module, self.parameters_to_ignore, CHANGED)
        _check_parameters(watched.names, watched.tensors)
        group = self.process_group
        self._module_parameters = watched.tensors
        self._assign_modules_buffers()
        timeout = _communicator.timeouts.get(f"torch.{group.group_name}")
        communicator = _gradients.Communicator(dist.distributed_c10d._get_process_group_store(group), group.rank(), group.size(),
                                               timeout, "gradients")
        options = {
            "buffer_bytes": self.bucket_bytes_cap, "first_buffer_bytes": min(MIB, self.bucket_bytes_cap),
            "allows_unused": int(self.find_unused_parameters or self.static_graph),
            "compression": _gradients.COMPRESSIONS[self.compression],
            "timeout_ms": _communicator.milliseconds(timeout), "noise_window": self._noise_window,
        }
        _leave_forward_to_python()
        self._reduction = self._reduction_of(watched, communicator)
        if self._reduction:
            options.update(self._reduction.options())
        scaler = None if self._reduction else self._optimizer[2]  # an optimizer in the reduction divides by the scale
        self._steps = _Steps(communicator, watched, self.static_graph, options, self._reduction, self._comparison, scaler)
        if self._reduction:
            self._reduction.attach(self._steps.reducer)
        self.reducer, self.logger = _ReducerStandIn(self), _LoggerStandIn(self)

    def _reduction_of(self, watched, communicator):
        optimizer, max_norm, grad_scaler = self._optimizer
        if optimizer is None:
            return None
        return _optimizer.Reduction(optimizer, watched.names, watched.tensors, self.process_group.rank(), max_norm, grad_scaler,
                                    weights=self._weights_of(communicator), **self._modes)

    def _weights_of(self, communicator):
        """shard_weights for the engine: one for each rank that shares a copy of the states."""
        degree = self._modes["degree"]
        team = communicator.local_size() if degree == _native.DEGREE_HOST else degree or self.process_group.size()
        return _optimizer.weights_of(self._shard_weights, team)

    # ---- A step ----

    def forward(self, *inputs, **kwargs):
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            if not self._is_batch_seen:
                self._tell_small_batch(inputs, kwargs)
            self._before_forward()
            if self.device_ids:
                (inputs,), (kwargs,) = torchs._to_kwargs(inputs, kwargs, self.device, False)
            with self._inside_ddp_forward():  # so that torch.compile divides the module's graph
                outputs = self.module(*inputs, **kwargs)
            self._after_forward(outputs)
            if self._noise_window:
                self._count_samples(inputs, kwargs)
            return outputs

    @torch._disable_dynamo
    def _count_samples(self, inputs, kwargs):
        if torch.is_grad_enabled():
            self._steps.count_samples(self._samples_of(*inputs, **kwargs))

    @torch._disable_dynamo
    def _tell_small_batch(self, inputs, kwargs):
        """Warns once, at the first batch in training, if batch norm uses only this worker's samples and these are few."""
        if not self.module.training:
            return
        self._is_batch_seen = True
        first_batch = next((one for one in (*inputs, *kwargs.values()) if torch.is_tensor(one) and one.dim()), None)
        local = norm.local_norms(self.module) if self.process_group.size() > 1 and first_batch is not None else []
        if local and len(first_batch) < norm.SMALL_BATCH and self.process_group.rank() == 0:
            warnings.warn(f"shoal: rank 0 of {self.process_group.size()} has {len(first_batch)} samples in its batch, and batch norm in "
                          f"{len(local)} layers, such as \"{local[0]}\", computes mean and variance of these alone, which is inexact "
                          f"below {norm.SMALL_BATCH}: write model = shoal.torch.convert_sync_batchnorm(model) before "
                          "DistributedDataParallel(model), or use more samples for each worker", stacklevel=4)

    @torch._disable_dynamo
    def _before_forward(self):
        if not self._join_config.enable:
            if self.will_sync_module_buffers():
                self._sync_buffers()
            return
        told = Join.notify_join_context(self)  # ranks that have joined make the same three calls, see torch's _DDPJoinHook
        if told:
            told.wait()
        if self.will_sync_module_buffers():
            self._sync_buffers()
        self._check_global_requires_backward_grad_sync(is_joined_rank=False)

    @torch._disable_dynamo
    def _after_forward(self, outputs):
        is_synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = is_synced
        if torch.is_grad_enabled():
            self._open(is_synced, outputs)

    def _open(self, is_synced, outputs):
        tensors = list(torchs._find_tensors(outputs))
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        is_watched = bool(trained) and all(tensor.grad_fn is not None for tensor in trained)
        self._steps.open(is_synced, is_watched, self._division() if self._join_config.enable else None)
        self._steps.watch(trained, is_synced)

    def noise_scale(self):
        """With noise_scale=True: how noisy gradients are (shoal.torch.Noise), over about the last 100 steps. print() of it says what
        the batch is in units of the noise scale, and what twice the batch would cost. A local call, between steps."""
        self._check_noise()
        return self._steps.reducer.noise()

    def noise_state_dict(self):
        """Returns the averages of the noise scale, for a checkpoint; they are the same on all ranks. ScaledLR saves them with its
        own state."""
        self._check_noise()
        return _scaling.save_average(self._steps.reducer.noise_average())

    def load_noise_state_dict(self, state):
        """Restores noise_state_dict(), on all ranks, between steps."""
        self._check_noise()
        self._steps.reducer.take_noise_average(_scaling.load_average(state))

    def _check_noise(self):
        if not self._noise_window:
            raise RuntimeError("shoal: the noise scale is not measured: pass noise_scale=True to DistributedDataParallel")

    def grad_norm(self):
        """With optimizer= and max_norm=: the norm of the last step's averages, before they were clipped; None before a step."""
        return self._reduction.norm() if self._reduction else None

    def save_checkpoint(self, folder, step, extra=None, keep=0):
        """With optimizer=: saves a sharded checkpoint of the module and its optimizer at `folder`, in which each rank writes
        its share. All ranks call it between steps; it returns when the checkpoint is on the disk. `extra` of rank 0 is saved
        with it: tensors, numbers, strings, and lists and dicts of these. keep: how many checkpoints stay; 0 for all. Frozen
        parameters are not saved."""
        reduction = self._reduction_for("save_checkpoint", "torch.save")
        _checkpoint.save(self.module, self.process_group, reduction, folder, step, extra, keep)

    def load_checkpoint(self, folder, step=None):
        """With optimizer=: loads a checkpoint that any number of ranks has saved; None for the latest. All ranks call it
        between steps. It replaces parameters, buffers, states and the settings of groups. After an error nothing has
        changed. Returns (step, extra)."""
        reduction = self._reduction_for("load_checkpoint", "torch.load")
        return _checkpoint.load(self.module, self.process_group, reduction, folder, step)

    def _reduction_for(self, name, other):
        if not self._reduction:
            raise RuntimeError(f"shoal: {name}() is for modules with optimizer=, whose states are divided: without it, every rank has "
                               f"all of them: use {other} with the state_dict() of module and optimizer")
        self._steps.follow()  # the program may have replaced parameters
        return self._reduction

    def compare_parameters(self):
        """Checks that parameters are equal on all ranks. All call it between steps, for example every 100 steps. The error
        names the first parameter that differs, and the ranks that differ from the majority. The module stays usable."""
        self._steps.follow()
        self._steps.reducer.compare(self._module_parameters)

    # ---- Saved and copied ----

    def __getstate__(self):
        if self._reduction:
            raise TypeError("shoal: a module with optimizer= cannot be copied or pickled: save module.state_dict(), and the "
                            "optimizer's after consolidate_state_dict()")
        self._check_default_group()
        state = dict(self.__dict__)
        for name in ("process_group", "reducer", "logger", "_steps", "_module_parameters", "modules_buffers",
                     "named_module_buffers"):
            state.pop(name, None)
        return state

    def __setstate__(self, state):
        """Restores a saved module. All ranks do this together. The module may be on another device than when it was saved."""
        torch.nn.Module.__setstate__(self, state)
        self.device = _device_of(*_parameters_of(self.module, self.parameters_to_ignore))
        self.device_type = self.device.type
        moves_inputs = self.device_ids and self.device_type != "cpu"
        self.device_ids, self.output_device = ([self.device.index], self.device.index) if moves_inputs else (None, None)
        self.process_group = _group_of(None, None, self.device.type)
        self._begin()

    def gradient_state_dict(self):
        """Returns what the next step needs, besides the module and its optimizer, to produce the same bits as without an
        interruption: the order of gradients in the buffers, and what int8 has cut off on this rank. Each rank saves its own,
        between steps."""
        return self._steps.state()

    def load_gradient_state_dict(self, state):
        """Restores gradient_state_dict(). All ranks call it between steps, each with its own state. The numbers of ranks and
        hosts must be the same as when it was saved."""
        if not {ORDER, RESIDUALS} <= set(state):
            raise ValueError(f"shoal: this is not a gradient_state_dict: it has no \"{ORDER}\" or no \"{RESIDUALS}\"")
        self._steps.load(state)

    # ---- What torch's class can do besides ----

    def _set_static_graph(self):
        if self._steps._finished or self._steps._ready_count:
            raise RuntimeError("shoal: static_graph can be set before the first step only: pass static_graph=True")
        if not self.static_graph and self._reduction:
            raise RuntimeError("shoal: with optimizer= static_graph cannot be set later: pass static_graph=True")
        if not self.static_graph:
            warnings.warn("shoal: pass static_graph=True to DistributedDataParallel instead: the reducer is made again",
                          stacklevel=2)
            self.static_graph = True
            self._begin()

    def _get_ddp_logging_data(self):
        stats = self._steps.reducer.stats()
        told = {
            "module_name": type(self.module).__name__, "backend_name": "shoal", "world_size": self.process_group.size(),
            "rank": self.process_group.rank(), "iteration": self._steps._finished, "bucket_cap_bytes": self.bucket_bytes_cap,
            "broadcast_buffers": int(self.forward_sync_buffers), "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": 1, "static_graph": int(self.static_graph), "can_set_static_graph": 0,
            "has_rebuilt_buckets": int(self._steps.is_renewed), "num_parameter_tensors": len(self._module_parameters),
            "comm_hook": "" if self.compression == "none" else self.compression,
        }
        if stats:
            told.update((name, getattr(stats, name)) for name, _ in stats._fields_ if name != "struct_bytes")
        return told

    def register_comm_hook(self, state, hook):
        raise NotImplementedError("shoal: shoal.torch.DistributedDataParallel takes no communication hook: write compression="
                                  "\"fp16\", \"bf16\" or \"int8\", or use torch.nn.parallel.DistributedDataParallel for a hook of "
                                  "your own")

    def _register_builtin_comm_hook(self, comm_hook_type):
        self.register_comm_hook(None, comm_hook_type)

    def _register_buffer_comm_hook(self, state, hook, comm_hook_location=None):
        self.register_comm_hook(state, hook)

    def _register_fused_optim(self, optim, *args, optim_params=None, **kwargs):
        self.register_comm_hook(None, optim)

    # join() and join_hook() are torch's. Its hook calls these on a rank that has no further batch.

    def _division(self):
        return 0 if self._divide_by_initial_world_size else 1

    def _match_all_reduce_for_bwd_pass(self):
        self._steps.join(self._division())

    def _match_unused_params_allreduce(self):
        """Does nothing: the reducer's steps include this."""

    def _update_process_group(self, new_process_group):
        raise NotImplementedError("shoal: the group cannot be changed: make a new DistributedDataParallel of the same module")


def _samples_of(*inputs, **kwargs):
    """Returns the first dimension of a forward pass's first tensor, or 1."""
    first_tensor = next((one for one in (*inputs, *kwargs.values()) if torch.is_tensor(one) and one.dim()), None)
    return 1 if first_tensor is None else len(first_tensor)


@functools.lru_cache(maxsize=None)
def _leave_forward_to_python():
    """Makes torch.compile skip forward and continue with the functions that it calls. It does so for torch's class, whose file
    it skips. The import takes seconds, as it does in the first forward pass of torch's class."""
    from torch._dynamo import decorators
    decorators.skip(DistributedDataParallel.forward)


def first(*values):
    """Returns the first value that is not None."""
    return next(value for value in values if value is not None)


def _refuse(**options):
    for name, value in options.items():
        if torch.is_tensor(value) or value:
            raise NotImplementedError(f"shoal: shoal.torch.DistributedDataParallel has no {name}: leave it out, or use "
                                      "torch.nn.parallel.DistributedDataParallel")


def _group_of(group, mesh, device_type):
    """Returns the process group; raises an error if Shoal does not serve it."""
    import shoal.torch
    if group is not None and mesh is not None:
        raise ValueError("shoal: pass process_group or device_mesh, not both")
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(f"shoal: device_mesh has {mesh.ndim} dimensions: pass the one of data parallelism, such as mesh[\"dp\"]")
        group = mesh.get_group()
    group = first(group, dist.group.WORLD, False)
    if not group:
        raise RuntimeError('shoal: there is no process group yet: call torch.distributed.init_process_group("shoal") first')
    if not shoal.torch._serves(group, device_type):
        backend, beside = shoal.torch._backend_for(group, device_type), ' (with NCCL: "cpu:shoal,cuda:nccl")' * (device_type == "cpu")
        raise ValueError(f"shoal: tensors of {_words_of(device_type)} in this process group are {backend}'s, and "
                         "shoal.torch.DistributedDataParallel needs \"shoal\": write torch.distributed.init_process_group(\"shoal\")"
                         f'{beside}, or process_group=torch.distributed.new_group(backend="shoal")')
    return group


def _words_of(device_type):
    return "the CPU" if device_type == "cpu" else f"{device_type} devices"


def _device_of(names, parameters):
    """Returns the device of all parameters: the CPU, or one that CUDA's driver knows."""
    devices = {}
    for name, parameter in zip(names, parameters):
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        (first_device, first_name), (other_device, other_name) = list(devices.items())[:2]
        raise ValueError(f"shoal: parameter {first_name} is on {first_device}, and {other_name} on {other_device}, but "
                         "shoal.torch.DistributedDataParallel serves models on one device: use "
                         "torch.nn.parallel.DistributedDataParallel, over \"shoal\" as well")
    return next(iter(devices), torch.device("cpu"))


def _check_device_ids(device, device_ids, output_device):
    """Returns both as attributes of torch's class. Each may name the module's own device, to which inputs are then moved."""
    for name, given in (("device_ids", device_ids or []), ("output_device", [] if output_device is None else [output_device])):
        named = [torch.device(device.type, each) if isinstance(each, int) else torch.device(each) for each in given]
        if named not in ([], [device]) or (named and device.type == "cpu"):
            raise ValueError(f"shoal: {name}={given if name == 'device_ids' else given[0]}, but the module is on {device}: leave it "
                             "out, or name that GPU")
    return ([device.index], first(output_device, device.index)) if device_ids else (None, None)


def _check_parameters(names, parameters):
    if not parameters:
        raise RuntimeError("shoal: DistributedDataParallel is not needed when a module doesn't have any parameters that require a "
                           "gradient")
    for name, parameter in zip(names, parameters):
        if parameter.dtype not in _gradients.TYPES:
            raise TypeError(f"shoal: parameter {name} is of {parameter.dtype}, but gradients are averaged of "
                            f"{', '.join(str(each).removeprefix('torch.') for each in _gradients.TYPES)}: convert it, or freeze it "
                            "with requires_grad_(False)")


def _compare_shapes(group, names, parameters):
    """Compares the parameters' shapes on all ranks; the reducer compares names, types and numbers of elements."""
    shapes = [list(parameter.shape) for parameter in parameters]
    digest = torch.tensor([zlib.crc32(str(shapes).encode())], device=parameters[0].device)
    digests = [torch.empty_like(digest) for _ in range(group.size())]
    dist.all_gather(digests, digest, group=group)
    if all(torch.equal(each, digest) for each in digests):
        return
    told = [None] * group.size()
    dist.all_gather_object(told, shapes, group=group)
    for index, name in enumerate(names):
        for rank, theirs in enumerate(told):
            if theirs[index] != told[0][index]:
                raise RuntimeError(f"shoal: models differ: parameter {name} has the shape {told[0][index]} on rank 0 and "
                                   f"{theirs[index]} on rank {rank}: build the same model on all ranks")


def _sync_module_states(ddp, has_buffers):
    """Copies rank 0's parameters and buffers to every rank."""
    tensors = [tensor.detach() for name, tensor in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]
    if has_buffers:
        tensors += [buffer.detach() for buffer in ddp.modules_buffers]
    if tensors:
        dist._broadcast_coalesced(ddp.process_group, tensors, BROADCAST_BYTES, 0)
