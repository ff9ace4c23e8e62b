"""Moves the tensors of the operations on which ranks have agreed. One thread at a time calls it."""
from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

import shoal.torch
from shoal.torch import _communicator

from .._common import controller as kinds
from .._common.operators import Average, Max, Min, Product, Sum

FUSION_BYTES = 64 << 20  # size of tensors in one all-reduce
_OPS = {Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX,
        Product: dist.ReduceOp.PRODUCT}


class Executor:
    """Executes operations of one group of torch.distributed. ranks: its ranks in the job."""

    def __init__(self, group, ranks):
        self._group, self._ranks = group, ranks
        self._size = len(ranks)
        timeout = _communicator.timeouts.get(f"torch.{group.group_name}") or dist.distributed_c10d.default_pg_timeout
        self.timeout_s = timeout.total_seconds()
        self._has_average = shoal.torch._serves_cpu(group)  # another back-end, chosen by the program, may have no AVG

    def abort(self):
        """Ends the operations in progress with an error, on all ranks."""
        backend = self._group._get_backend(torch.device("cpu"))
        if hasattr(backend, "abort"):  # older versions of torch and some back-ends lack it
            with contextlib.suppress(RuntimeError):
                backend.abort()

    def gather(self, block):
        own = torch.frombuffer(bytearray(block), dtype=torch.uint8)
        all_blocks = torch.empty(self._size * own.numel(), dtype=torch.uint8)
        dist.all_gather(list(all_blocks.split(own.numel())), own, group=self._group)
        text = all_blocks.numpy().tobytes()
        return [text[i * own.numel():(i + 1) * own.numel()] for i in range(self._size)]

    @torch.no_grad()
    def execute(self, batch):
        while batch:
            count = self._count_of_fused(batch)
            if batch[0][0] == kinds.ALLREDUCE:
                self._allreduce(batch[:count])
            else:
                kind, told, request = batch[0]
                request.finish(getattr(self, "_" + kind)(told, request))
            batch = batch[count:]

    # ---- All-reduce ----

    def _count_of_fused(self, batch):
        """Returns how many operations at the front go into one all-reduce."""
        first, nbytes = self._fused_form(batch[0]), 0
        for count, each in enumerate(batch):
            nbytes += self._bytes_of(each)
            if count and (first is None or self._fused_form(each) != first or nbytes > FUSION_BYTES):
                return count
        return len(batch)

    @staticmethod
    def _fused_form(entry):
        kind, told, _ = entry
        one = next(iter(told.values()))
        types = {form[0] for form in one.forms}
        return (types.pop(), one.must_agree) if kind == kinds.ALLREDUCE and len(types) == 1 else None

    @staticmethod
    def _bytes_of(entry):
        one = next(iter(entry[1].values()))
        return sum(torch.Size(shape).numel() * getattr(torch, name).itemsize for name, shape in one.forms)

    def _allreduce(self, batch):
        """Runs in the same way on all ranks. Ranks that have joined have no request, and use zeros."""
        forms, tensors, outputs = [], [], []
        for _, told, request in batch:
            one = next(iter(told.values()))
            forms += one.forms
            inputs = request.payload[0] if request else [torch.zeros(s, dtype=getattr(torch, t)) for t, s in one.forms]
            tensors += [tensor.detach() for tensor in inputs]
            outputs += [tensor.detach() for tensor in request.payload[1]] if request else inputs
        op, prescale, postscale = next(iter(batch[0][1].values())).must_agree
        for same in _by_type(tensors):
            self._reduce([tensors[i] for i in same], [outputs[i] for i in same], op, prescale, postscale)
        for _, _, request in batch:
            if request:
                request.finish(request.payload[1])

    def _reduce(self, tensors, outputs, op, prescale, postscale):
        """Reduces the tensors as one vector: the outputs' own memory if it is contiguous on this rank, else a copy."""
        row = _in_a_row(outputs)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if row is None else row
        if row is not None:
            _copy_unless_same(tensors, outputs)
        scale(flat, prescale)
        if op == Average and postscale == 1 and flat.is_floating_point() and self._has_average:
            dist.all_reduce(flat, dist.ReduceOp.AVG, group=self._group)
        else:
            dist.all_reduce(flat, _OPS[op], group=self._group)
            scale(flat, postscale, self._size if op == Average else 1)
        if row is None:
            _copy_unless_same(flat.split([tensor.numel() for tensor in tensors]), outputs)

    # ---- The others: the result of a request ----

    def _barrier(self, told, request):
        return None

    def _allgather(self, told, request):
        tensors = request.payload[0]
        rows = [[form[1][0] for form in told[rank].forms] for rank in range(self._size)]
        return [self._gather_rows(tensor.detach(), [each[i] for each in rows]) for i, tensor in enumerate(tensors)]

    def _gather_rows(self, tensor, rows):
        output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        dist.all_gather(list(output.split(rows)), tensor, group=self._group)
        return output

    def _broadcast(self, told, request):
        (tensor,), (output,) = request.payload
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        dist.broadcast(output.detach(), request.must_agree[0], group=self._group)
        return [output]

    def _alltoall(self, told, request):
        tensor = request.payload[0][0].detach()
        own = self._ranks.index(dist.get_rank())
        received = [told[rank].splits[own] for rank in range(self._size)]
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        used = tensor[:sum(request.splits)]
        dist.all_to_all_single(output, used, received, request.splits, group=self._group)
        return output, torch.tensor(received, dtype=torch.int32)

    def _reducescatter(self, told, request):
        op, prescale, postscale = request.must_agree
        return [self._reduce_rows(tensor.detach(), op, prescale, postscale) for tensor in request.payload[0]]

    def _reduce_rows(self, tensor, op, prescale, postscale):
        """If rows cannot be divided evenly, the first ranks have one more."""
        own, count = self._ranks.index(dist.get_rank()), tensor.shape[0]
        rows = [count // self._size + (rank < count % self._size) for rank in range(self._size)]
        tensor = scale(tensor.clone(), prescale)
        output = tensor.new_empty((rows[own], *tensor.shape[1:]))
        dist.reduce_scatter(output, list(tensor.split(rows)), _OPS[op], group=self._group)
        return scale(output, postscale, self._size if op == Average else 1)


def scale(tensor, factor, divisor=1):
    """Multiplies in place. Integers are multiplied in double precision and truncated."""
    if factor == 1 and divisor == 1:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor / divisor)
    if factor == 1:
        return tensor.copy_(torch.div(tensor, divisor, rounding_mode="trunc"))
    return tensor.copy_(tensor.to(torch.float64).mul_(factor / divisor))


def _in_a_row(tensors):
    """Returns the memory of contiguous tensors of one type as one vector, or None if they are not adjacent in this order."""
    end, storage = tensors[0].data_ptr(), tensors[0].untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.numel() * tensor.element_size()
    return tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _copy_unless_same(sources, outputs):
    for source, output in zip(sources, outputs):
        if source.data_ptr() != output.data_ptr():
            output.copy_(source.view(output.shape))


def _by_type(tensors):
    """Returns lists of the indices of tensors of one type."""
    groups = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(i)
    return groups.values()
