"""Inputs of operations, their exact results, and ways to lay out a tensor in memory."""
import functools
import operator

import ranks
import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
REDUCED = FLOATS + INTEGERS + (torch.bool,)
MOVED = REDUCED + (torch.int16, torch.complex64, torch.complex128)
LAYOUTS = ("contiguous", "unaligned", "strided", "transposed")
if ranks.BACKEND == "gloo":  # it accepts no other tensors
    LAYOUTS = ("contiguous", "unaligned")
DEVICE = "cpu"  # where tensors are; test_device.py sets it
GUARD = 77  # surrounds a tensor that is part of a larger one; no result has this value
SCALE = 2.0
PERIOD = 17 * 5 * 3 * 11  # of numbers()


def on_host():
    return DEVICE == "cpu"


def name_of(type_):
    return str(type_).replace("torch.", "")


def operators(type_):
    """Returns the names of the operators that reduce a type."""
    arithmetic = ("SUM", "MIN", "MAX", "PRODUCT")
    bits = ("BAND", "BOR", "BXOR")
    if ranks.BACKEND == "gloo":
        return arithmetic + (() if type_ in FLOATS or type_ is torch.bool else bits)
    if type_ is torch.bool:
        return arithmetic + bits
    return arithmetic + ("AVG", "PREMUL_SUM") + (() if type_ in FLOATS else bits)


def reduce_op(name):
    return dist._make_nccl_premul_sum(SCALE) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def numbers(rank, count, type_, operator_name="SUM", salt=0):
    """Returns the input of one rank. Inputs of four ranks reduce exactly, in any order, in every type."""
    if count > PERIOD:
        return numbers(rank, PERIOD, type_, operator_name, salt).repeat(-(-count // PERIOD))[:count]
    index = torch.arange(count, dtype=torch.int64) * 7 + rank * 13 + salt * 5
    if operator_name == "PRODUCT":
        values = torch.tensor([1, 2, -1, -2, 1])[index % 5]
    elif operator_name == "AVG":
        values = 12 * (index % 5 - 2)
    else:
        values = index % 17 - 8
    if type_ is torch.bool:
        return index % 3 != 0 if operator_name != "PRODUCT" else index % 11 != 0
    return values.abs().to(type_) if type_ is torch.uint8 else values.to(type_)


def reduced(inputs, name):
    """Returns the exact result over the inputs of all ranks."""
    type_ = inputs[0].dtype
    rows = torch.stack(inputs).to(torch.float64 if type_ in FLOATS else torch.int64)
    if name in ("BAND", "BOR", "BXOR"):
        one = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}[name]
        return functools.reduce(one, rows.unbind()).to(type_)
    result = {"SUM": lambda: rows.sum(0), "MIN": lambda: rows.amin(0), "MAX": lambda: rows.amax(0),
              "PRODUCT": lambda: rows.prod(0), "AVG": lambda: rows.sum(0) / len(inputs),
              "PREMUL_SUM": lambda: SCALE * rows.sum(0)}[name]()
    return (result != 0 if type_ is torch.bool else result).to(type_)


def place(values, layout="contiguous"):
    """Copies a vector, with an even or odd number of elements, into memory with this layout."""
    count = values.numel()
    if layout == "contiguous":
        return values.to(DEVICE, copy=True)
    if layout == "unaligned":
        tensor = guarded(count + 3, values.dtype)[1:1 + count]
    elif layout == "strided":
        tensor = guarded(2 * count + 1, values.dtype)[1::2]
    else:  # a matrix stored column by column
        rows = 2 if count % 2 == 0 else 1
        tensor = guarded(count + 1, values.dtype)[:count].view(count // rows, rows).t()
    tensor.copy_(values.view(tensor.shape))
    return tensor


def guarded(count, type_):
    return torch.full((count,), GUARD, dtype=type_, device=DEVICE)


def check(tensor, values, *told):
    """Fails unless the tensor holds these values and the surrounding memory is untouched."""
    flat, values = tensor.reshape(-1).cpu(), values.reshape(-1).cpu()
    if not torch.equal(flat, values):
        wrong = (flat != values).nonzero().reshape(-1)
        at = wrong[:4].tolist()
        raise AssertionError(f"{told}: {len(wrong)} of {flat.numel()} elements are wrong, at {at}: {flat[at].tolist()} "
                             f"instead of {values[at].tolist()}")
    if tensor._base is not None and tensor._base.dim() == 1:
        beside = torch.ones(tensor._base.numel(), dtype=torch.bool)
        beside.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).zero_()
        around = tensor._base.cpu()[beside]
        if not torch.equal(around, torch.full_like(around, GUARD)):
            raise AssertionError(f"{told}: memory beside the tensor was written")
