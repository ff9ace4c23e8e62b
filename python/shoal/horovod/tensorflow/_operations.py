"""Operations on tensors with Horovod's arguments, over those of shoal.tensorflow. All ranks call them in the same order,
eagerly or in the program's order of a tf.function; names need not agree. Eager calls are compared first (_agreement.py)."""
from __future__ import annotations

import re

import tensorflow as tf

from shoal.tensorflow import ReduceOp, _collectives, _operations
from shoal.tensorflow.variables import assign_broadcasts

from .._common import controller as kinds
from .._common.operators import Average, Max, Min, Product, Sum, operator_of
from ._agreement import GRADIENTS, agree, exchange, fault_among, joined_of
from ._world import global_process_set, world_of
from .compression import Compression

_OPERATORS = {Average: ReduceOp.AVERAGE, Sum: ReduceOp.SUM, Min: ReduceOp.MIN, Max: ReduceOp.MAX, Product: ReduceOp.PRODUCT}


def _node_name(name):
    """Converts a name to one that a node of a graph may have."""
    return name and "shoal_" + re.sub(r"[^A-Za-z0-9_.\-]", "_", name)


def _scaled(tensor, factor):
    """Multiplies the tensor. Integers are multiplied in double precision and truncated; half precision is multiplied in
    single."""
    if isinstance(factor, (int, float)) and factor == 1:
        return tensor
    wide = (tf.float32 if tensor.dtype.size == 2 else tensor.dtype) if tensor.dtype.is_floating else tf.float64
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)


def _with_gradient_times(tensor, factor):
    """Returns the tensor with a gradient that is multiplied by the factor. Horovod's gradients are not always those of the sum
    of all ranks' losses."""
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.dtype.is_floating:
        return tensor

    @tf.custom_gradient
    def identity(value):
        return tf.identity(value), lambda gradient: gradient * tf.cast(factor, gradient.dtype)
    return identity(tensor)


# ---- All-reduce ----


def allreduce(tensor, average=None, device_dense='', device_sparse='', compression=Compression.none, op=None, prescale_factor=1.0,
              postscale_factor=1.0, name=None, process_set=global_process_set, ignore_name_scope=False):
    """Reduces the tensors of all ranks, and returns the result on every rank. tf.IndexedSlices are gathered; they support Sum
    and Average only."""
    return grouped_allreduce([tensor], average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
                             process_set, ignore_name_scope, name)[0]


def grouped_allreduce(tensors, average=None, device_dense='', device_sparse='', compression=Compression.none, op=None,
                      prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set, ignore_name_scope=False, name=None):
    """Reduces a list of tensors, in one operation for each type."""
    with _operations.in_order():
        return _grouped_allreduce(list(tensors), average, compression, op, prescale_factor, postscale_factor, process_set, name)


def _grouped_allreduce(results, average, compression, op, prescale_factor, postscale_factor, process_set, name):
    world = world_of(process_set)
    is_sparse = [isinstance(tensor, tf.IndexedSlices) for tensor in results]
    if any(is_sparse) and (op not in (None, Average, Sum) or prescale_factor != 1.0 or postscale_factor != 1.0):
        raise NotImplementedError("shoal: tf.IndexedSlices can be summed and averaged only, and not scaled: tf.convert_to_tensor makes "
                                  "them dense")
    op = operator_of(op, average)
    for i, sparse in enumerate(is_sparse):
        if sparse:
            results[i] = _allreduce_slices(results[i], op, name, world, process_set.size())
    dense = [i for i, sparse in enumerate(is_sparse) if not sparse]
    tensors, contexts = zip(*(compression.compress(tf.convert_to_tensor(results[i])) for i in dense)) if dense else ((), ())
    if dense:
        agree(kinds.ALLREDUCE, tensors, world, [op, float(prescale_factor), float(postscale_factor)])
    reduced = _reduced_by_type([_scaled(tensor, prescale_factor) for tensor in tensors], op, name, world, process_set.size())
    for i, tensor, context in zip(dense, reduced, contexts):
        results[i] = compression.decompress(_scaled(tensor, postscale_factor), context)
    return results


def _reduced_by_type(tensors, op, name, world, size):
    results = [None] * len(tensors)
    for same in _collectives._by_type(tensors):
        for i, result in zip(same, _reduced([tensors[i] for i in same], op, name, world, size)):
            results[i] = result
    return results


def _one_after_another(function, tensors):
    with _operations.in_order():
        return [function(tensor) for tensor in tensors]


def _reduced(tensors, op, name, world, size):
    """Reduces tensors of one type. Averages of integers are truncated."""
    if op != Average or tensors[0].dtype.is_floating:
        return _operations.allreduce(tensors, int(_OPERATORS[op]), _node_name(name), world)
    sums = _operations.allreduce(tensors, int(ReduceOp.SUM), _node_name(name), world)
    return [tf.truncatediv(each, tf.cast(size, each.dtype)) for each in sums]


def _allreduce_slices(slices, op, name, world, size):
    agree(kinds.ALLGATHER, [tf.convert_to_tensor(slices.values), tf.convert_to_tensor(slices.indices)], world, [op])
    values, indices = _collectives.gather_slices(slices, _node_name(name), world)
    if op == Average:
        values = values / tf.cast(size, values.dtype)  # fractions, also for integers
    return tf.IndexedSlices(values, indices, slices.dense_shape)


# ---- The others ----


def allgather(tensor, name=None, ignore_name_scope=False, process_set=global_process_set):
    """Concatenates the tensors of all ranks along the first dimension, in which they may differ."""
    world = world_of(process_set)
    tensor = _with_gradient_times(tensor, 1 / process_set.size())
    agree(kinds.ALLGATHER, [tensor], world)
    return _collectives.allgather(tensor, _node_name(name), world)


def grouped_allgather(tensors, name=None, ignore_name_scope=False, process_set=global_process_set):
    return _one_after_another(lambda tensor: allgather(tensor, name, ignore_name_scope, process_set), tensors)


def _index_of(root_rank, process_set):
    if root_rank not in process_set.ranks:
        raise ValueError(f"shoal: root_rank is {root_rank}, but must be a rank of the process set: {process_set.ranks}")
    return process_set.ranks.index(root_rank)


def broadcast(tensor, root_rank, name=None, ignore_name_scope=False, process_set=global_process_set):
    """Returns root_rank's tensor on every rank. root_rank is a rank of the job, also with a process_set."""
    world = world_of(process_set)
    root = _index_of(root_rank, process_set)
    tensor = _with_gradient_times(tensor, 1 / process_set.size())
    agree(kinds.BROADCAST, [tensor], world, [root_rank])
    return _operations.broadcast([tensor], root, _node_name(name), world)[0]


def broadcast_(variables, root_rank, name=None, process_set=global_process_set):
    """Sets each variable to root_rank's value. Returns the variables; in a graph, the tensors that assign to them."""
    variables, world, root = list(variables), world_of(process_set), _index_of(root_rank, process_set)
    agree(kinds.BROADCAST, [tf.convert_to_tensor(variable) for variable in variables], world, [root_rank])
    assigned = assign_broadcasts(variables, root, _node_name(name), world)
    return variables if tf.executing_eagerly() else assigned


def _with_rows(tensor):
    return tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor


def alltoall(tensor, splits=None, name=None, ignore_name_scope=False, process_set=global_process_set):
    """Sends rows to every rank: splits[0] to rank 0, and so on; without splits, the same number to each. Returns the rows from
    all ranks; with splits, (rows, number of rows from each rank)."""
    world, size = world_of(process_set), process_set.size()
    tensor = tf.convert_to_tensor(tensor)
    if splits is None:
        rows = tensor.shape[0] if tensor.shape.rank else 1
        if rows is not None and rows % size:
            raise tf.errors.InvalidArgumentError(None, None, f"shoal: {rows} rows cannot be divided evenly among {size} ranks: give "
                                                 "splits")
        agree(kinds.ALLTOALL, [_with_rows(tensor)], world)
        return _collectives.alltoall(tensor, None, _node_name(name), world)
    splits = tf.convert_to_tensor(splits)
    if splits.dtype != tf.int32:
        raise tf.errors.InvalidArgumentError(None, None, f"shoal: alltoall takes splits of int32, not {splits.dtype.name}")
    agree(kinds.ALLTOALL, [_with_rows(tensor)], world, splits=splits.numpy().tolist() if tf.executing_eagerly() else ())
    rows, received = _collectives.alltoall(tensor, splits, _node_name(name), world)
    return rows, tf.cast(received, tf.int32)


def reducescatter(tensor, device_dense='', compression=Compression.none, op=Average, name=None, process_set=global_process_set,
                  prescale_factor=1.0, postscale_factor=1.0):
    """Returns this rank's rows of the reduced tensor. If rows cannot be divided evenly, the first ranks have one more."""
    world, size = world_of(process_set), process_set.size()
    if op not in (Average, Sum):
        raise NotImplementedError("shoal: reducescatter takes op=hvd.Average or hvd.Sum")
    tensor, context = compression.compress(tf.convert_to_tensor(tensor))
    if tensor.shape.rank == 0:
        raise ValueError("shoal: a scalar cannot be scattered: reducescatter needs a tensor with a first dimension")
    agree(kinds.REDUCESCATTER, [tensor], world, [op, float(prescale_factor), float(postscale_factor)])
    tensor = _scaled(_with_gradient_times(tensor, size), prescale_factor)
    is_divided = op == Average and not tensor.dtype.is_floating
    operator = ReduceOp.SUM if is_divided else _OPERATORS[op]
    rows = _collectives.reducescatter(tensor, operator, _node_name(name), world)
    rows = tf.truncatediv(rows, tf.cast(size, rows.dtype)) if is_divided else rows
    return compression.decompress(_scaled(rows, postscale_factor), context)


def grouped_reducescatter(tensors, device_dense='', compression=Compression.none, op=Average, process_set=global_process_set,
                          prescale_factor=1.0, postscale_factor=1.0, name=None):
    return _one_after_another(lambda tensor: reducescatter(tensor, device_dense, compression, op, name, process_set, prescale_factor,
                                                           postscale_factor), tensors)


def barrier(process_set=global_process_set):
    """Waits for all ranks of the set."""
    world = world_of(process_set)
    agree(kinds.BARRIER, [], world)
    return _operations.barrier(world)


def join():
    """Declares that this rank has no further batch. Until all ranks have joined, it takes part in their eager all-reduces, with
    zeros. Returns the rank that joined last."""
    if not tf.executing_eagerly():
        raise NotImplementedError("shoal: join() is called eagerly, outside of tf.function")
    world, joined, last = world_of(global_process_set), set(), 0
    while len(joined) < global_process_set.size():
        told = exchange([kinds.JOIN, kinds.JOIN, [], [], []], world)
        last = max(joined_of(told) - joined, default=last)
        joined = joined_of(told)
        if len(joined) < len(told) and not fault_among(told, joined):
            _take_part(next(one for one in told if one.kind != kinds.JOIN), world)
    return last


def _take_part(told, world):
    """Takes part, with zeros, in the operation of the other ranks."""
    if told.kind == kinds.BARRIER:
        _operations.barrier(world)
    elif told.kind != GRADIENTS:
        zeros = [tf.zeros(shape, dtype) for dtype, shape in told.forms]
        _reduced_by_type(zeros, told.must_agree[0], None, world, global_process_set.size())
