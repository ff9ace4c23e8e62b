#!/usr/bin/env python3
"""Gradients averaged over 2 ranks: with a tape, dense and sparse, eagerly and inside tf.function; and mistakes of ranks."""
import copy
import gc
import os
import time
import traceback

import numpy as np
import tensorflow as tf

import forked
import shoal.tensorflow as shoal
from shoal.tensorflow import Compression, ReduceOp, _gradients, _operations, _world
from tap import expect, run_cases

tf.get_logger().setLevel("ERROR")
STEPS = 5


def problem():
    """Returns weights, and samples with targets for all ranks."""
    random = np.random.default_rng(7)
    shapes = [6, 500], [500], [500, 300], [300, 3]
    weights = [(random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32) for shape in shapes]
    return weights, random.normal(size=[16, 6]).astype(np.float32), random.normal(size=[16, 3]).astype(np.float32)


def loss_of(variables, x, y):
    hidden = tf.tanh(tf.tanh(x @ variables[0] + variables[1]) @ variables[2])
    return tf.reduce_mean((hidden @ variables[3] - y) ** 2)


def train(step_of, x, y, dtype=tf.float32):
    variables = [tf.Variable(weight, dtype=dtype, name=f"weight{i}") for i, weight in enumerate(problem()[0])]
    x, y = tf.cast(x, dtype), tf.cast(y, dtype)
    step = step_of(variables)
    for _ in range(STEPS):
        for variable, gradient in zip(variables, step(x, y)):
            variable.assign_sub(tf.cast(0.1, dtype) * gradient)
    return [tf.cast(variable, tf.float32).numpy() for variable in variables]


def plain(variables):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        return tape.gradient(loss, variables)
    return step


def averaged(**options):
    def step_of(variables):
        def step(x, y):
            with shoal.DistributedGradientTape(tf.GradientTape(), **options) as tape:
                loss = loss_of(variables, x, y)
            return tape.gradient(loss, variables)
        return step
    return step_of


def share(rank, array):
    return array[rank * 8:(rank + 1) * 8]


def training_equals_that_of_one_process(rank):
    _, x, y = problem()
    wanted = train(plain, x, y)
    for kind in (averaged(), lambda variables: tf.function(averaged()(variables)), averaged(buffer_mib=0.01),
                 lambda variables: tf.function(averaged(buffer_mib=0.01)(variables))):
        for got, one in zip(train(kind, share(rank, x), share(rank, y)), wanted):
            np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-6)


def every_type_is_averaged(rank):
    _, x, y = problem()
    for dtype, tolerance in ((tf.float64, 1e-5), (tf.float16, 0.05), (tf.bfloat16, 0.3)):
        wanted = train(plain, x, y, dtype)
        ours = train(lambda variables: tf.function(averaged()(variables)), share(rank, x), share(rank, y), dtype)
        for got, one in zip(ours, wanted):
            np.testing.assert_allclose(got, one, rtol=tolerance, atol=tolerance)


def all_ranks_have_the_same_bits(rank):
    _, x, y = problem()
    own = train(lambda variables: tf.function(averaged()(variables)), share(rank, x), share(rank, y))
    for theirs in shoal.allgather_object(own):
        assert all((a == b).all() for a, b in zip(own, theirs))


def compression_changes_nothing_inside_a_host(rank):
    _, x, y = problem()
    wanted = train(plain, x, y)
    for compression in (Compression.fp16, Compression.bf16, Compression.int8):
        for got, one in zip(train(averaged(compression=compression), share(rank, x), share(rank, y)), wanted):
            np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-6)


def a_gradient_that_others_read_is_not_overwritten(rank):
    """Averages replace a gradient in its own memory if nothing else uses that memory. Here a variable and another gradient
    use it."""
    mask = tf.Variable(np.arange(1000.0) * (rank + 1), trainable=False)
    kernel, twin = tf.Variable(np.ones(1000)), tf.Variable(np.ones(1000))

    @tf.function
    def step():
        with shoal.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(kernel * mask) + tf.reduce_sum(twin * mask)
        return tape.gradient(loss, [kernel, twin])
    for _ in range(3):
        for gradient in step():
            np.testing.assert_array_equal(gradient, np.arange(1000.0) * 1.5)
    np.testing.assert_array_equal(mask, np.arange(1000.0) * (rank + 1))


def sums_are_not_divided(rank):
    x = tf.Variable([1.0, 2.0])
    with shoal.DistributedGradientTape(tf.GradientTape(), op=ReduceOp.SUM) as tape:
        loss = tf.reduce_sum(x) * float(rank + 1)
    assert tape.gradient(loss, x).numpy().tolist() == [3.0, 3.0]


def slices_are_gathered_or_made_dense(rank):
    table, scale = tf.Variable(np.arange(12.0).reshape(6, 2)), tf.Variable(2.0, dtype=tf.float64)
    rows = [[0, 1, 1], [1, 5]][rank]

    def gradients(**options):
        with shoal.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = tf.reduce_sum(tf.gather(table, rows)) * scale
        return tape.gradient(loss, [table, scale])
    for compute in (gradients, tf.function(gradients)):
        sparse, of_scale = compute()
        assert isinstance(sparse, tf.IndexedSlices) and sparse.indices.numpy().tolist() == [0, 1, 1, 1, 5]
        dense, _ = compute(sparse_as_dense=True)
        assert not isinstance(dense, tf.IndexedSlices)
        wanted = np.zeros([6, 2])
        for row in (0, 1, 1, 1, 5):
            wanted[row] += 1.0
        np.testing.assert_array_equal(tf.convert_to_tensor(sparse), wanted)
        np.testing.assert_array_equal(dense, wanted)
        assert float(of_scale) == sum(float(tf.reduce_sum(tf.gather(table, r))) for r in ([0, 1, 1], [1, 5])) / 2


def what_no_rank_uses_stays_none(rank):
    used, unused = tf.Variable(1.0), tf.Variable([1.0, 1.0])
    for _ in range(2):
        with shoal.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = used * float(rank)
        one, none = tape.gradient(loss, [used, unused])
        assert float(one) == 0.5 and none is None


def a_step_without_any_gradient_has_none(rank):
    unused = [tf.Variable(1.0), tf.Variable([1.0, 1.0])]

    def step():
        with shoal.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.constant(1.0) * float(rank)
        return tape.gradient(loss, unused)
    for compute in (step, step, tf.function(step)):
        assert compute() == [None, None]


def a_tape_is_copied(rank):
    x = tf.Variable(float(rank))
    with copy.copy(shoal.DistributedGradientTape(tf.GradientTape())) as tape:
        loss = 2.0 * x * rank
    assert float(tape.gradient(loss, x)) == 1.0


def averagers_end_with_their_variables(rank):
    """An averager whose model is gone ends when the next one begins. Numbers are not reused."""
    def train_one():
        kernel, twin = tf.Variable([1.0 + rank]), tf.Variable(2.0)
        with shoal.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(kernel * twin)
        assert [float(tf.reduce_sum(one)) for one in tape.gradient(loss, [kernel, twin])] == [2.0, 1.5]
        return list(_gradients._averagers.values())[-1].number
    numbers = []
    for _ in range(4):
        before = len(_gradients._averagers)
        numbers.append(train_one())
        gc.collect()
    assert len(_gradients._averagers) <= before and len(set(numbers)) == 4, (before, numbers)
    try:
        _operations.load().of.shoal_gradient_start(input=[1.0], reducer=numbers[0], index=0, marks=1, world=0)
    except tf.errors.FailedPreconditionError as error:
        assert "its reducer has ended" in str(error), error
    else:
        raise AssertionError("a start of an averager that has ended")


def nested_sources_keep_their_shape(rank):
    sources = {"a": tf.Variable(1.0), "b": [tf.Variable(2.0)]}
    with tf.GradientTape(persistent=True) as tape:
        loss = (sources["a"] + 3 * sources["b"][0]) * (rank + 1.0)
    for _ in range(2):
        got = shoal.DistributedGradientTape(tape).gradient(loss, sources)
        assert float(got["a"]) == 1.5 and float(got["b"][0]) == 4.5
    assert float(shoal.DistributedGradientTape(tape).gradient(loss, sources["a"])) == 1.5


def two_tapes_in_one_function_keep_apart(rank):
    first, second = tf.Variable([1.0]), tf.Variable([1.0])

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            one, two = first * (rank + 1.0), second * (rank + 3.0)
            three = one * 2.0
        tape = shoal.DistributedGradientTape(tape)
        return tape.gradient(one, first), tape.gradient(two, second), tape.gradient(three, first)
    for _ in range(10):
        assert [float(one[0]) for one in step()] == [1.5, 3.5, 3.0]


def variables_are_broadcast(rank):
    variables = [tf.Variable([1.0 * rank, 2.0]), tf.Variable(rank + 5), tf.Variable(rank == 1)]
    shoal.broadcast_variables(variables, 1)
    assert [variable.numpy().tolist() for variable in variables] == [[1.0, 2.0], 6, True]
    try:
        shoal.broadcast_variables([variables[0], tf.Variable(tf.zeros([2 + rank]), name="odd")])
    except tf.errors.InvalidArgumentError as error:
        assert "variable 1 differs: odd:0 of float32 (2,) on rank 0, odd:0 of float32 (3,) on rank 1" in str(error), error
    else:
        raise AssertionError("variables of different shapes")


def wrong_settings_are_told(rank):
    for options, words in (({"op": ReduceOp.MAX}, "ReduceOp.AVERAGE, ReduceOp.SUM"),
                           ({"compression": "gzip"}, "Compression.none"),
                           ({"buffer_mib": 0}, "buffers of 0 MiB")):
        try:
            shoal.DistributedGradientTape(tf.GradientTape(), **options)
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(options)


def data_sets_are_divided(rank):
    data = tf.data.Dataset.range(7)
    assert list(shoal.shard(data).as_numpy_iterator()) == [[0, 2, 4], [1, 3, 5]][rank]
    assert list(shoal.shard(data, "pad").as_numpy_iterator()) == [[0, 2, 4, 6], [1, 3, 5, 0]][rank]
    assert list(shoal.shard(data, "keep").as_numpy_iterator()) == [[0, 2, 4, 6], [1, 3, 5]][rank]
    order = list(shoal.sharded_indices(5000, epoch=3, seed=1, tail="keep").as_numpy_iterator())
    every = sum(shoal.allgather_object(order), [])
    assert sorted(every) == list(range(5000)) and order != sorted(order) and len(order) == 2500
    try:
        shoal.shard(data.filter(lambda x: x > 2))
    except ValueError as error:
        assert "length of the data set is not known" in str(error)
    else:
        raise AssertionError("a data set of unknown length")


# ---- Two hosts: a separate job ----


def compresses_between_hosts(rank):
    os.environ["SHOAL_HOST_ID"] = f"host-{rank}"
    shoal.init()
    _, x, y = problem()
    wanted = train(plain, x, y)
    for compression, most in ((Compression.fp16, 1e-3), (Compression.bf16, 1e-2), (Compression.int8, 5e-2)):
        ours = train(averaged(compression=compression), share(rank, x), share(rank, y))
        errors = [np.linalg.norm(got - one) / np.linalg.norm(one) for got, one in zip(ours, wanted)]
        expect(1e-6 < max(errors) < most, compression, "errs by", errors)
        for theirs in shoal.allgather_object(ours):
            expect(all((a == b).all() for a, b in zip(ours, theirs)), compression, "gives each rank other bits")


def gradients_are_compressed_between_hosts():
    told = forked.Ranks(2, compresses_between_hosts)
    expect(told.codes == [0, 0], told.told())


# ---- What ends a job: a separate job each ----


def fails(body, *words, ranks=(0, 1)):
    """Expects that these ranks end with an error that contains these words."""
    fails_each(body, *[words if rank in ranks else None for rank in range(2)])


def fails_each(body, *words, timeout_s=forked.TIMEOUT_S):
    """Expects that each rank ends with an error that contains its words; None accepts any end."""
    told = forked.Ranks(len(words), body, timeout_s)
    for rank, wanted in enumerate(words):
        if wanted is not None:
            expect(told.codes[rank] == 1 and all(word in told.texts[rank] for word in wanted), rank, wanted, told.told())


def lonely_none(rank):
    shoal.init(timeout_s=150)
    kernel, bias = tf.Variable([1.0, 2.0], name="kernel"), tf.Variable(0.5, name="bias")
    for _ in range(3):
        with shoal.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(kernel) * 2.0
            if rank == 0:
                loss += bias
        tape.gradient(loss, [kernel, bias])


def a_gradient_that_is_none_on_one_rank_is_named():
    fails(lonely_none, "FailedPreconditionError", "the gradient of variable 1, bias:0 is None on rank 1")


def only_none(is_compiled):
    def body(rank):
        shoal.init(timeout_s=150)
        kernel, bias = tf.Variable([1.0, 2.0], name="kernel"), tf.Variable(0.5, name="bias")

        def step():
            with shoal.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(kernel) * bias if rank == 1 else tf.constant(1.0)
            return tape.gradient(loss, [kernel, bias])
        step = tf.function(step) if is_compiled else step
        for _ in range(3):
            step()
    return body


def gradients_that_are_all_none_on_one_rank_are_named():
    for is_compiled in (False, True):
        fails(only_none(is_compiled), "FailedPreconditionError", "the gradient of variable 0, kernel:0 is None on rank 0")


class BrokenSteps:
    """step() averages two gradients inside tf.function. After a first good step, some ranks raise an error after the first
    gradient and before the second."""

    def __init__(self, rank, failing):
        self.rank, self.fails_next, self.failing = rank, False, failing
        self.kernel, self.bias = tf.Variable([1.0, 2.0], name="kernel"), tf.Variable(0.5, name="bias")
        self.step = tf.function(self._step)
        self.step()
        self.fails_next = True

    def _look(self, gradient):
        if self.fails_next and self.rank in self.failing:
            time.sleep(0.3)  # meanwhile the other gradient is averaged, unless this case is handled
            raise ValueError(f"the batch of rank {self.rank} is broken")
        return gradient

    def _step(self):
        @tf.custom_gradient
        def watched(x):
            return tf.identity(x), lambda gradient: tf.ensure_shape(
                tf.numpy_function(self._look, [gradient], tf.float32, stateful=False), gradient.shape)
        with shoal.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(watched(self.kernel)) * self.bias
        return tape.gradient(loss, [self.kernel, self.bias])

    def break_down(self):
        """Fails unless this rank gets its own error."""
        try:
            self.step()
        except tf.errors.InvalidArgumentError:
            traceback.print_exc()
        else:
            raise AssertionError("a broken step")


def broken_on(*failing):
    def body(rank):
        shoal.init(timeout_s=150)
        BrokenSteps(rank, failing).step()
    return body


def an_error_within_a_step_is_raised_at_once_on_all_ranks():
    fails_each(broken_on(0, 1), ["InvalidArgumentError", "the batch of rank 0 is broken"],
               ["InvalidArgumentError", "the batch of rank 1 is broken"], timeout_s=100)


def an_error_within_a_step_ends_the_other_rank():
    fails_each(broken_on(0), ["InvalidArgumentError", "the batch of rank 0 is broken"], ["AbortedError", "rank 0"],
               timeout_s=100)


def broken_and_then(function, gap_ms=60000):
    """Rank 0 catches its error and then calls `function`; rank 1 is in the step. `gap_ms`: the most between gradients."""
    def body(rank):
        shoal.init(timeout_s=150)
        world = _world.current()  # other limits are unchanged
        _operations.load().library.shoal_tensorflow_set_world(0, world.context, world.comm, gap_ms)
        steps = BrokenSteps(rank, [0])
        if rank == 0:
            steps.break_down()
            function(steps)
        else:
            steps.step()
    return body


def a_step_that_an_error_ended_fails_on_all_ranks_at_its_deadline():
    told = "rank 0: only 1 of 2 gradients of a step came, and no further one for 4000 ms"
    fails_each(broken_and_then(lambda steps: shoal.barrier(), 4000), ["the batch of rank 0 is broken", told],
               ["DeadlineExceededError", told], timeout_s=100)


def a_step_after_one_that_an_error_ended_is_refused():
    told = "variable 1, bias:0 came after 1 of the 2 gradients of another step: an exception ended that step"
    fails_each(broken_and_then(lambda steps: steps.step()), ["the batch of rank 0 is broken", "FailedPreconditionError", told],
               ["FailedPreconditionError", told], timeout_s=100)


def a_shutdown_within_a_step_is_told():
    told = "rank 0: averaging ended within a step, after 1 of its 2 gradients"
    fails_each(broken_and_then(lambda steps: shoal.shutdown()), ["the batch of rank 0 is broken"], ["AbortedError", told],
               timeout_s=100)


def of_another_length(rank):
    shoal.init(timeout_s=150)
    variables = [tf.Variable([1.0, 2.0], name=name) for name in ("kernel", "bias")]
    gradients = [tf.ones([2 + rank]), tf.ones([2])]
    _gradients.average(gradients, variables, _gradients.Settings())


def a_gradient_of_another_length_than_its_variable_is_named():
    told = "rank 1: the gradient of variable 0, kernel:0 has 12 bytes, but its variable has 8"
    fails_each(of_another_length, ["InvalidArgumentError", told], ["InvalidArgumentError", told], timeout_s=100)


def waits_for_a_gradient(rank):
    shoal.init(timeout_s=150)
    shoal.barrier()  # so that ranks create the averager at the same time
    _world.current().limit_ms = 5000
    kernel = tf.Variable([1.0, 2.0], name="kernel")
    for number in range(2):
        if rank == 1 and number == 1:
            shoal.barrier()
        _gradients.average([tf.ones([2])], [kernel], _gradients.Settings())


def the_deadline_of_init_is_that_of_gradients():
    fails_each(waits_for_a_gradient, ["DeadlineExceededError", "kernel"], None, timeout_s=100)


def other_variables(rank):
    shoal.init(timeout_s=150)
    kernel = tf.Variable(tf.ones([2 + rank]), name="kernel")
    with shoal.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(kernel)
    tape.gradient(loss, [kernel])


def variables_of_other_shapes_are_named():
    fails(other_variables, "FailedPreconditionError",
          "parameter 0 differs: rank 0 has 2 elements of float32 (variable 0, kernel:0), rank 1 has 3")


def unequal_counts(call):
    def body(rank):
        shoal.init(timeout_s=150)
        call(lambda x: shoal.allreduce(x, name="scores"))(tf.ones([4 + rank]))
    return body


def an_allreduce_of_other_shapes_is_told():
    for call in (lambda function: function, tf.function):
        fails(unequal_counts(call), "FailedPreconditionError", '"scores"', "rank 0 (", "called all-reduce of 4 float32", "rank 1 (",
              "called all-reduce of 5 float32")


def ends_early(rank):
    shoal.init(timeout_s=150)
    kernel = tf.Variable([1.0], name="kernel")

    @tf.function
    def step():
        with shoal.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(kernel)
        return tape.gradient(loss, [kernel])
    for number in range(1000):
        if rank == 1 and number == 5:
            os._exit(9)
        step()


def a_rank_that_ends_is_named():
    fails(ends_early, "AbortedError", "kernel", "rank 1", ranks=[0])


CASES = [training_equals_that_of_one_process, every_type_is_averaged, all_ranks_have_the_same_bits,
         compression_changes_nothing_inside_a_host, a_gradient_that_others_read_is_not_overwritten, sums_are_not_divided,
         slices_are_gathered_or_made_dense, what_no_rank_uses_stays_none, a_step_without_any_gradient_has_none, a_tape_is_copied,
         averagers_end_with_their_variables, nested_sources_keep_their_shape,
         two_tapes_in_one_function_keep_apart, variables_are_broadcast,
         wrong_settings_are_told, data_sets_are_divided]
run_cases([*forked.Cases(2, CASES, shoal.init, shoal.shutdown).report(), gradients_are_compressed_between_hosts,
           a_gradient_that_is_none_on_one_rank_is_named, gradients_that_are_all_none_on_one_rank_are_named,
           an_error_within_a_step_is_raised_at_once_on_all_ranks, an_error_within_a_step_ends_the_other_rank,
           a_step_that_an_error_ended_fails_on_all_ranks_at_its_deadline, a_step_after_one_that_an_error_ended_is_refused,
           a_shutdown_within_a_step_is_told, a_gradient_of_another_length_than_its_variable_is_named,
           the_deadline_of_init_is_that_of_gradients, variables_of_other_shapes_are_named,
           an_allreduce_of_other_shapes_is_told, a_rank_that_ends_is_named])
