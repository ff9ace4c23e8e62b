#!/usr/bin/env python3
"""Both shims against one table: which calls of a back-end are refused, with which exception and text, and how many tensors
are copied for calls whose tensors lack the layout that the library needs. The calls go to the back-end directly, without
the checks of torch.distributed."""
import ranks
import torch
import torch.distributed as dist
from ranks import Case, expect
from test_errors import back_end, fake_cuda_tensor, still_works
from torch._C import _distributed_c10d as c10d

SIZE = 2


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


def sparse():
    return torch.eye(3).to_sparse_csr()


def set_to(options, **fields):
    for name, value in {"asyncOp": False, **fields}.items():
        if name != "asyncOp" or hasattr(options, name):  # in torch 2.4 only some options have it
            setattr(options, name, value)
    return options


def method(end, name):
    """Python can reach some of a back-end's methods only through its group."""
    return getattr(end, name, None) or getattr(dist.group.WORLD, name)


def reduced_by(operator, tensor):
    return lambda end: end.allreduce([tensor], set_to(c10d.AllreduceOptions(), reduceOp=operator))


def coalesced(tensors):
    return lambda end: end.allreduce_coalesced(tensors, set_to(c10d.AllreduceCoalescedOptions()))


def rooted(name, root, *arguments):
    options = {"broadcast": c10d.BroadcastOptions, "reduce": c10d.ReduceOptions, "gather": c10d.GatherOptions,
               "scatter": c10d.ScatterOptions}[name]
    return lambda end: getattr(end, name)(*arguments, set_to(options(), rootRank=root))


def gathered(name, *arguments):
    return lambda end: method(end, name)(*arguments, set_to(c10d.AllgatherOptions()))


def scattered(name, *arguments):
    return lambda end: method(end, name)(*arguments, set_to(c10d.ReduceScatterOptions()))


def exchanged(output, tensor, output_splits, input_splits):
    return lambda end: end.alltoall_base(output, tensor, output_splits, input_splits, set_to(c10d.AllToAllOptions()))


def exchanged_lists(outputs, inputs):
    return lambda end: end.alltoall(outputs, inputs, set_to(c10d.AllToAllOptions()))


# ---- Refused calls: (call, exception, text) on each of two ranks ----

SUM, OR = dist.ReduceOp.SUM, dist.ReduceOp.BOR
ON_CUDA = {  # neither this torch nor this machine has such devices
    "c++": "shoal: a tensor is on cuda:0, which is not a device of CUDA's driver; this back-end serves those and the CPU: use another "
           'back-end for such tensors, as "cpu:shoal,xpu:xccl" does, or copy them to the CPU',
    "python": "shoal: a tensor is on cuda:0, but the Python shim serves only CPU tensors. Install a C++ compiler, so "
              'that the C++ shim serves CUDA devices; to use NCCL for them, write "cpu:shoal,cuda:nccl"'}
SPARSE = "shoal: a tensor is sparse; only dense tensors can be sent: use to_dense() first"
MIXED = "shoal: the tensors of one call have different types, torch.float32 and torch.int64"
NO_REDUCTION = ("shoal: cannot reduce tensors of torch.int16; float32, float64, bfloat16, float16, int64, int32, int8, uint8 and bool "
                "can be reduced: convert the tensor first")
NO_BITS = "shoal: the bitwise operators are for integers and bool, not for torch.float32"
NO_TRUTH = "shoal: bool tensors have no average and no scaled sum"
NO_RANK = "shoal: there is no rank 2 in a group of 2"
INT64 = torch.int64

REFUSED = {
    "two tensors": (lambda end: end.allreduce([ones(3), ones(3)], c10d.AllreduceOptions()), ValueError,
                    "shoal: one tensor is wanted here, not 2"),
    "a tensor on a GPU": (lambda end: reduced_by(SUM, fake_cuda_tensor())(end), ValueError, ON_CUDA),
    "a sparse tensor": (reduced_by(SUM, sparse()), ValueError, SPARSE),
    "a sparse tensor to send": (lambda end: end.send([sparse()], 0, 0), ValueError, SPARSE),
    "int16": (reduced_by(SUM, ones(3, dtype=torch.int16)), TypeError, NO_REDUCTION),
    "bits of floats": (reduced_by(OR, ones(3)), TypeError, NO_BITS),
    "average of bool": (reduced_by(dist.ReduceOp.AVG, ones(3, dtype=torch.bool)), TypeError, NO_TRUTH),
    "coalesced: none": (coalesced([]), ValueError, "shoal: no tensors to reduce"),
    "coalesced: types": (coalesced([ones(3), ones(3, dtype=INT64)]), TypeError, MIXED),
    "coalesced: sparse": (coalesced([ones(3), sparse()]), ValueError, SPARSE),
    "broadcast: root": (rooted("broadcast", 2, [ones(3)]), ValueError, NO_RANK),
    "reduce: root": (rooted("reduce", 2, [ones(3)]), ValueError, NO_RANK),
    "reduce: type": (rooted("reduce", 0, [ones(3, dtype=torch.int16)]), TypeError, NO_REDUCTION),
    "gather: root": (rooted("gather", 2, [], [ones(3)]), ValueError, NO_RANK),
    "scatter: root": (rooted("scatter", 2, [ones(3)], []), ValueError, NO_RANK),
    "all_gather: lists": (gathered("allgather", [[ones(3)] * 2] * 2, [ones(3)]), ValueError,
                          "shoal: one list of outputs is wanted here, not 2"),
    "all_gather: too many": (gathered("allgather", [[ones(3)] * 3], [ones(3)]), ValueError,
                             "shoal: a list of 3 tensors for 2 ranks"),
    "all_gather: types": (gathered("allgather", [[ones(3, dtype=INT64)] * 2], [ones(3)]), TypeError, MIXED),
    "all_gather: length": (gathered("allgather", [[ones(4)] * 2], [ones(3)]), ValueError,
                           "shoal: the input has 3 elements, but this rank's part of the output 4"),
    "all_gather_into_tensor: length": (
        gathered("_allgather_base", ones(7), ones(3)), ValueError,
        "shoal: the larger tensor must have 2 times the elements of the smaller, but has 7 to 3"),
    "all_gather_into_tensor: types": (gathered("_allgather_base", ones(6, dtype=INT64), ones(3)), TypeError, MIXED),
    "all_gather_coalesced: lists": (gathered("allgather_coalesced", [[ones(3)]], [ones(3)]), ValueError,
                                    "shoal: 1 lists of outputs of 1 inputs for 2 ranks"),
    "all_gather_coalesced: none": (gathered("allgather_coalesced", [[], []], []), ValueError,
                                   "shoal: 2 lists of outputs of 0 inputs for 2 ranks"),
    "all_gather_coalesced: outputs": (gathered("allgather_coalesced", [[ones(3)]] * 2, [ones(3), ones(4)]), ValueError,
                                      "shoal: a list of 1 outputs for 2 inputs"),
    "all_gather_coalesced: length": (gathered("allgather_coalesced", [[ones(3), ones(5)]] * 2, [ones(3), ones(4)]), ValueError,
                                     "shoal: the tensors of the list must have as many elements as this rank's, 4"),
    "all_gather_coalesced: sparse": (gathered("allgather_coalesced", [[ones(9), ones(4)]] * 2, [sparse(), ones(4)]), ValueError,
                                     SPARSE),
    "all_gather_into_tensor_coalesced: outputs": (gathered("allgather_into_tensor_coalesced", [ones(6)], [ones(3)] * 2),
                                                  ValueError, "shoal: 1 outputs for 2 inputs"),
    "reduce_scatter: lists": (scattered("reduce_scatter", [ones(3)], [[ones(3)] * 2] * 2), ValueError,
                              "shoal: one list of inputs is wanted here, not 2"),
    "reduce_scatter: length": (scattered("reduce_scatter", [ones(3)], [[ones(4)] * 2]), ValueError,
                               "shoal: the output has 3 elements, but this rank's part of the input 4"),
    "reduce_scatter: type": (scattered("reduce_scatter", [ones(3, dtype=torch.int16)], [[ones(3, dtype=torch.int16)] * 2]),
                             TypeError, NO_REDUCTION),
    "reduce_scatter_tensor: length": (
        scattered("_reduce_scatter_base", ones(3), ones(5)), ValueError,
        "shoal: the larger tensor must have 2 times the elements of the smaller, but has 5 to 3"),
    "reduce_scatter_tensor_coalesced: outputs": (scattered("reduce_scatter_tensor_coalesced", [ones(3)], [ones(6)] * 2),
                                                 ValueError, "shoal: 1 outputs for 2 inputs"),
    "reduce_scatter_tensor_coalesced: types": (
        scattered("reduce_scatter_tensor_coalesced", [ones(3), ones(3, dtype=INT64)], [ones(6), ones(6, dtype=INT64)]), TypeError,
        MIXED),
    "all_to_all: none": (exchanged_lists([], []), ValueError, "shoal: no inputs"),
    "all_to_all: too few": (exchanged_lists([ones(3)] * 2, [ones(3)]), ValueError, "shoal: a list of 1 tensors for 2 ranks"),
    "all_to_all: types": (exchanged_lists([ones(3, dtype=INT64)] * 2, [ones(3)] * 2), TypeError, MIXED),
    "splits: odd": (exchanged(ones(3), ones(3), [], []), ValueError,
                    "shoal: a tensor of 3 rows cannot be cut into 2 equal parts"),
    "splits: too few": (exchanged(ones(4), ones(4), [], [4]), ValueError, "shoal: 1 splits for 2 ranks"),
    "splits: negative": (exchanged(ones(2), ones(2), [], [-1, 3]), ValueError, "shoal: a split of -1 rows"),
    "splits: overflow": (exchanged(ones(2), ones(2), [2**63 - 1, 3], [1, 1]), ValueError,
                         "shoal: the splits add up to 2**63 rows or more, but the tensor has 2"),
    "splits: sum": (exchanged(ones(2), ones(2), [2, 2], [1, 1]), ValueError,
                    "shoal: the splits add up to 4 rows, but the tensor has 2"),
    "any source": (lambda end: end.recv_anysource([ones(3)], 0), NotImplementedError,
                   "shoal: a receive from any rank is not supported: pass src to recv()"),
}


def is_refused(call, kind, text):
    try:
        call(back_end())
    except Exception as error:
        expect(type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}:", error)
        expect(str(error) == text, f"another text than {text!r}:", repr(str(error)))
        return
    raise AssertionError("nothing was raised")


def refused_case(name, row):
    def body(world):
        call, kind, text = row
        is_refused(call, kind, text[world.shim] if isinstance(text, dict) else text)
        still_works(world)
    return Case(f"refused: {name}", body, sizes=(SIZE,))


def refused_where_the_root_is_another(world):
    """Lists that only the root has. The other rank calls nothing."""
    lists, one = [[ones(3)] * SIZE], ones(3)
    if world.rank == 0:
        is_refused(rooted("gather", 0, [], [one]), ValueError, "shoal: the root needs one list of outputs, not 0")
        is_refused(rooted("scatter", 0, [one], [[ones(4)] * SIZE]), ValueError,
                   "shoal: the tensors of the list must have as many elements as this rank's, 3")
    else:
        is_refused(rooted("gather", 0, lists, [one]), ValueError, "shoal: only the root, rank 0, has outputs")
        is_refused(rooted("scatter", 0, [one], lists), ValueError, "shoal: only the root, rank 0, has inputs")
    still_works(world)


def refused_by_the_library(world):
    """An error that only the library can detect begins with the operation's name."""
    for call, start in ((lambda end: end.send([ones(3)], 2, 0), "shoal:send: "),
                        (lambda end: end.recv([ones(3)], -1, 0), "shoal:recv: ")):
        try:
            call(back_end())
            raise AssertionError("nothing was raised")
        except ValueError as error:
            expect(str(error).startswith(start) and str(error).count("shoal:") == 1, error)
    still_works(world)


def failed_alike(world):
    """If ranks disagree, the text begins with the operation's name in every shim."""
    group = dist.new_group()
    try:
        dist.all_reduce(ones(10 + world.rank), group=group)
        raise AssertionError("nothing was raised")
    except dist.DistBackendError as error:
        expect(str(error).startswith("shoal:all_reduce: "), error)
    dist.destroy_process_group(group)
    still_works(world)


# ---- Copies ----


def strided(*shape, dtype=torch.float32):
    """Returns every second element of a row."""
    return torch.ones(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def row(count, length):
    return list(torch.ones(count * length).split(length))


def apart(count, length):
    """Returns `count` tensors with gaps between them."""
    whole = torch.ones(count * (length + 1))
    return [whole[i * (length + 1):][:length] for i in range(count)]


def conjugated(length):
    return torch.ones(length, dtype=torch.complex64).conj()


def by_root(make):
    """Returns the root's list, and an empty one on other ranks."""
    return [make()] if dist.get_rank() == 0 else []


COPIED = {  # call, copies on rank 0, copies on rank 1
    "plain": (lambda: reduced_by(SUM, ones(3)), 0, 0),
    "empty": (lambda: reduced_by(SUM, ones(0)), 0, 0),
    "every second": (lambda: reduced_by(SUM, strided(3)), 2, 2),
    "coalesced": (lambda: coalesced([ones(3), strided(4), ones(2)]), 2, 2),
    "broadcast": (lambda: rooted("broadcast", 0, [strided(3)]), 2, 1),
    "broadcast of conjugated": (lambda: rooted("broadcast", 0, [conjugated(3)]), 2, 1),
    "reduce": (lambda: rooted("reduce", 0, [strided(3)]), 2, 1),
    "all_gather": (lambda: gathered("allgather", [row(2, 3)], [ones(3)]), 0, 0),
    "all_gather, first empty": (lambda: gathered("allgather", [[ones(0), *row(1, 3)]],
                                                 [ones(3 if dist.get_rank() else 0)]), 0, 0),
    "all_gather, apart": (lambda: gathered("allgather", [apart(2, 3)], [ones(3)]), 2, 2),
    "all_gather, conjugated every second": (lambda: gathered(
        "_allgather_base", torch.ones(6, dtype=torch.complex64), strided(3, dtype=torch.complex64).conj()), 1, 1),
    "reduce_scatter": (lambda: scattered("reduce_scatter", [ones(3)], [row(2, 3)]), 0, 0),
    "reduce_scatter, strided": (lambda: scattered("reduce_scatter", [ones(6)], [[strided(2, 3), ones(2, 3)]]), 2, 2),
    "gather": (lambda: rooted("gather", 0, by_root(lambda: apart(2, 3)), [strided(3)]), 3, 1),
    "scatter": (lambda: rooted("scatter", 0, [strided(3)], by_root(lambda: apart(2, 3))), 3, 1),
    "all_to_all": (lambda: exchanged_lists(apart(2, 3), row(2, 3)), 2, 2),
    "all_to_all_single": (lambda: exchanged(ones(4), strided(4), [], []), 1, 1),
}


def copied_case(name, make, *expected):
    def body(world):
        call, end = make(), back_end()
        with torch.autograd.profiler.profile() as profile:
            call(end).wait()
        copies = sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")
        dist.barrier()
        expect(copies == expected[world.rank], f"{copies} tensors were copied, not {expected[world.rank]}")
    return Case(f"copied: {name}", body, sizes=(SIZE,))


CASES = [refused_case(*item) for item in REFUSED.items()]
CASES += [Case(body.__name__, body, sizes=(SIZE,)) for body in (refused_where_the_root_is_another, refused_by_the_library)]
CASES += [Case("failed_alike", failed_alike, sizes=(SIZE,), fresh=True)]
CASES += [copied_case(name, *row_) for name, row_ in COPIED.items()]

if __name__ == "__main__":
    ranks.run(CASES)
