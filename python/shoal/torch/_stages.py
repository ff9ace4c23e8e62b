"""The stages of this rank: what they compute for a microbatch, and what they keep of it until its backward pass."""
from __future__ import annotations

import contextlib
import typing

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import _native
from . import _backward, _parcels, _shares


class Kept(typing.NamedTuple):
    """What a stage keeps of a microbatch until its backward pass: the messages that it has received, the tensors of each message
    that it has sent, and its loss."""
    received: list
    sent: list
    loss: typing.Any


class Stage:
    """A stage. modules: by mode, True for training: the stage as Split.module() returns it, and the sources and targets that it
    has in this mode. sources and targets: those of all modes, to which a message always goes. team: of tensor parallelism, or None.
    shares: StageShares if some stages have replicas, or None. ways_in and ways_out: the stage from or to which each message goes."""

    def __init__(self, number, modules, sources, targets, is_last, team=None, shares=None):
        self.number, self.is_last, self._team, self.shares = number, is_last, team, shares
        self._modules, self.sources, self.targets = modules, sources, targets
        self.ways_in = [stage for stage, _ in shares.ways(sources)] if shares else sources
        self.ways_out = [stage for stage, _ in shares.ways(targets)] if shares else targets
        self._without_gradient = []  # parameters that had none when the pass began
        self.parameters = list({id(each): each for module, _, _ in modules.values() for each in module.parameters()}.values())

    def begin(self):
        """Begins a pass, behind whatever puts gradients of former steps aside."""
        self._without_gradient = [each for each in self.parameters if each.grad is None]

    def forward(self, is_training, inputs, received, samples=None):
        """Returns what to send in each message, and the model's result. inputs: the tensors of the batch on the first stage, objects
        on others. samples: with shares, the number of samples of the microbatch."""
        module, sources, targets = self._modules[is_training]
        if self.shares and received:
            arrived = self.shares.join(is_training, self.sources, received, samples)
        else:
            arrived = dict(zip(self.sources, (each.value for each in received)))
        if self._team is not None:
            arrived = {source: self._team.unpacked(value) for source, value in arrived.items()}
        sent, result = module(*inputs, *(arrived[source] for source in sources))
        if self._team is not None:
            sent, result = [self._team.packed(value) for value in sent], self._team.whole(result)
        sent = dict(zip(targets, sent))
        if self.shares:
            return self.shares.cut(is_training, self.targets, sent, samples) if self.targets else [], result
        return [sent.get(target, []) for target in self.targets], result

    @contextlib.contextmanager
    def statistics_kept(self):
        """Undoes at the end what changes the statistics of normalizations, which count each microbatch once."""
        modules = {each for module, _, _ in self._modules.values() for each in module.modules()}
        former = [(buffer, buffer.clone()) for each in modules if isinstance(each, nn.modules.batchnorm._NormBase)
                  for buffer in each.buffers(recurse=False)]
        yield
        for buffer, value in former:
            buffer.data.copy_(value)  # behind autograd's back, which may have saved the buffer

    def backward(self, kept, received):
        """Adds up the gradients of parameters. Returns for each source the gradients of its tensors."""
        roots, gradients = _roots_of(kept, received)
        if roots:
            torch.autograd.backward(roots, gradients)
        self._leave_messages(received)
        return [[tensor.grad for tensor in each.tensors] for each in kept.received]

    def input_gradients(self, kept, received):
        """Returns for each source the gradients of its tensors, and a function that adds up those of parameters."""
        roots, gradients = _roots_of(kept, received)
        leaves = [tensor for each in kept.received for tensor in each.tensors if tensor.requires_grad]
        found, deferred = _backward.input_gradients(roots, gradients, leaves)
        of = {id(leaf): gradient for leaf, gradient in zip(leaves, found)}

        def rest():
            deferred()
            self._leave_messages(received)
        return [[of.get(id(tensor)) for tensor in each.tensors] for each in kept.received], rest

    def _leave_messages(self, received):
        """Autograd may leave a view of a message as the first gradient of a parameter; to the next ones it adds. The message's memory
        is used again."""
        if not self._without_gradient:
            return
        addresses = {each.address for each in received}
        for parameter in self._without_gradient:
            gradient = parameter.grad
            if gradient is not None and gradient.untyped_storage().data_ptr() in addresses:
                parameter.grad = gradient.clone()
        self._without_gradient = [each for each in self._without_gradient if each.grad is None]


def _roots_of(kept, received):
    """Returns the tensors at which the backward pass begins, and their gradients."""
    if kept.loss is not None:
        return ([kept.loss], [None]) if kept.loss.requires_grad else ([], [])
    pairs = [(tensor, gradient) for sent, arrived in zip(kept.sent, received) for tensor, gradient in zip(sent, arrived.value or [])
             if gradient is not None and tensor.requires_grad]
    return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]


# ---- A pass ----------------------------------------------------------------------------------------------------------------


class Pass:
    """The actions of this rank in one step, or in one evaluation (loss is None). batch: a Batch of inputs and targets.
    sum_replicas(stage) and sum_tied(tie) begin the sums of gradients that are complete. takes_objects: values of any type may go
    from stage to stage. keeps_results: the model's results are wanted."""

    def __init__(self, stages, batch, loss, is_training, executor, sum_replicas, sum_tied, takes_objects=False, keeps_results=False):
        self._stages, self._takes_objects, self._keeps_results = {stage.number: stage for stage in stages}, takes_objects, keeps_results
        self._sum_replicas, self._sum_tied = sum_replicas, sum_tied
        self._batch, self._loss, self._is_training, self._executor = batch, loss, is_training, executor
        self._kept, self._rest, self._draws = {}, {}, {}
        self.results, self.samples = {}, {}  # by microbatch: what the model returns, and with shares the samples that it is of
        self.loss, self.scale = 0.0, 1.0  # the mean over all samples; what gradients are those of is `scale` times as large

    def begin(self):
        """Call it before the first action, when gradients are as the pass finds them."""
        for stage in self._stages.values():
            stage.begin()

    def result(self):
        """Returns the model's result for the batch, or None on ranks without it."""
        results = [self.results[number] for number in sorted(self.results)]
        return joined(results) if results else None

    def compute(self, work):
        stage, place = self._stages[work.action.stage], (work.action.stage, work.action.microbatch)
        if work.action.kind == _native.SUM_REPLICAS:
            self._sum_replicas(stage.number)
            return
        if work.action.kind == _native.SUM_TIED:
            self._sum_tied(work.action.microbatch)
            return
        if work.action.kind in (_native.FORWARD, _native.RECOMPUTE):
            with torch.set_grad_enabled(self._loss is not None):
                if work.action.kind == _native.RECOMPUTE:
                    self._recompute(stage, place, self._read_inputs(work))
                elif work.is_recomputed and self._loss is not None:
                    self._forward_only(stage, place, self._read_inputs(work), work.outputs)
                else:
                    self._forward(stage, place, self._read_inputs(work), work.outputs)
            return
        # A backward pass has the types of its forward pass.
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext():
            if work.action.kind == _native.WEIGHT_GRADIENT:
                self._rest.pop(place)()
            else:
                self._backward(stage, place, work, self._read_inputs(work))

    def _read_inputs(self, work):
        is_gradient = work.action.kind not in (_native.FORWARD, _native.RECOMPUTE)
        return [_parcels.read(work.inputs[number], is_gradient, self._executor)
                for number in range(work.input_count)]

    # ---- Forward ----

    def _forward(self, stage, place, received, outputs):
        values, loss = self._values(stage, place, received)
        if values is None:
            self._kept[place] = None
            self._send_absent(outputs, len(stage.ways_out))
            return
        sent = self._send_all(values, outputs, stage.ways_out)
        if self._loss is not None:
            self._kept[place] = Kept(received, sent, loss)

    def _forward_only(self, stage, place, received, outputs):
        """The forward pass of a stage that is recomputed: autograd saves no tensor, and nothing is kept."""
        self._draws[place] = torch.get_rng_state()
        inputs = (self._batch.inputs(place[1]) if stage.number == 0 else ()) or ()
        given = [each for each in inputs if isinstance(each, torch.Tensor) and not each.is_inference()]
        versions = [each._version for each in given]
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _saved_nothing):
            values, _ = self._values(stage, place, received)
        if versions != [each._version for each in given]:
            raise RuntimeError("shoal: stage 0 changes its inputs in place, so it cannot be recomputed: let its first unit copy them, or "
                               "leave it out of recompute=")
        if values is None:
            self._send_absent(outputs, len(stage.ways_out))
            return
        self._send_all(values, outputs, stage.ways_out)

    def _recompute(self, stage, place, received):
        """Repeats a forward pass with the same random numbers. It sends nothing, and does not count in statistics and losses."""
        with torch.random.fork_rng(devices=[]), stage.statistics_kept():
            torch.set_rng_state(self._draws.pop(place))
            values, loss = self._values(stage, place, received, is_counted=False)
        sent = values and [[] if value is _shares.ABSENT else _parcels.Message(value, self._takes_objects).given for value in values]
        self._kept[place] = None if values is None else Kept(received, sent or [], loss)

    def _values(self, stage, place, received, is_counted=True):
        """Returns a value for each target, and the loss on the last stage; (None, None) for a microbatch without samples."""
        microbatch, loss = place[1], None
        inputs = self._batch.inputs(microbatch) if stage.number == 0 else self._batch.objects(microbatch)
        if inputs is None or (received and all(each.is_absent for each in received)):
            return None, None
        samples = self._samples_of(stage, microbatch, received)
        values, result = stage.forward(self._is_training, inputs, received, samples)
        result = _apart(result, received) if stage.is_last else result
        if stage.is_last and self._loss is not None:
            loss = self._loss_of(microbatch, result, is_counted)
        if stage.is_last and self._keeps_results and is_counted:
            self.results[microbatch] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            self.samples[microbatch] = stage.shares.own(samples)[1] if stage.shares else None
        return values, loss

    def _samples_of(self, stage, microbatch, received):
        """Returns the samples that all replicas of a stage have of a microbatch, or None without shares."""
        if stage.shares is None:
            return None
        return self._batch.samples(microbatch) if stage.number == 0 else stage.shares.samples_in(received)

    def _loss_of(self, microbatch, result, is_counted):
        """Returns this microbatch's part of the loss: the mean over its samples, times its share of all samples."""
        arguments, share = self._batch.targets(microbatch), self._batch.share(microbatch)
        loss = self._loss(result, *arguments)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError("shoal: loss must return a tensor of one element, the mean over the samples, and it returned "
                            f"{list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}")
        if is_counted:
            self.loss += loss.detach().double().item() * share
        return loss.reshape(()) * (share * self.scale)

    def _send_absent(self, outputs, count):
        for number in range(count):
            _parcels.write_note(outputs[number], _parcels.ABSENT)

    def _send_all(self, values, outputs, stages):
        """Sends a value in each message. stages: the receivers of the messages. Returns the tensors of each."""
        return [self._send(value, outputs[number], stage in self._stages) for number, (stage, value) in enumerate(zip(stages, values))]

    def _send(self, value, parcel, is_near):
        """Fills a struct shoal_parcel, and returns the value's tensors. is_near: the other stage is on this rank, and reads a tensor
        where it is. Other messages are copied to the pipeline's memory, from which their receiver takes them without this rank. It
        would have to copy a tensor of torch's piece by piece, while it computes."""
        if value is _shares.ABSENT:
            _parcels.write_note(parcel, _parcels.ABSENT)
            return []
        message = _parcels.Message(value, self._takes_objects)
        _parcels.write_note(parcel, message.note)
        single = message.single()
        if single is not None and is_near:
            parcel.data, parcel.bytes, parcel.owner = single.data_ptr(), message.size_of_single(), self._executor.hold(single)
        elif message.bytes:
            parcel.data, parcel.bytes = self._executor.alloc(message.bytes), message.bytes
            message.write(_parcels.bytes_at(parcel.data, message.bytes))
        return message.given

    # ---- Backward ----

    def _backward(self, stage, place, work, received):
        kept = self._kept.pop(place)
        if kept is None:
            self._rest[place] = lambda: None
            self._send_absent(work.outputs, len(stage.ways_in))
            return
        if work.action.kind == _native.BACKWARD:
            gradients = stage.backward(kept, received)
        else:
            gradients, self._rest[place] = stage.input_gradients(kept, received)
        self._send_all(gradients, work.outputs, stage.ways_in)


def _saved_nothing(_):
    raise RuntimeError("shoal: a backward pass through a forward pass that is recomputed")


def _apart(value, received):
    """Returns the value, with copies of tensors in the memory of messages, which later messages overwrite."""
    memory = {each.untyped_storage().data_ptr() for message in received for each in message.tensors if each.numel()}

    def apart(each):
        return each.clone() if isinstance(each, torch.Tensor) and each.layout is torch.strided and \
            each.untyped_storage().data_ptr() in memory else each
    return apart(value) if isinstance(value, torch.Tensor) else pytree.tree_map(apart, value)


# ---- A batch ---------------------------------------------------------------------------------------------------------------


def arguments_of(given):
    """Returns (args, kwargs) for what a program passes as a batch: a tensor, a tuple of arguments, or a dict of them."""
    if isinstance(given, dict):
        return (), given
    return (given if isinstance(given, tuple) else (given,)), {}


class Batch:
    """A batch in microbatches. Batches that do not fit are refused inside of a computation, so that all ranks learn of it. own:
    for a replica, a function that returns the first of its samples and their number, given the number of all samples."""

    def __init__(self, inputs, targets, count, recorded, own=None):
        self._given, self._count, self._recorded, self._own = (inputs, targets), count, recorded, own
        self._inputs = self._objects = self._targets = self._shares = None

    def inputs(self, microbatch):
        """Returns the tensors of the model's arguments, or None for a microbatch without samples."""
        if self._inputs is None:
            if self._given[0] is None:
                raise ValueError("shoal: the rank of the first stage needs the batch's inputs: they are None")
            every = [self._leaves(each) for each in self._divided(self._given[0], "inputs")]
            self._inputs = [self._recorded.inputs_in(leaves) for leaves in every]
            self._objects = [self._recorded.objects_in(leaves) for leaves in every]
        leaves = self._own_part(self._inputs[microbatch])
        return leaves if _rows(leaves) else None

    def objects(self, microbatch):
        """Returns the model's arguments that are objects, which every stage has."""
        if not self._recorded.objects:
            return ()
        self.inputs(microbatch)
        return self._objects[microbatch]

    def samples(self, microbatch):
        """Returns the number of samples of all replicas."""
        return _rows(self._inputs[microbatch])

    def _own_part(self, given):
        if self._own is None:
            return given
        rows = {leaf.shape[0] for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if len(rows) > 1:
            raise ValueError(f"shoal: a microbatch cannot be divided among replicas: the first dimensions of its tensors are {sorted(rows)}, "
                             "but must be the same number of samples")
        return pytree.tree_map(lambda leaf: leaf.narrow(0, *self._own(leaf.shape[0])) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf,
                               given)

    def _leaves(self, given):
        leaves, form = pytree.tree_flatten(arguments_of(given))
        if form != self._recorded.form or self._recorded.constants_in(leaves) != self._recorded.constants:
            raise ValueError("shoal: the model was split for other arguments: pass inputs of the example's form, with the same values "
                             "for arguments that are not tensors")
        return leaves

    def targets(self, microbatch):
        """Returns the loss function's arguments behind the model's result."""
        if self._given[1] is None:
            return ()
        if self._targets is None:
            self._targets = self._divided(self._given[1], "targets")
        return (self._own_part(self._targets[microbatch]),)

    def share(self, microbatch):
        """Returns the share of all samples that this replica has of the microbatch."""
        if self._shares is None:
            divided = self._targets or self._divided(self._given[0], "inputs")
            if divided is None:
                raise ValueError("shoal: the rank of the last stage needs the batch's targets, or else its inputs: both are None")
            rows = [_rows(pytree.tree_leaves(each)) for each in divided]
            self._shares = [(self._own(each)[1] if self._own else each) / sum(rows) for each in rows]
        return self._shares[microbatch]

    def rows(self):
        """Returns the numbers of samples of inputs and targets; 0 where they are not known."""
        return [0 if given is None or isinstance(given, list) else
                next((leaf.shape[0] for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
                for given in self._given]

    def _divided(self, given, name):
        """Returns the microbatches of a batch. A list has them already."""
        if given is None or isinstance(given, list):
            if given is not None and len(given) != self._count:
                raise ValueError(f"shoal: {name} has {len(given)} microbatches, but the schedule is for {self._count}: a list is taken "
                                 "as microbatches; pass one tensor or a tuple to have it divided")
            return given
        leaves, form = pytree.tree_flatten(given)
        rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if len(rows) != 1:
            raise ValueError(f"shoal: {name} cannot be divided into microbatches: the first dimensions of its tensors are "
                             f"{sorted(rows)}, but must be the same number of samples; or pass a list of microbatches")
        parts = [leaf.tensor_split(self._count) if isinstance(leaf, torch.Tensor) and leaf.dim() else [leaf] * self._count
                 for leaf in leaves]
        return [pytree.tree_unflatten(list(each), form) for each in zip(*parts)]


def _rows(leaves):
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)


def joined(results):
    """Returns the results of microbatches as the result of their batch."""
    flat = [pytree.tree_flatten(each) for each in results]
    forms = flat[0][1]
    return pytree.tree_unflatten([_joined_leaves(each) for each in zip(*(leaves for leaves, _ in flat))], forms)


def _joined_leaves(leaves):
    if not isinstance(leaves[0], torch.Tensor):
        return leaves[0]
    return torch.cat(leaves) if leaves[0].dim() else torch.stack(leaves)
