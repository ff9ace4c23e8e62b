"""Averages gradients over all ranks, with Horovod's arguments: what the tape and the optimizer share."""
from __future__ import annotations

import tensorflow as tf

from shoal.tensorflow import ReduceOp, _gradients, _operations, tape

from .._common.operators import Adasum, Average, Sum
from ._agreement import GRADIENTS, agree
from ._operations import grouped_allreduce
from ._world import global_process_set, world_of
from .compression import Compression

_OF_THE_ENGINE = {Compression.none: "none", Compression.fp16: "fp16"}


class Settings:
    """How gradients are averaged: by the gradient engine. If a rank has joined, or with the program's own compression, by one
    all-reduce for each type."""

    def __init__(self, compression=Compression.none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0,
                 process_set=global_process_set, scale_local_gradients=True, factor=1):
        if op == Adasum:
            raise NotImplementedError("shoal: there is no Adasum: use op=hvd.Average, and scale the learning rate by hvd.size()")
        if op not in (Average, Sum):
            raise ValueError("shoal: gradients can be averaged or summed: op=hvd.Average or hvd.Sum")
        if gradient_predivide_factor != 1.0 and op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        self._compression, self._sparse_as_dense, self._op = compression, sparse_as_dense, op
        self._predivide, self._process_set = gradient_predivide_factor, process_set
        self._scales_local, self._factor = scale_local_gradients, factor
        self._local = {}  # variables with local gradients, by id; kept, so that ids stay unique

    def add_local(self, variable):
        self._local[id(variable)] = variable

    def is_local(self, variable):
        return id(variable) in self._local

    def average(self, gradients, variables):
        results, variables = list(gradients), list(variables)
        shared = [i for i, variable in enumerate(variables) if not self.is_local(variable)]
        for i, variable in enumerate(variables):
            if self.is_local(variable) and self._scales_local:
                results[i] = _times(results[i], 1 / self._process_set.size())
        reduced = self._reduce([results[i] for i in shared], [variables[i] for i in shared])
        for i, gradient in zip(shared, reduced):
            results[i] = gradient
        return [_times(gradient, self._factor) for gradient in results]

    def _reduce(self, gradients, variables):
        if not self._process_set.included() or self._process_set.size() == 1:
            return gradients
        world = world_of(self._process_set)
        has_engine = self._compression in _OF_THE_ENGINE
        missing = [f"{_gradients.name_on_all_ranks(i, each)} is None"
                   for i, (gradient, each) in enumerate(zip(gradients, variables)) if gradient is None]
        has_joined = agree(GRADIENTS, [], world, missing)  # inside tf.function the engine reports what is missing
        if not has_engine or has_joined:
            return self._reduce_together(gradients)
        settings = _gradients.Settings(ReduceOp.AVERAGE if self._op == Average else ReduceOp.SUM, _OF_THE_ENGINE[self._compression],
                                       self._sparse_as_dense, world=world)
        averages = settings.average([_times(each, 1 / self._predivide) for each in gradients], variables)
        return [_times(each, self._predivide) for each in averages]

    def _reduce_together(self, gradients):
        here = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not here and not tf.executing_eagerly():  # else a rank that has a gradient waits for this one until its deadline
            _operations.barrier(world_of(self._process_set))
        sent = [gradients[i] for i in here]
        if self._sparse_as_dense:
            sent = [tf.convert_to_tensor(each) for each in sent]
        reduced = grouped_allreduce(sent, op=self._op, compression=self._compression, prescale_factor=1 / self._predivide,
                                    postscale_factor=self._predivide, process_set=self._process_set)
        for i, gradient in zip(here, reduced):
            gradients[i] = gradient
        return gradients


def _times(gradient, factor):
    if gradient is None or factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * tf.cast(factor, gradient.values.dtype), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


class _Tape(tape.DistributedGradientTape):
    def __init__(self, gradtape, settings):
        self._tape, self._settings = gradtape, settings

    def register_local_source(self, source):
        """Keeps the gradient of this variable on this rank, divided by the number of ranks unless
        scale_local_gradients=False."""
        self._settings.add_local(source)

    def get_local_and_global_gradients(self, target, sources):
        """Returns [(variable, gradient)] of the local variables, and of the others."""
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(self.gradient(target, sources))))
        return [pair for pair in pairs if self._settings.is_local(pair[0])], \
            [pair for pair in pairs if not self._settings.is_local(pair[0])]


def DistributedGradientTape(gradtape, device_dense='', device_sparse='', compression=Compression.none, sparse_as_dense=False,
                            op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=global_process_set,
                            scale_local_gradients=True):
    """Returns a tape whose gradient() returns averages over all ranks. groups and num_groups have no effect, because the
    gradient engine combines gradients."""
    return _Tape(gradtape, Settings(compression, sparse_as_dense, op, gradient_predivide_factor, process_set, scale_local_gradients))


def PartialDistributedGradientTape(gradtape, device_dense='', device_sparse='', compression=Compression.none, sparse_as_dense=False,
                                   op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None,
                                   process_set=global_process_set, local_layers=None, scale_local_gradients=True):
    """Returns a tape that keeps the gradients of local_layers on this rank."""
    made = DistributedGradientTape(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
                                   num_groups, groups, process_set, scale_local_gradients)
    layers = local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers] if local_layers else []
    for layer in layers:
        for variable in layer.trainable_weights:
            made.register_local_source(variable)
    return made
