"""Tensors and operators in the form that the library needs, for the shim in Python: which are refused and with which text,
which are copied into one vector, and which are copied back.

The shim in C++ does this in backend/operands.h and backend/types.h; functions with the same task have the same name there.
tests/python/test_shims_alike.py compares the error texts and the numbers of copies of both, so a change here needs one
there."""
import re

import torch
import torch.distributed as dist

from .. import _native

_TYPES = {torch.float32: _native.FLOAT32, torch.float64: _native.FLOAT64, torch.bfloat16: _native.BFLOAT16,
          torch.float16: _native.FLOAT16, torch.int64: _native.INT64, torch.int32: _native.INT32, torch.int8: _native.INT8,
          torch.uint8: _native.UINT8}
# torch's types by their numbers. A type that travels as another one carries its number, so that ranks detect different types.
_NUMBERED = ("uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool qint8 quint8 qint32 bfloat16 "
             "quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz "
             "uint16 uint32 uint64 uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 float8_e8m0fnu "
             "float4_e2m1fn_x2").split()
_NUMBERS = {getattr(torch, name): number for number, name in enumerate(_NUMBERED, 1) if hasattr(torch, name)}
_SEVERAL, _SEVERAL_END = 128, 256  # range of tags for tensors of several types


def _operators(**names):
    """Returns Shoal's operators by torch's, as far as this version of torch has them."""
    return {getattr(dist.ReduceOp, name): operator for name, operator in names.items() if hasattr(dist.ReduceOp, name)}


_OPERATORS = _operators(SUM=_native.SUM, AVG=_native.AVG, MIN=_native.MIN, MAX=_native.MAX, PRODUCT=_native.PROD,
                        BAND=_native.BITAND, BOR=_native.BITOR, BXOR=_native.BITXOR, PREMUL_SUM=_native.SCALED_SUM)
_BITWISE = (_native.BITAND, _native.BITOR, _native.BITXOR)
_TRUTH = {_native.SUM: _native.MAX, _native.PROD: _native.MIN}  # a truth value is a byte of 0 or 1: a sum is "or", a product "and"


# ---- Types and operators -----------------------------------------------------------------------------------------------------


def moved(dtype):
    """Returns the type in which elements travel if they are only moved: a type of Shoal, and how many of it make one
    element."""
    return (_TYPES[dtype], 1) if dtype in _TYPES else (_as_bytes(_NUMBERS.get(dtype, 0)), torch.empty((), dtype=dtype).element_size())


def moved_together(dtypes):
    """Returns the type in which the bytes of several tensors travel."""
    numbers = [_NUMBERS.get(dtype, 0) for dtype in dtypes]
    if len(set(numbers)) == 1:
        return _as_bytes(numbers[0])
    digest = 0
    for number in numbers:
        digest = (31 * digest + number) % (_SEVERAL_END - _SEVERAL)
    return _as_bytes(_SEVERAL + digest)


def _as_bytes(tag):
    """SHOAL_TYPE_TAGGED of shoal.h."""
    return _native.UINT8 | tag << 8


def in_words_of_torch(text):
    """Replaces the numbers of tags in the library's text by torch's names of types."""
    return re.sub(r"\buint8 tagged (\d+)", lambda found: f"bytes of {_name_of(int(found[1]))}", text)


def _name_of(tag):
    return f"torch.{_NUMBERED[tag - 1]}" if tag <= len(_NUMBERED) else "several types"


def reduction(dtype, reduce_op):
    """Returns Shoal's type, operator and scale for a reduction of torch. Raises TypeError if there is none."""
    if dtype not in _TYPES and dtype is not torch.bool:
        raise TypeError(f"shoal: cannot reduce tensors of {dtype}; float32, float64, bfloat16, float16, int64, int32, int8, uint8 "
                        "and bool can be reduced: convert the tensor first")
    operator = _OPERATORS.get(reduce_op.op)
    if operator is None:
        raise ValueError("shoal: this is not an operator of a reduction")
    if dtype is torch.bool:
        operator = _truth_operator(operator)
    if dtype.is_floating_point and operator in _BITWISE:
        raise TypeError(f"shoal: the bitwise operators are for integers and bool, not for {dtype}")
    return moved(dtype)[0], operator, reduce_op.__getstate__()[1] if operator == _native.SCALED_SUM else 1.0


def _truth_operator(operator):
    if operator in (_native.AVG, _native.SCALED_SUM):
        raise TypeError("shoal: bool tensors have no average and no scaled sum")
    return _TRUTH.get(operator, operator)


# ---- What is refused ---------------------------------------------------------------------------------------------------------


def check_tensor(tensor):
    if not tensor.is_cpu:
        raise ValueError(f"shoal: a tensor is on {tensor.device}, but the Python shim serves only CPU tensors. Install a C++ compiler, so that "
                         'the C++ shim serves CUDA devices; to use NCCL for them, write "cpu:shoal,cuda:nccl"')
    if tensor.layout is not torch.strided:
        raise ValueError("shoal: a tensor is sparse; only dense tensors can be sent: use to_dense() first")


def check_types(tensors, dtype):
    for tensor in tensors:
        check_tensor(tensor)
        if tensor.dtype is not dtype:
            raise TypeError(f"shoal: the tensors of one call have different types, {dtype} and {tensor.dtype}")


def only(tensors):
    if len(tensors) != 1:
        raise ValueError(f"shoal: one tensor is wanted here, not {len(tensors)}")
    check_tensor(tensors[0])
    return tensors[0]


def only_list(lists, what):
    if len(lists) != 1:
        raise ValueError(f"shoal: one list of {what} is wanted here, not {len(lists)}")
    return lists[0]


def check_root(root, size):
    if not 0 <= root < size:
        raise ValueError(f"shoal: there is no rank {root} in a group of {size}")
    return root


def check_parts(parts, dtype, size):
    """Raises an error unless there is one part of that type for each rank."""
    if len(parts) != size:
        raise ValueError(f"shoal: a list of {len(parts)} tensors for {size} ranks")
    check_types(parts, dtype)


def check_own_part(parts, rank, whole, one, list_of):
    """Raises ValueError unless this rank's part of the list has as many elements as its other tensor. one, list_of: names of
    the two."""
    if parts[rank].numel() != whole.numel():
        raise ValueError(f"shoal: the {one} has {whole.numel()} elements, but this rank's part of the {list_of} "
                         f"{parts[rank].numel()}")


def are_equal_lengths(tensors):
    return all(tensor.numel() == tensors[0].numel() for tensor in tensors)


def check_equal(parts, one):
    if not are_equal_lengths([one, *parts]):
        raise ValueError("shoal: the tensors of the list must have as many elements as this rank's, "
                         f"{one.numel()}")


def check_gathered(whole, part, size):
    check_types([whole, part], part.dtype)
    if whole.numel() != part.numel() * size:
        raise ValueError(f"shoal: the larger tensor must have {size} times the elements of the smaller, but has {whole.numel()} "
                         f"to {part.numel()}")


def check_none(lists, root, what):
    """Raises ValueError if a rank other than the root passes something."""
    if lists and lists[0]:
        raise ValueError(f"shoal: only the root, rank {root}, has {what}")


def check_pairs(outputs, inputs):
    if not inputs or len(outputs) != len(inputs):
        raise ValueError(f"shoal: {len(outputs)} outputs for {len(inputs)} inputs")


def split_counts(tensor, splits, size):
    """Returns the number of elements in each rank's part of a tensor cut along its first dimension. Without splits, parts are
    equal."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"shoal: a tensor of {rows} rows cannot be cut into {size} equal parts")
        return [tensor.numel() // size] * size
    if len(splits) != size:
        raise ValueError(f"shoal: {len(splits)} splits for {size} ranks")
    for split in splits:
        if split < 0:
            raise ValueError(f"shoal: a split of {split} rows")
    if sum(splits) >= 2**63:
        raise ValueError(f"shoal: the splits add up to 2**63 rows or more, but the tensor has {rows}")
    if sum(splits) != rows:
        raise ValueError(f"shoal: the splits add up to {sum(splits)} rows, but the tensor has {rows}")
    return [split * (tensor.numel() // max(1, rows)) for split in splits]


# ---- Operands ----------------------------------------------------------------------------------------------------------------


def _is_plain(tensor):
    """Returns true if memory holds the elements unchanged and in their order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_row(tensors):
    """Returns true if the tensors are adjacent in memory, in this order. The position of empty tensors does not matter."""
    end = None
    for tensor in tensors:
        if not tensor.numel():
            continue
        if not _is_plain(tensor) or (end is not None and tensor.data_ptr() != end):
            return False
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return True


class Operands:
    """The operands of one call, as memory in the order that the library needs, which stays alive until let_go(). Tensors in
    another order are copied; bring_back() copies the results into them."""

    def __init__(self):
        self._alive, self._copies = [], []

    def input(self, *tensors):
        return self._address(tensors, has_contents=True, is_output=False)

    def output(self, *tensors, has_contents=False):
        return self._address(tensors, has_contents, is_output=True)

    @property
    def has_copies(self):
        return bool(self._copies)

    def bring_back(self):
        with torch.inference_mode():  # so that inference tensors may also be written to
            for tensor, piece in self._copies:
                tensor.copy_(piece)

    def let_go(self):
        self._alive, self._copies = [], []

    def _address(self, tensors, has_contents, is_output):
        if not _is_row(tensors):
            tensors = [self._flat(tensors, has_contents, is_output)]
        self._alive += tensors
        return next((tensor.data_ptr() for tensor in tensors if tensor.numel()), None)

    def _flat(self, tensors, has_contents, is_output):
        counts = [tensor.numel() for tensor in tensors]
        flat = torch.empty(sum(counts), dtype=tensors[0].dtype)
        pieces = [(tensor.detach(), piece.view(tensor.shape)) for tensor, piece in zip(tensors, flat.split(counts))]
        if has_contents:
            for tensor, piece in pieces:
                piece.copy_(tensor)
        if is_output:
            self._copies += pieces
        return flat
