"""Operations on tensors: a rank posts them with a name, and they are done after all ranks have posted them."""
from __future__ import annotations

import itertools

import torch

from .._common import controller as kinds
from .._common.controller import Request
from .._common.operators import Adasum, Average, Max, Min, Product, Sum, operator_of  # noqa: F401
from . import _world
from ._world import controller_of, global_process_set
from .compression import Compression

_numbers = itertools.count()
_handles = {}  # number: (request, function of its result)


def _type_of(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def _form_of(tensor):
    return [_type_of(tensor), list(tensor.shape)]


def _check(tensor):
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"shoal: a tensor is needed, not {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"Tensor type {tensor.type()} is not supported. shoal: shoal.horovod.torch serves the CPU: use NCCL for "
                         "tensors of GPUs")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")


def _post(kind, name, tensors, process_set, finish, outputs=None, must_agree=(), splits=(), held_bytes=None):
    for tensor in tensors:
        _check(tensor)
    controller = controller_of(process_set)
    request = Request(kind, controller.name_of(kind, name), map(_form_of, tensors), must_agree, splits, (tensors, outputs), held_bytes)
    controller.post(request)
    number = next(_numbers)
    _handles[number] = request, finish
    return number


def poll(handle):
    """Returns true if the operation is done, so that synchronize() will not wait."""
    return _handles[handle][0].is_done() if handle in _handles else True


def synchronize(handle):
    """Waits for an operation and returns its result. Raises HorovodInternalError if it failed on any rank."""
    if handle not in _handles:
        return None
    request, finish = _handles[handle]
    try:
        return finish(request.wait())
    finally:
        _handles.pop(handle, None)


def _first(results):
    return results[0]


def _all(results):
    return list(results)


# ---- All-reduce ----


def _allreduce_async(tensors, outputs, average, name, op, prescale, postscale, process_set, finish, held_bytes=None):
    must_agree = [operator_of(op, average), float(prescale), float(postscale)]
    return _post(kinds.ALLREDUCE, name, tensors, process_set, finish, outputs, must_agree, held_bytes=held_bytes)


def allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                    process_set=global_process_set):
    """Reduces the tensors of all ranks into a new tensor. Returns a handle."""
    _check(tensor)
    return _allreduce_async([tensor], [torch.empty_like(tensor, requires_grad=False)], average, name, op, prescale_factor,
                            postscale_factor, process_set, _first)


def allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                     process_set=global_process_set):
    """Reduces the tensors of all ranks in place. Returns a handle."""
    return _allreduce_async([tensor], [tensor], average, name, op, prescale_factor, postscale_factor, process_set, _first)


def allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
               process_set=global_process_set):
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                            process_set=global_process_set):
    """Reduces a list of tensors in one operation. Returns a handle."""
    for tensor in tensors:
        _check(tensor)
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    return _allreduce_async(list(tensors), outputs, average, name, op, prescale_factor, postscale_factor, process_set, _all)


def grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                             process_set=global_process_set):
    tensors = list(tensors)
    return _allreduce_async(tensors, tensors, average, name, op, prescale_factor, postscale_factor, process_set, _all)


def held_allreduce_async_(tensors, name, op, prescale_factor, postscale_factor, process_set):
    """Like grouped_allreduce_async_, but the operation may be held until there are more, or until the program waits."""
    tensors = list(tensors)
    return _allreduce_async(tensors, tensors, None, name, op, prescale_factor, postscale_factor, process_set, _all,
                            held_bytes=sum(tensor.nbytes for tensor in tensors))


def grouped_allreduce_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                       process_set=global_process_set):
    return synchronize(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, *tensors):
        ctx.options = options
        return tuple(synchronize(grouped_allreduce_async(tensors, **options)))

    @staticmethod
    def backward(ctx, *gradients):
        options = {**ctx.options, "name": None}
        return (None, *synchronize(grouped_allreduce_async([each.contiguous() for each in gradients], **options)))


def allreduce(tensor, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0,
              process_set=global_process_set):
    """Reduces the tensors of all ranks, and returns the result on every rank. Gradients pass through it."""
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[0]


def grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0,
                      postscale_factor=1.0, process_set=global_process_set):
    for tensor in tensors:
        _check(tensor)
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors))
    options = dict(average=average, name=name, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
                   process_set=process_set)
    return [compression.decompress(each, context) for each, context in zip(_Allreduce.apply(options, *compressed), contexts)]


def sparse_allreduce_async(tensor, name, op, process_set=global_process_set):
    """Returns a function that waits, and returns the sum or average of sparse tensors."""
    if op not in (Average, Sum):
        raise NotImplementedError("shoal: sparse tensors can be averaged and summed only")
    tensor = tensor.coalesce()
    indices = allgather_async(tensor._indices().t().contiguous(), name=f"{name}.indices", process_set=process_set)
    values = allgather_async(tensor._values().contiguous(), name=f"{name}.values", process_set=process_set)

    def result():
        all_indices, all_values = synchronize(indices).t(), synchronize(values)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices, all_values, tensor.size()).coalesce()
    return result


# ---- All-gather ----


def _with_rows(tensor):
    _check(tensor)
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def allgather_async(tensor, name=None, process_set=global_process_set):
    return _post(kinds.ALLGATHER, name, [_with_rows(tensor)], process_set, _first)


def grouped_allgather_async(tensors, name=None, process_set=global_process_set):
    return _post(kinds.ALLGATHER, name, [_with_rows(tensor) for tensor in tensors], process_set, _all)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, process_set, *tensors):
        ctx.process_set, ctx.shapes = process_set, [tensor.shape for tensor in tensors]
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx, *gradients):
        """Returns the average of the gradients of this rank's rows."""
        reduced = grouped_allreduce([each.contiguous() for each in gradients], op=Average, process_set=ctx.process_set)
        rows = torch.tensor([[shape[0] if shape else 1 for shape in ctx.shapes]])
        all_rows = synchronize(allgather_async(rows, process_set=ctx.process_set))
        own = ctx.process_set.rank()
        starts, counts = all_rows[:own].sum(0).tolist(), all_rows[own].tolist()
        parts = [each[start:start + count] for each, start, count in zip(reduced, starts, counts)]
        return (None, None, *(part.reshape(shape) for part, shape in zip(parts, ctx.shapes)))


def allgather(tensor, name=None, process_set=global_process_set):
    """Concatenates the tensors of all ranks along the first dimension, in which they may differ."""
    return _Allgather.apply(name, process_set, tensor)[0]


def grouped_allgather(tensors, name=None, process_set=global_process_set):
    return list(_Allgather.apply(name, process_set, *tensors))


# ---- Broadcast ----


def _broadcast_async(tensor, output, root_rank, name, process_set):
    controller_of(process_set)
    if root_rank not in process_set.ranks:
        raise ValueError(f"shoal: root_rank is {root_rank}, but must be a rank of the process set: {process_set.ranks}")
    return _post(kinds.BROADCAST, name, [tensor], process_set, _first, [output], [int(root_rank)])


def broadcast_async(tensor, root_rank, name=None, process_set=global_process_set):
    _check(tensor)
    return _broadcast_async(tensor, torch.empty_like(tensor, requires_grad=False), root_rank, name, process_set)


def broadcast_async_(tensor, root_rank, name=None, process_set=global_process_set):
    return _broadcast_async(tensor, tensor, root_rank, name, process_set)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, root_rank, name, process_set):
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx, gradient):
        reduced = allreduce(gradient.contiguous(), op=Average, process_set=ctx.process_set)
        return reduced if _world.rank() == ctx.root_rank else torch.zeros_like(reduced), None, None, None


def broadcast(tensor, root_rank, name=None, process_set=global_process_set):
    """Returns root_rank's tensor on every rank. root_rank is a rank of the job, also with a process_set."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_(tensor, root_rank, name=None, process_set=global_process_set):
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# ---- All-to-all ----


def _splits_of(tensor, splits, process_set):
    count = len(process_set.ranks)
    if splits is None or len(splits) == 0:
        if tensor.shape[0] % count:
            raise ValueError(f"shoal: {tensor.shape[0]} rows cannot be divided evenly among {count} ranks: pass splits")
        return [tensor.shape[0] // count] * count
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32:
            raise ValueError(f"alltoall expects splits of int32, not {splits.dtype}")
        splits = splits.tolist()
    if len(splits) != count:
        raise ValueError(f"Number of entries in splits ({len(splits)}) does not equal number of ranks ({count})")
    if min(splits) < 0 or sum(splits) > tensor.shape[0]:
        raise ValueError(f"Sum of splits entries is greater than the first dimension of the tensor: {splits}, {tensor.shape[0]} rows")
    return [int(each) for each in splits]


def alltoall_async(tensor, splits=None, name=None, process_set=global_process_set):
    """Returns a handle of (rows from all ranks, number of rows from each)."""
    tensor = _with_rows(tensor)
    controller_of(process_set)
    return _post(kinds.ALLTOALL, name, [tensor], process_set, lambda result: result,
                 splits=_splits_of(tensor, splits, process_set))


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, splits, name, process_set):
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received, ctx.rows = process_set, received, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx, gradient, _):
        output, _ = synchronize(alltoall_async(gradient.contiguous(), ctx.received, process_set=ctx.process_set))
        if output.shape[0] < ctx.rows:  # rows that were not sent to any rank
            output = torch.cat([output, output.new_zeros((ctx.rows - output.shape[0], *output.shape[1:]))])
        return output, None, None, None


def alltoall(tensor, splits=None, name=None, process_set=global_process_set):
    """Sends rows to every rank: splits[0] to rank 0, and so on; without splits, the same number to each. Returns the rows from
    all ranks; with splits, (rows, number of rows from each)."""
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


# ---- Reduce-scatter ----


def _reducescatter_async(tensors, name, op, process_set, prescale, postscale, finish):
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 0:
            raise ValueError("shoal: a scalar cannot be scattered: reducescatter needs a tensor with a first dimension")
    if op == Adasum:
        raise NotImplementedError("shoal: there is no Adasum: use op=hvd.Average or hvd.Sum")
    if op not in (Average, Sum):
        raise ValueError("shoal: reducescatter takes op=hvd.Average or hvd.Sum")
    return _post(kinds.REDUCESCATTER, name, tensors, process_set, finish, None, [op, float(prescale), float(postscale)])


def reducescatter_async(tensor, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0):
    return _reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor, _first)


def grouped_reducescatter_async(tensors, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0,
                                postscale_factor=1.0):
    return _reducescatter_async(list(tensors), name, op, process_set, prescale_factor, postscale_factor, _all)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, *tensors):
        ctx.options = options
        return tuple(synchronize(grouped_reducescatter_async(tensors, **options)))

    @staticmethod
    def backward(ctx, *gradients):
        options = ctx.options
        factor = options["prescale_factor"] * options["postscale_factor"]
        if options["op"] == Sum:
            factor *= options["process_set"].size()
        scaled = [(each * factor).contiguous() for each in gradients]
        return (None, *synchronize(grouped_allgather_async(scaled, process_set=options["process_set"])))


def grouped_reducescatter(tensors, name=None, compression=Compression.none, op=Average, process_set=global_process_set,
                          prescale_factor=1.0, postscale_factor=1.0):
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors))
    options = dict(name=name, op=op, process_set=process_set, prescale_factor=prescale_factor, postscale_factor=postscale_factor)
    results = _Reducescatter.apply(options, *compressed)
    return [compression.decompress(each, context) for each, context in zip(results, contexts)]


def reducescatter(tensor, name=None, compression=Compression.none, op=Average, process_set=global_process_set,
                  prescale_factor=1.0, postscale_factor=1.0):
    """Returns this rank's rows of the reduced tensor. If rows cannot be divided evenly, the first ranks have one more."""
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


# ---- Without tensors ----


def join(device=-1):
    """Declares that this rank has no further batch. Until all ranks have joined, it takes part in their all-reduces, with
    zeros. Returns the rank that joined last."""
    return controller_of(global_process_set).post(Request(kinds.JOIN, kinds.JOIN)).wait()


def barrier(process_set=global_process_set):
    """Waits for all ranks of the set."""
    controller = controller_of(process_set)
    controller.post(Request(kinds.BARRIER, controller.name_of(kinds.BARRIER, None))).wait()
