"""smp.DistributedModel: a Keras model whose layers are on several ranks.

Each rank runs call() with all layers. A layer of another rank does not run: a stand-in of the same shape replaces its result. If a
layer uses the result of another rank, that rank broadcasts it. The rank that has the model's result also broadcasts it.

    rank 0    conv   flatten  --broadcast-->  (dense1)  (dense2)  <--broadcast--     loss on all ranks
    rank 1   (conv) (flatten)                  dense1    dense2

Gradients go back the same way. The gradient of a broadcast is the sum of all ranks' gradients, and stand-ins have gradients of 0.
All ranks must take part in each broadcast's backward pass, so each needs a path from the loss to its variables through each
broadcast. For this reason a stand-in depends on its layer's inputs, and on `anchor`, a variable of each rank that is always 0."""
from __future__ import annotations

import contextlib
import time

import keras
import tensorflow as tf

import shoal.tensorflow as shoal
from shoal import _native
from shoal.tensorflow import _operations
from smdistributed.modelparallel import _stages
from smdistributed.modelparallel.exceptions import SMPConfigError, SMPError, SMPUnsupportedError
from smdistributed.modelparallel.tensorflow._state import log, pp_rank, pp_size, rank, state

_step = []  # numbers of the microbatches whose step functions run, the innermost last
_marks = []  # of partition() contexts
MARK = "_smp_partition"
TIMES = 3  # how often a layer is measured
LATENCY_US, BYTES_PER_US = 20, 2000  # of a message between ranks, as in shoal.torch.Pipeline


@contextlib.contextmanager
def microbatch(number):
    """Inside, a step function runs."""
    _step.append(number)
    try:
        yield
    finally:
        _step.pop()


@contextlib.contextmanager
def partition(index):
    """Layers that are assigned to the model inside this context are in this partition. Ignored with auto_partition."""
    if not isinstance(index, int) or not 0 <= index < state.require().cfg.pipeline_parallel_degree:
        raise SMPConfigError(f"smp.partition: {index!r} must be a number less than the number of partitions, "
                             f"{state.cfg.pipeline_parallel_degree}")
    _marks.append(index)
    try:
        yield
    finally:
        _marks.pop()


# ---- Operations with gradients of their own --------------------------------------------------------------------------------


def _stand_in(shape, kind, anchor, inputs):
    """Returns zeros that depend on the inputs, with gradients of 0."""
    @tf.custom_gradient
    def zeros(anchor, *inputs):
        def gradient(_):
            return [tf.zeros_like(each) for each in (anchor, *inputs)]
        return tf.zeros(shape, kind), gradient
    return zeros(anchor, *inputs)


@tf.custom_gradient
def _counted_once(result):
    """Returns the model's result with its gradient divided: all ranks have the same gradient, and the broadcast sums them."""
    return tf.identity(result), lambda gradient: gradient / tf.cast(pp_size(), gradient.dtype)


# ---- The model -------------------------------------------------------------------------------------------------------------


class Division:
    """The partition of each of a model's layers. places: in the order in which layers are called, None before the first call. plan: by
    the layers' ids."""

    def __init__(self):
        self.places = self.plan = None
        self._preferred = self._restored = None

    def prefer(self, places):
        """Divides the model as a checkpoint's, if it has as many layers and partitions, and if nothing marks partitions."""
        self._preferred = places

    def follow(self, places, path):
        """Like prefer(), but raises if the model is divided differently: a rank's checkpoint has the variables of its own layers only."""
        self._preferred, self._restored = places, (places, path)
        self._check()

    def settle(self, layers, choose):
        """Sets the partitions to those that choose() returns, given the preferred ones."""
        places = choose(self._preferred)
        self.places, self.plan = places, {id(layer): place for layer, place in zip(layers, places)}
        self._check()

    def _check(self):
        if self._restored and self.places and self.places != self._restored[0]:
            places, path = self._restored
            raise SMPError(f"smp.CheckpointManager: the model is not divided as it was when {path} was saved. Partitions of its layers then: "
                           f"{places}; now: {self.places}. Make the manager before the first step, so that the model is divided as then; "
                           "and if partitions are marked, mark the same ones")


class DistributedModel(keras.Model):
    """The base class of a model whose layers are on several ranks: subclass it as keras.Model, assign layers in __init__, and call them
    in call(). Layers hand over tensors to each other; other operations belong into layers. The model is divided at its first call in a
    function decorated with @smp.step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        state.require()
        self._smp_division = Division()
        self._smp_anchor = self.add_weight(shape=(), initializer="zeros", name="anchor") if pp_size() > 1 else None

    def __setattr__(self, name, value):
        if _marks and isinstance(value, keras.layers.Layer):
            object.__setattr__(value, MARK, _marks[-1])
        super().__setattr__(name, value)

    def __call__(self, *args, training=None, **kwargs):
        if not _step:
            raise SMPError("smp: the model's layers are on several ranks, so it can be called in a function decorated with @smp.step only")
        units = self._smp_units()
        if self._smp_division.places is None:
            _divide(self, units, args, kwargs, training)
        self.built = True
        run = _Pass(self._smp_division.plan, units, self._smp_anchor, training)
        return run.call(self, args, kwargs)

    def _smp_units(self):
        """Returns the layers that the model itself has, by their ids."""
        return {id(each): each for each in self.layers}

    def local_variables(self):
        """Returns the variables of this rank's partition."""
        return [each for each in self.variables if each is not self._smp_anchor]

    def fit(self, *args, **kwargs):
        raise SMPUnsupportedError("smp: model.fit() is not served: write the loop over batches, as the vendor's library asks")

    compile = evaluate = predict = fit


class _Hooked:
    """Sends calls of a model's layers to the pass that runs."""
    current = None
    plain = keras.layers.Layer.__call__

    @staticmethod
    def call(layer, *args, **kwargs):
        run = _Hooked.current
        if run is None or id(layer) not in run.units:
            return _Hooked.plain(layer, *args, **kwargs)
        _Hooked.current = None  # layers inside a layer run as they are
        try:
            return run.unit(layer, args, kwargs)
        finally:
            _Hooked.current = run


keras.layers.Layer.__call__ = _Hooked.call


class _Run:
    """One call of a model, whose layers are its units."""

    def __init__(self, units, training):
        self.units, self._training = units, training

    def call(self, model, args, kwargs):
        former, _Hooked.current = _Hooked.current, self
        try:
            options = {"training": self._training} if model._call_has_training_arg else {}
            return self.result(model.call(*self.given(args), **self.given(kwargs), **options))
        finally:
            _Hooked.current = former

    def options_of(self, layer, kwargs):
        """Returns the arguments with names, of which training is the model's, as Keras passes it on."""
        return {"training": self._training, **kwargs} if layer._call_has_training_arg else kwargs


class _Pass(_Run):
    """A call on this rank. owner: for each tensor that is a layer's result, the rank that has its values; None for the model's
    inputs."""

    def __init__(self, plan, units, anchor, training):
        super().__init__(units, training)
        self._plan, self._anchor = plan, anchor
        self._owner, self._shared, self._kept = {}, {}, []

    def given(self, value):
        for leaf in tf.nest.flatten(value):
            self._note(leaf, None)
        return value

    def _note(self, tensor, owner):
        self._owner[id(tensor)] = owner
        self._kept.append(tensor)  # so that its id stays its own
        return tensor

    def unit(self, layer, args, kwargs):
        owner = self._plan[id(layer)]
        args, kwargs = tf.nest.map_structure(lambda each: self._at(each, owner, layer), (args, kwargs))
        if owner == pp_rank():
            result = _Hooked.plain(layer, *args, **self.options_of(layer, kwargs))
        else:
            result = self._absent(layer, args, kwargs)
        return tf.nest.map_structure(lambda each: self._note(each, owner), result)

    def _absent(self, layer, args, kwargs):
        inputs = [each for each in tf.nest.flatten((args, kwargs)) if tf.is_tensor(each)]
        batch = tf.shape(inputs[0])[0]
        floats = [each for each in inputs if each.dtype.is_floating]

        def stand_in(spec):
            shape = [batch if number == 0 and length is None else length for number, length in enumerate(spec.shape)]
            return _stand_in(shape, spec.dtype, self._anchor.value, floats)
        return tf.nest.map_structure(stand_in, _spec_of(layer, args))

    def _at(self, value, owner, layer):
        """Returns a value as the rank that runs the layer needs it."""
        if not tf.is_tensor(value):
            return value
        if id(value) not in self._owner:
            raise SMPUnsupportedError(f"smp: {layer.name} gets a tensor that is no layer's result: put operations between layers into a "
                                      "layer, such as keras.layers.Lambda, Reshape or Add")
        source = self._owner[id(value)]
        return value if source is None or source == owner else self._from(source, value)

    def _from(self, source, value):
        """Returns a result of a rank of the pipeline on all of its ranks."""
        if id(value) not in self._shared:
            self._shared[id(value)] = self._note(_operations.broadcast([value], source, world=state.worlds["PP_GROUP"])[0], None)
        return self._shared[id(value)]

    def result(self, value):
        return tf.nest.map_structure(self._of_model, value)

    def _of_model(self, value):
        if not tf.is_tensor(value) or self._owner.get(id(value), -1) is None:
            return value
        if id(value) not in self._owner:
            raise SMPUnsupportedError("smp: the model returns a tensor that is no layer's result: put operations behind layers into a layer, "
                                      "or behind the model's call")
        return value if pp_size() == 1 else _counted_once(self._from(self._owner[id(value)], value))


def _spec_of(layer, args):
    """Returns the specification of a layer's result: keras.KerasTensors, whose first length may be None."""
    inputs = tf.nest.map_structure(lambda each: keras.KerasTensor((None, *each.shape[1:]), _kind_of(layer, each)), args)
    try:
        shape = layer.compute_output_shape(*tf.nest.map_structure(lambda each: each.shape, inputs))
    except Exception as error:
        raise SMPUnsupportedError(f"smp: {layer.name} does not know the shape of its result before it has run: give its class "
                                  f"compute_output_shape(): {type(error).__name__}: {error}") from None
    is_one = not shape or not isinstance(shape[0], (tuple, list))
    kind = layer.compute_dtype or "float32"
    return keras.KerasTensor(shape, kind) if is_one else [keras.KerasTensor(each, kind) for each in shape]


def _kind_of(layer, value):
    """Layers cast tensors of floating point to their own type."""
    return layer.compute_dtype or "float32" if value.dtype.is_floating else value.dtype.name


# ---- The plan --------------------------------------------------------------------------------------------------------------


class _Listing(_Run):
    """A call that only finds out which layers are called, with tensors of which shapes."""

    def __init__(self, units, training):
        super().__init__(units, training)
        self.calls = []  # of (layer, KerasTensors)

    def given(self, value):
        return value

    def unit(self, layer, args, kwargs):
        if all(layer is not known for known, _ in self.calls):
            self.calls.append((layer, args))
        return tf.nest.map_structure(lambda spec: tf.zeros([_rows_of(args), *spec.shape[1:]], spec.dtype), _spec_of(layer, args))

    def result(self, value):
        return value


def _rows_of(args):
    first = next(each for each in tf.nest.flatten(args) if tf.is_tensor(each))
    return first.shape[0] or 1


def _divide(model, units, args, kwargs, training):
    """Chooses the partition of each layer, the same on all ranks."""
    with tf.init_scope():  # outside of the function that is being traced
        args, kwargs = tf.nest.map_structure(lambda each: tf.zeros([each.shape[0] or 1, *each.shape[1:]], each.dtype)
                                             if tf.is_tensor(each) else each, (args, kwargs))
        listing = _Listing(units, training)
        listing.call(model, args, kwargs)
        count, called = state.cfg.pipeline_parallel_degree, [layer for layer, _ in listing.calls]
        if len(called) < count:
            raise SMPError(f"smp: the model calls {len(called)} layers ({', '.join(each.name for each in called)}), and there are {count} "
                           "partitions: use fewer partitions")
        division = model._smp_division
        division.settle(called, lambda preferred: _chosen(listing.calls, count, preferred) if state.cfg.auto_partition
                        else _marked(called, count))
    for number in range(count):
        log(f"partition {number}: {', '.join(layer.name for layer in called if division.plan[id(layer)] == number)}")


def _chosen(calls, count, preferred):
    """Returns what rank 0 prefers if it fits; otherwise the partitions with the shortest step, or those of memory_weight, by rank 0's
    measurements."""
    fits = preferred is not None and len(preferred) == len(calls) and max(preferred) + 1 == count
    known, units = shoal.broadcast_object((preferred if fits else None, None if fits else _measured_calls(calls)) if rank() == 0 else None, 0)
    if known is not None:
        return known
    if isinstance(units, str):
        raise SMPError(f"smp: rank 0 cannot measure a copy of {units}; set auto_partition to false, and mark partitions")
    weight = state.cfg.memory_weight
    options = {} if weight is None else {"method": _native.PARTITION_TREE, "memory_weight": weight}
    first = _stages.first_units(units, count, state.cfg.microbatches, latency_us=LATENCY_US, bytes_per_us=BYTES_PER_US, **options)
    return [max(stage for stage in range(count) if first[stage] <= number) for number in range(len(units))]


def _marked(called, count):
    """Returns the partitions that partition() has marked; other layers are in the default partition."""
    places = [getattr(layer, MARK, state.cfg.default_partition) for layer in called]
    missing = [number for number in range(count) if number not in places]
    if missing:
        raise SMPConfigError(f"smp: nothing is in partition {missing[0]}: assign layers inside smp.partition({missing[0]}), or set "
                             "auto_partition")
    return places


def _measured_calls(calls):
    """Returns the units of a profile; or a text, which layer could not be measured and why, for which the other ranks wait."""
    units = []
    for layer, args in calls:
        try:
            units.append(_measured(layer, args))
        except Exception as error:
            return f"{layer.name}: {type(error).__name__}: {error}"
    return units


def _measured(layer, args):
    """Returns a unit of a profile: the times and bytes of a layer, measured on a copy that is dropped."""
    copy = layer.__class__.from_config(layer.get_config())
    inputs = tf.nest.map_structure(lambda each: tf.cast(each, _kind_of(layer, each)), args)
    times = []
    for _ in range(TIMES + 1):  # the first one makes the variables
        begun = time.perf_counter()
        with tf.GradientTape() as tape:
            tape.watch([each for each in tf.nest.flatten(inputs) if each.dtype.is_floating])
            result = copy(*inputs)
        forward = time.perf_counter()
        tape.gradient(result, [*copy.trainable_variables, *tf.nest.flatten(inputs)])
        times.append((forward - begun, time.perf_counter() - forward))
    forward, backward = (1e6 * min(each[number] for each in times[1:]) for number in (0, 1))
    size_of = sum(each.shape.num_elements() * each.dtype.size for each in tf.nest.flatten(result))
    held = sum(each.numpy().nbytes for each in copy.variables)
    return {"name": layer.name, "forward_us": forward, "backward_us": backward, "parameter_bytes": held, "kept_bytes": size_of,
            "output_bytes": size_of}
