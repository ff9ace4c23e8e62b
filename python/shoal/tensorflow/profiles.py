"""Measures what `shoal advise` and `shoal sim step` need to know about a Keras model: one process, a few steps.

    profile = shoal.tensorflow.profile(model, images, loss=lambda output: loss_object(labels, output))
    profile.save("mine.json")

The passes are timed as model.fit runs them, inside a tf.function. The time at which each gradient is ready is measured op by op,
with a mark on the inputs of each layer. A mark records when the gradient that leaves its layer is ready; those of the layer's
weights are then ready as well. Activations are counted in the graph: the tensors of the forward pass that the backward pass
reads."""
from __future__ import annotations

import dataclasses
import statistics
import time
import warnings

import tensorflow as tf

from shoal._profiles import Profile, gradients_of, short

# Operations whose output is the memory of their first input.
_ALIASES = frozenset(("Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "CheckNumerics"))
_SOURCES = frozenset(("ReadVariableOp", "Const", "VarHandleOp"))  # weights and constants
_PERIOD_S = 0.05  # short steps are repeated for as long
_LEAST_MS = 1e-3  # of a pass: a file needs a time above 0


def profile(model, example, loss=None, *, steps: int = 3, batch: int | None = None, name: str | None = None) -> Profile:
    """Runs `steps` training steps of a Keras model without an optimizer, after one that is not timed, and returns its Profile.

    `example` is a batch, as the model is called with it: a tensor, or a list, tuple or dictionary of them. `loss` turns the
    model's output into a scalar; by default it is the output's `loss`, if it has one, or the mean of all floating-point tensors
    in it. `batch` is the number of samples; by default the length of the first tensor. All variables of the model get their
    values back, also those of batch norm and random numbers. Run it in one process, on the device and with the precision of
    the training."""
    if not (isinstance(steps, int) and steps >= 1):
        raise ValueError(f"shoal: steps is {steps!r}, but must be a number from 1 on")
    if not hasattr(model, "_flatten_layers"):
        raise TypeError(f"shoal: shoal.tensorflow.profile needs a Keras model, not {type(model).__name__}")
    example = tf.nest.map_structure(tf.convert_to_tensor, example)
    batch = batch if batch is not None else _length_of(example)
    if not (isinstance(batch, int) and batch >= 1):
        raise ValueError(f"shoal: batch is {batch!r}, but must be a number of samples from 1 on")
    run = _Run(model, example, loss or _loss_of)
    model(example, training=False)  # makes the variables of a model that has not been called before
    variables = [_plain(variable) for variable in model.trainable_variables]
    if not variables:
        raise ValueError("shoal: the model has no trainable variable, so there is nothing to profile")
    with _Untouched(model):
        forward_s, backward_s = run.times(variables, steps)
        shares = run.shares(variables, steps)
        kept = run.activations(variables)
    names = [(getattr(variable, "path", variable.name), int(tf.size(variable))) for variable in model.trainable_variables]
    return Profile(name=short(name or type(model).__name__), batch=batch, forward_ms=max(1e3 * forward_s, _LEAST_MS),
                   backward_ms=max(1e3 * backward_s, _LEAST_MS), activation_bytes=kept / batch, batch_norms=_batch_norms_of(model),
                   gradients=gradients_of(names, shares))


def _plain(variable):
    """Returns TensorFlow's variable of a Keras variable."""
    return getattr(variable, "value", variable) if not isinstance(variable, tf.Variable) else variable


def _batch_norms_of(model):
    return sum(type(layer).__name__ in ("BatchNormalization", "SyncBatchNormalization") for layer in _layers_of(model))


def _layers_of(model):
    return list(model._flatten_layers())


def _length_of(example):
    for tensor in tf.nest.flatten(example):
        if tensor.shape.rank:
            return int(tensor.shape[0])
    raise ValueError("shoal: the example has no tensor whose length could be the number of samples: pass batch=")


def _loss_of(output):
    found = getattr(output, "loss", None)
    if found is not None:
        return tf.reduce_mean(found)
    means = [tf.reduce_mean(tf.cast(each, tf.float32)) for each in tf.nest.flatten(output) if tf.as_dtype(each.dtype).is_floating]
    if not means:
        raise ValueError("shoal: the model's output has no floating-point tensor: pass loss=, a function that makes a scalar of it")
    return tf.add_n(means)


# ---- Steps ------------------------------------------------------------------------------------------------------------------


def _sync():
    """Waits for a GPU, which computes what was queued before."""
    if tf.config.list_physical_devices("GPU"):
        tf.test.experimental.sync_devices()


def _timed(function, repetitions):
    """Returns the seconds of one call."""
    _sync()
    begun = time.perf_counter()
    for _ in range(repetitions):
        function()
    _sync()
    return (time.perf_counter() - begun) / repetitions


@dataclasses.dataclass
class _Run:
    model: object
    example: object
    loss_of: object
    border: int = 0  # operations of the forward pass in the graph

    def loss(self, example):
        loss = self.loss_of(self.model(example, training=True))
        if loss.shape.num_elements() != 1:
            raise ValueError("shoal: loss must return a tensor of one element")
        return loss

    def step(self, variables, example):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss = self.loss(example)
        self.border = len(tf.compat.v1.get_default_graph().get_operations()) if tf.inside_function() else 0
        return loss, tape.gradient(loss, variables)

    def times(self, variables, steps):
        """Returns the seconds of both passes: the backward pass takes what a step takes longer than a forward pass."""
        forward, whole = tf.function(self.loss), tf.function(lambda example: self.step(variables, example))
        forward(self.example), whole(self.example)
        repetitions = max(1, int(_PERIOD_S / _timed(lambda: whole(self.example), 1)))
        pairs = [(_timed(lambda: forward(self.example), repetitions), _timed(lambda: whole(self.example), repetitions)) for _ in range(steps)]
        forward_s = statistics.median(pair[0] for pair in pairs)
        return forward_s, max(statistics.median(pair[1] for pair in pairs) - forward_s, 0.0)

    def shares(self, variables, steps):
        """Returns for each variable after which share of the backward pass its gradient is ready."""
        rows = []
        with _Marks(self.model) as marks:
            for _ in range(steps + 1):
                rows.append(self.shares_of_step(variables, marks))
        return [statistics.median(row[index] for row in rows[1:]) for index in range(len(variables))]

    def shares_of_step(self, variables, marks):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss = self.loss(self.example)
        _sync()
        marks.moments.clear()
        begun = time.perf_counter()
        tape.gradient(loss, variables)
        _sync()
        whole = max(time.perf_counter() - begun, 1e-9)
        seconds = {key: moment - begun for key, moment in marks.moments.items()}
        return [min(max(seconds.get(marks.owners.get(id(variable)), whole) / whole, 0.0), 1.0) for variable in variables]

    def activations(self, variables):
        """Returns the bytes that the forward pass keeps for the backward pass."""
        function = tf.function(lambda example: self.step(variables, example)).get_concrete_function(self.example)
        return _kept_bytes(function.graph, self.border)


class _Marks:
    """While entered, each layer with weights marks its inputs. `moments` has the time of a layer's last mark in a backward pass."""

    def __init__(self, model):
        self.moments, self.owners, self.layers = {}, {}, []
        for layer in _layers_of(model):
            own = [_plain(variable) for variable in layer.trainable_variables]
            if own:
                self.layers.append(layer)
            for variable in own:  # the innermost layer comes last
                self.owners[id(variable)] = id(layer)

    def __enter__(self):
        for layer in self.layers:
            object.__setattr__(layer, "call", self._marked(layer, layer.call))
        return self

    def __exit__(self, *_):
        for layer in self.layers:
            object.__delattr__(layer, "call")

    def _marked(self, layer, call):
        def marked(*arguments, **named):
            arguments = tf.nest.map_structure(lambda value: self._mark(layer, value), arguments)
            return call(*arguments, **named)
        return marked

    def _mark(self, layer, value):
        if not tf.is_tensor(value) or not value.dtype.is_floating:
            return value

        @tf.custom_gradient
        def mark(tensor):
            def gradient(upstream):
                _sync()
                self.moments[id(layer)] = time.perf_counter()
                return upstream
            return tf.identity(tensor), gradient
        return mark(value)


# ---- What a forward pass keeps ----------------------------------------------------------------------------------------------


def _root(tensor):
    while tensor.op.type in _ALIASES and tensor.op.inputs:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def _kept_bytes(graph, border):
    """Sums the tensors of the first `border` operations that later ones read: each once, with floating-point values of 32 bits,
    and without scalars."""
    operations = graph.get_operations()
    before = set(operation.name for operation in operations[:border])
    kept, unknown = {}, set()
    for operation in operations[border:]:
        for tensor in operation.inputs:
            root = _root(tensor)
            if root.op.name not in before or root.op.type in _SOURCES:
                continue
            elements = root.shape.num_elements()
            if elements is None or root.dtype in (tf.variant, tf.resource):
                unknown.add(root.name)
            elif elements > 1:
                kept[root.name] = elements * (max(root.dtype.size, 4) if root.dtype.is_floating else root.dtype.size)
    if unknown:
        warnings.warn(f"shoal: {len(unknown)} tensors that the backward pass reads have no known size, such as {min(unknown)}: "
                      "activations are underestimated; give `shoal advise` --activations", stacklevel=3)
    return sum(kept.values())


class _Untouched:
    """Gives the model's variables their values back."""

    def __init__(self, model):
        self._variables = [_plain(variable) for variable in model.variables]

    def __enter__(self):
        self._values = [tf.identity(variable) for variable in self._variables]

    def __exit__(self, *_):
        for variable, value in zip(self._variables, self._values):
            variable.assign(value)
