#!/usr/bin/env python3
"""Operations of shoal.tensorflow on 3 ranks: results, shapes, gradients, eagerly and inside tf.function."""
import pathlib
import tempfile
import time
import tracemalloc
import warnings

import numpy as np
import tensorflow as tf

import forked
import shoal.tensorflow as shoal
from shoal.tensorflow import ReduceOp
from tap import expect, run_cases

tf.get_logger().setLevel("ERROR")  # tracing a function anew for each type logs a warning

REDUCED = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int8, tf.uint8, tf.int32, tf.int64]
MOVED = [*REDUCED, tf.int16, tf.uint16, tf.uint32, tf.uint64, tf.bool, tf.complex64, tf.complex128]


def same(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape and (got == wanted).all(), (got, wanted)


def numbers(rank, shape, dtype=tf.float32):
    """Returns small whole numbers that depend on the rank. Their sums are exact in every type."""
    count = int(np.prod(shape))
    return tf.cast(tf.reshape(tf.range(count) % 5 + rank, shape), dtype)


def ranks():
    return range(shoal.size())


def eager_and_graph(function):
    """Yields the function's result from an eager call, then from a tf.function."""
    yield function()
    yield tf.function(function)()


def refuses(error, words, function):
    """Fails unless the function raises this error with these words."""
    try:
        function()
    except error as told:
        assert all(word in str(told) for word in words), told
    else:
        raise AssertionError(f"no {error}")


# ---- Results ----


def allreduce_sums_every_type(rank):
    wanted = sum(numbers(r, [7, 3], tf.int32) for r in ranks()).numpy()
    for every in eager_and_graph(lambda: [shoal.allreduce(numbers(rank, [7, 3], dtype), ReduceOp.SUM) for dtype in REDUCED]):
        for dtype, got in zip(REDUCED, every):
            assert got.dtype == dtype and got.shape == [7, 3]
            same(tf.cast(got, tf.int32), wanted)


def allreduce_has_every_operator(rank):
    every = np.stack([numbers(r, [5]).numpy() for r in ranks()])
    for op, wanted in ((ReduceOp.AVERAGE, every.mean(0, dtype=np.float32)), (ReduceOp.MIN, every.min(0)),
                       (ReduceOp.MAX, every.max(0)), (ReduceOp.PRODUCT, every.prod(0))):
        np.testing.assert_allclose(shoal.allreduce(numbers(rank, [5]), op), wanted, rtol=1e-6)
    same(shoal.allreduce(tf.constant(float(rank))), sum(ranks()) / shoal.size())


def large_and_empty_tensors_arrive(rank):
    for shape in ([3_000_001], [0], [4, 0, 2], []):
        for got in eager_and_graph(lambda: shoal.allreduce(numbers(rank, shape), ReduceOp.SUM)):
            same(got, sum(numbers(r, shape) for r in ranks()))


def allreduce_casts_where_asked(rank):
    for compression in (shoal.Compression.fp16, shoal.Compression.bf16):
        got = shoal.allreduce(numbers(rank, [9]), ReduceOp.SUM, compression)
        assert got.dtype == tf.float32
        same(got, sum(numbers(r, [9]) for r in ranks()))
        same(shoal.allreduce(tf.constant([1 + 2.0**-12]), ReduceOp.MAX, compression), [1.0])  # neither type has enough digits
    same(shoal.oob_allreduce(tf.constant([4.0 * rank])), [4.0 * sum(ranks()) / shoal.size()])
    refuses(ValueError, ["int8"], lambda: shoal.allreduce(tf.ones([1]), compression="int8"))


def slices_are_gathered(rank):
    slices = tf.IndexedSlices(numbers(rank, [rank + 1, 2]), tf.range(rank + 1), tf.constant([4, 2]))
    for got in eager_and_graph(lambda: tf.convert_to_tensor(shoal.allreduce(slices, ReduceOp.SUM))):
        same(got, sum(tf.pad(numbers(r, [r + 1, 2]), [[0, 3 - r], [0, 0]]) for r in ranks()))
    refuses(NotImplementedError, ["IndexedSlices"], lambda: shoal.allreduce(slices, ReduceOp.MAX))


def groups_keep_their_order(rank):
    def tensors(r):
        return [numbers(r, [3]), numbers(r, [2, 2], tf.int32), numbers(r + 1, [1]), numbers(r, [], tf.float64)]
    for got in eager_and_graph(lambda: shoal.grouped_allreduce(tensors(rank), ReduceOp.SUM)):
        for i, one in enumerate(got):
            same(one, sum(tensors(r)[i] for r in ranks()))


def broadcast_moves_every_type(rank):
    def broadcast_all():
        return [shoal.broadcast(tf.cast(numbers(rank, [3, 2], tf.int32), dtype), shoal.size() - 1) for dtype in MOVED]
    for every in eager_and_graph(broadcast_all):
        for dtype, got in zip(MOVED, every):
            assert got.dtype == dtype
            same(got, tf.cast(numbers(shoal.size() - 1, [3, 2], tf.int32), dtype))
    refuses(ValueError, ["root_rank is 7"], lambda: shoal.broadcast(tf.ones([1]), 7))


def allgather_joins_rows_of_different_lengths(rank):
    for dtype in (tf.float32, tf.bool, tf.complex64):
        wanted = np.concatenate([tf.cast(numbers(r, [2 * r, 3], tf.int32), dtype) for r in ranks()])
        for got in eager_and_graph(lambda: shoal.allgather(tf.cast(numbers(rank, [2 * rank, 3], tf.int32), dtype))):
            same(got, wanted)
    same(shoal.allgather(tf.constant(rank)), list(ranks()))
    shape = tf.function(shoal.allgather, input_signature=[tf.TensorSpec([None, 3])]).get_concrete_function().output_shapes
    assert shape.as_list() == [None, 3], shape


def ragged_shapes_are_told_on_every_rank(rank):
    refuses(tf.errors.InvalidArgumentError,
            ["first dimension only: that of rank 0 has the shape [2, 3], that of rank 1 [2, 4]"],
            lambda: shoal.allgather(tf.ones([2, 3 + (rank == 1)])))
    refuses(tf.errors.InvalidArgumentError,
            ['"scores"', "that of rank 0 has the shape [1, 1, 1, 1, 1, 1, 1, 1, ...], that of rank 1 [1]"],
            tf.function(lambda: shoal.allgather(tf.ones([1] if rank == 1 else [1] * 9), name="scores")))


def reducescatter_divides_rows(rank):
    for rows in (6, 7, 1):
        every = sum(numbers(r, [rows, 2]) for r in ranks())
        shares = [rows // shoal.size() + (r < rows % shoal.size()) for r in ranks()]
        begin = sum(shares[:rank])
        for got in eager_and_graph(lambda: shoal.reducescatter(numbers(rank, [rows, 2]))):
            same(got, every[begin:begin + shares[rank]])


def alltoall_exchanges_rows(rank):
    size = shoal.size()
    same(shoal.alltoall(tf.range(2 * size) + 100 * rank), [100 * r + 2 * rank + i for r in ranks() for i in range(2)])

    def uneven():
        rows = tf.concat([tf.fill([to], 10 * rank + to) for to in ranks()], 0)
        return shoal.alltoall(rows, splits=list(ranks()))
    for got, received in eager_and_graph(uneven):
        same(got, [10 * r + rank for r in ranks() for _ in range(rank)])
        same(received, [rank] * size)
    refuses(ValueError, ["divided evenly"], lambda: shoal.alltoall(tf.range(size + 1)))
    refuses(tf.errors.InvalidArgumentError, ["splits add up to"], lambda: shoal.alltoall(tf.range(size), splits=[0] * size))
    most = 2**63 - 1  # the sum of twice that and 5 is 3 in 64 bits
    refuses(tf.errors.InvalidArgumentError, [f"rank 0 is given {most} rows of 4 elements"],
            lambda: shoal.alltoall(tf.ones([3, 4]), splits=[most, most, 5]))


def barrier_waits_in_a_graph_too(rank):
    shoal.barrier()

    @tf.function
    def both():
        shoal.barrier()
        return shoal.allreduce(tf.constant(1.0), ReduceOp.SUM)
    same(both(), shoal.size())


def objects_go_round(rank):
    assert shoal.allgather_object({"rank": rank}) == [{"rank": r} for r in ranks()]
    assert shoal.broadcast_object([rank, "x" * 1000 * rank], 1) == [1, "x" * 1000]
    big = bytes(1 << 20)
    tracemalloc.start()
    assert shoal.allgather_object(big) == [big] * shoal.size()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 7 * len(big), peak  # a list of the bytes as numbers would take 9 times as much


# ---- Graphs ----


def many_operations_run_in_one_function(rank):
    @tf.function
    def step(x):
        sums = [shoal.allreduce(x + float(i), ReduceOp.SUM) for i in range(40)]
        shoal.allreduce(x, ReduceOp.SUM)  # TensorFlow prunes it, but its start still runs
        return tf.add_n(sums)
    for _ in range(20):
        x = numbers(rank, [50_000])
        every = sum(numbers(r, [50_000]) for r in ranks())
        same(step(x), 40 * every + shoal.size() * sum(range(40)))


def loops_run_in_order(rank):
    @tf.function
    def powers(x):
        for _ in tf.range(10):
            x = shoal.allreduce(x, ReduceOp.MAX) + 1.0
        return x
    same(powers(tf.constant([float(rank)])), [shoal.size() - 1 + 10.0])


def results_are_not_written_again(rank):
    """The result of one step remains, whatever later steps do."""
    step = tf.function(lambda x: shoal.allreduce(x, ReduceOp.SUM))
    kept = [step(tf.fill([1000], float(i))) for i in range(20)]
    for i, one in enumerate(kept):
        same(one, np.full([1000], i * shoal.size()))


# ---- Gradients ----


def gradients_of(function, x):
    def compute():
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = function(x)
        return tape.gradient(loss, x)
    return list(eager_and_graph(compute))


def operations_have_gradients(rank):
    size, x = shoal.size(), tf.reshape(tf.range(6.0), [6, 1])
    weights = tf.reshape(tf.range(6.0) * (rank + 1), [6, 1])
    every = sum(np.arange(6.0)[:, None] * (r + 1) for r in ranks())
    for op, divisor in ((ReduceOp.SUM, 1), (ReduceOp.AVERAGE, size)):
        for got in gradients_of(lambda x: tf.reduce_sum(weights * shoal.allreduce(x, op)), x):
            np.testing.assert_allclose(got, every / divisor, rtol=1e-6)
    for got in gradients_of(lambda x: tf.reduce_sum(weights * shoal.broadcast(x, 1)), x):
        same(got, every if rank == 1 else 0 * every)
    long = tf.tile(weights, [size, 1])
    for got in gradients_of(lambda x: tf.reduce_sum(long * shoal.allgather(x)), x):
        same(got, every)
    share = weights[:6 // size]
    for got in gradients_of(lambda x: tf.reduce_sum(share * shoal.reducescatter(x)), x):
        same(got, np.concatenate([np.arange(6.0)[:6 // size, None] * (r + 1) for r in ranks()]))
    for got in gradients_of(lambda x: tf.reduce_sum(weights * shoal.alltoall(x)), x):
        n = 6 // size
        same(got, np.concatenate([np.arange(6.0)[rank * n:(rank + 1) * n, None] * (r + 1) for r in ranks()]))
    refuses((NotImplementedError, LookupError), ["gradient"],
            lambda: gradients_of(lambda x: tf.reduce_sum(shoal.allreduce(x, ReduceOp.MAX)), x))


def second_gradients_are_right(rank):
    x = tf.constant(2.0)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = shoal.allreduce(x, ReduceOp.SUM) ** 2
        first = inner.gradient(y, x)
    same(first, 4.0 * shoal.size() ** 2)
    same(outer.gradient(first, x), 2.0 * shoal.size() ** 2)


# ---- The job ----


def old_versions_are_refused(rank):
    from shoal.tensorflow import _operations
    _operations.check_version(tf.__version__)
    refuses(ImportError, ["needs TensorFlow 2.16 or newer, and this is 2.9.3"], lambda: _operations.check_version("2.9.3"))


def new_versions_are_told(rank):
    """An untested newer version causes a warning and is accepted; another major version is refused."""
    from shoal.tensorflow import _operations
    major, minor = _operations.NEWEST
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _operations.check_version(f"{major}.{minor}.9")
        refuses(UserWarning, [f"to {major}.{minor}, and this is {major}.{minor + 1}.0-rc1", "pip install"],
                lambda: _operations.check_version(f"{major}.{minor + 1}.0-rc1"))
    refuses(ImportError, ["is for TensorFlow 2, and this is 3.0.0"], lambda: _operations.check_version("3.0.0"))


def places_are_told(rank):
    assert (shoal.rank(), shoal.local_rank(), shoal.local_size(), shoal.cross_rank(), shoal.cross_size()) == (
        rank, rank, shoal.size(), 0, 1)
    refuses(RuntimeError, ["init() called more than once"], shoal.init)


def it_can_begin_again(rank):
    shoal.shutdown()
    assert not shoal.is_initialized()
    refuses(RuntimeError, ["call init() first"], lambda: shoal.allreduce(tf.ones([1])))
    shoal.init()
    same(shoal.allreduce(tf.ones([1]), ReduceOp.SUM), [shoal.size()])


# ---- Overlap: a separate job ----

LARGE = 100_000  # elements; small operations complete before their start returns
LATE_S = 150  # how long a rank waits for the other's mark


def wait_for(mark):
    deadline = time.monotonic() + LATE_S
    while not mark.exists():
        if time.monotonic() > deadline:
            raise AssertionError("rank 0 did not come past its starts before rank 1 called anything")
        time.sleep(0.01)


def two_sums():
    x = tf.ones([LARGE])
    return shoal.allreduce(x, ReduceOp.SUM) + shoal.allreduce(2.0 * x, ReduceOp.SUM)


def gradients_of_four():
    variables = [tf.Variable(tf.ones([LARGE])) for _ in range(4)]

    def compute():
        with shoal.DistributedGradientTape(tf.GradientTape(), buffer_mib=0.1) as tape:
            loss = tf.add_n([tf.reduce_sum(variable * variable) for variable in variables])
        return tf.add_n(tape.gradient(loss, variables))
    return compute


def marks_before_its_peer_comes(folder):
    """Rank 1 runs each function only after rank 0 has written a mark, which rank 0's function does after the starts:
    TensorFlow runs stateful operations in program order. Rank 0 has a single thread for operations, so no operation that
    waits may block it."""
    def body(rank):
        tf.config.threading.set_inter_op_parallelism_threads(1)
        shoal.init(timeout_s=2 * LATE_S)
        for name, compute, wanted in (("sums", two_sums, 6.0), ("gradients", gradients_of_four(), 8.0)):
            mark = pathlib.Path(folder, name)

            @tf.function
            def step():
                result = compute()
                tf.numpy_function(mark.touch, [], [])
                return result
            step = step.get_concrete_function()  # the ranks create a reducer together
            if rank == 1:
                wait_for(mark)
            same(step(), np.full([LARGE], wanted))
    return body


def starts_return_before_a_peer_has_come():
    with tempfile.TemporaryDirectory() as folder:
        told = forked.Ranks(2, marks_before_its_peer_comes(folder))
    expect(told.codes == [0, 0], told.told())


def moves_another_type(rank):
    shoal.init(timeout_s=2 * LATE_S)
    refuses(tf.errors.OpError, ["different operations", "uint8 tagged 5", "uint8 tagged 17"],  # numbers of TensorFlow's types
            lambda: shoal.allgather(tf.ones([4], tf.uint16 if rank else tf.int16)))


def types_of_one_size_are_told_apart():
    told = forked.Ranks(2, moves_another_type)
    expect(told.codes == [0, 0], told.told())


CASES = [allreduce_sums_every_type, allreduce_has_every_operator, large_and_empty_tensors_arrive, allreduce_casts_where_asked,
         slices_are_gathered, groups_keep_their_order, broadcast_moves_every_type, allgather_joins_rows_of_different_lengths,
         ragged_shapes_are_told_on_every_rank, reducescatter_divides_rows, alltoall_exchanges_rows,
         barrier_waits_in_a_graph_too, objects_go_round, many_operations_run_in_one_function, loops_run_in_order,
         results_are_not_written_again, operations_have_gradients, second_gradients_are_right, old_versions_are_refused, new_versions_are_told,
         places_are_told, it_can_begin_again]
run_cases([*forked.Cases(3, CASES, shoal.init, shoal.shutdown).report(), starts_return_before_a_peer_has_come,
           types_of_one_size_are_told_apart])
