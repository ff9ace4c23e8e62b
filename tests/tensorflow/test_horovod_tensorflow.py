#!/usr/bin/env python3
"""Horovod's names for TensorFlow and Keras on 3 ranks: results, gradients, process sets, and training that equals one
process."""
import functools
import os
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

import forked
import shoal.horovod._common.elastic as hvd_elastic
import shoal.horovod.keras as hvd_of_keras
import shoal.horovod.tensorflow as hvd
import shoal.horovod.tensorflow.keras as hvd_keras
from tap import run_cases

tf.get_logger().setLevel("ERROR")
SAMPLES, BATCH = 48, 12  # BATCH: of all ranks together


def same(got, wanted, tolerance=0.0):
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=tolerance, atol=tolerance)


def refuses(error, words, function):
    try:
        function()
    except error as told:
        assert all(word in str(told) for word in words), told
    else:
        raise AssertionError(f"no {error}")


def eager_and_graph(function):
    yield function()
    yield tf.function(function)()


def ranks():
    return range(hvd.size())


# ---- Operations ----


def allreduce_takes_horovods_arguments(rank):
    x = tf.constant([1.0, 2.0]) * (rank + 1)
    total = np.array([1.0, 2.0]) * sum(r + 1 for r in ranks())
    for got in eager_and_graph(lambda: [
            hvd.allreduce(x), hvd.allreduce(x, average=False), hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
            hvd.allreduce(x, op=hvd.Sum, postscale_factor=2.0), hvd.allreduce(x, op=hvd.Max, name="layer/kernel:0"),
            hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)]):
        for one, wanted in zip(got, (total / hvd.size(), total, total / 2, total * 2, [3.0, 6.0], total)):
            same(one, wanted, 1e-6)
    same(hvd.allreduce(tf.constant(1 + 2.0**-12), compression=hvd.Compression.fp16), 1.0)  # float16 lacks the digits
    same(hvd.allreduce(tf.constant([7, -7], tf.int32) * (1 if rank else 2)), [9, -9])  # 28 / 3, truncated
    same(hvd.allreduce(tf.constant([5], tf.int64), op=hvd.Sum, prescale_factor=0.5), [6])  # 2 of each rank
    refuses(ValueError, ["supersedes"], lambda: hvd.allreduce(x, average=True, op=hvd.Sum))
    refuses(NotImplementedError, ["Adasum"], lambda: hvd.allreduce(x, op=hvd.Adasum))


def groups_mix_types_and_slices(rank):
    slices = tf.IndexedSlices(tf.ones([1, 2]) * rank, tf.constant([rank]), tf.constant([4, 2]))
    dense, other, sparse = hvd.grouped_allreduce([tf.ones([3]), tf.ones([2], tf.float64) * rank, slices], op=hvd.Sum)
    same(dense, [hvd.size()] * 3)
    same(other, [sum(ranks())] * 2)
    same(tf.convert_to_tensor(sparse)[:hvd.size(), 0], list(ranks()))
    same(hvd.allreduce(slices).values[:, 0], [r / hvd.size() for r in ranks()], 1e-6)
    refuses(NotImplementedError, ["IndexedSlices"], lambda: hvd.allreduce(slices, op=hvd.Min))


def rows_travel(rank):
    same(hvd.allgather(tf.fill([rank + 1, 2], rank))[:, 0], [r for r in ranks() for _ in range(r + 1)])
    same(hvd.grouped_allgather([tf.constant([rank])])[0], list(ranks()))
    rows, counts = hvd.alltoall(tf.range(hvd.size()) + 10 * rank, splits=tf.ones([hvd.size()], tf.int32))
    same(rows, [10 * r + rank for r in ranks()])
    assert counts.dtype == tf.int32 and counts.numpy().tolist() == [1] * hvd.size()
    same(hvd.reducescatter(tf.ones([2 * hvd.size() + 1]), op=hvd.Sum), [hvd.size()] * (2 + (rank == 0)))
    same(hvd.grouped_reducescatter([tf.ones([hvd.size()])])[0], [1.0])
    same(hvd.broadcast(tf.constant([rank]), 1), [1])
    refuses(tf.errors.InvalidArgumentError, ["divided evenly"], lambda: hvd.alltoall(tf.ones([hvd.size() + 1])))
    refuses(tf.errors.InvalidArgumentError, ["int32"], lambda: hvd.alltoall(tf.ones([3]), splits=tf.ones([3], tf.int64)))
    refuses(NotImplementedError, ["Average"], lambda: hvd.reducescatter(tf.ones([3]), op=hvd.Max))
    refuses(ValueError, ["scalar"], lambda: hvd.reducescatter(tf.constant(1.0)))


def gradient_of(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x, tf.ones_like(y))


def gradients_are_horovods(rank):
    """Averages for all-gather and broadcast. A reduce-scatter of sums gathers the gradient and multiplies it by the number
    of ranks."""
    x, size = tf.ones([hvd.size(), 2]), hvd.size()
    for function, wanted in ((lambda t: hvd.allreduce(t, op=hvd.Sum), size), (hvd.allreduce, 1), (hvd.allgather, 1),
                             (lambda t: hvd.broadcast(t, 1), 1 if rank == 1 else 0), (hvd.alltoall, 1),
                             (lambda t: hvd.reducescatter(t, op=hvd.Sum), size), (hvd.reducescatter, 1)):
        for got in eager_and_graph(lambda: gradient_of(function, x)):
            same(got, np.full([size, 2], wanted), 1e-6)


def mismatches_are_told(rank):
    """Later calls work."""
    failed = tf.errors.FailedPreconditionError
    refuses(failed, ["allreduce tensor shapes", "ranks 0 and 1"], lambda: hvd.allreduce(tf.ones([3 + rank])))
    refuses(failed, ["data types"], lambda: hvd.allreduce(tf.ones([3], tf.int32 if rank else tf.float32)))
    refuses(failed, ["arguments"], lambda: hvd.broadcast(tf.ones([2]), root_rank=min(rank, 1)))
    refuses(failed, ["allgather tensor shapes"], lambda: hvd.allgather(tf.ones([2, 2 + rank])))
    refuses(failed, ["operations"], lambda: hvd.barrier() if rank else hvd.allgather(tf.ones([400])))
    refuses(failed, ["Sum of splits"], lambda: hvd.alltoall(tf.ones([1]), splits=tf.ones([3], tf.int32)))
    refuses(ValueError, ["root_rank is 9"], lambda: hvd.broadcast(tf.ones([2]), root_rank=9))
    same(hvd.allreduce(tf.ones([1]), op=hvd.Sum), [hvd.size()])


def process_sets_are_apart(rank):
    pair, last = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([2]))
    assert pair.ranks == [0, 2] and pair.included() == (rank != 1) and pair.size() == 2
    assert hvd.size_op(pair.process_set_id).numpy() == 2
    if rank != 1:
        for got in eager_and_graph(lambda: hvd.allreduce(tf.constant([float(rank)]), process_set=pair)):
            same(got, [1.0])
        same(hvd.broadcast(tf.constant([rank]), 2, process_set=pair), [2])
        assert hvd.allgather_object(rank, process_set=pair) == [0, 2]
        same(gradient_of(lambda t: hvd.allgather(t, process_set=pair), tf.ones([2])), [1.0, 1.0])
        variable = tf.Variable([float(rank)])
        hvd.broadcast_variables([variable], 2, process_set=pair)
        same(variable, [2.0])
    else:
        refuses(tf.errors.InvalidArgumentError, ["rank 1 is not in process set"], lambda: hvd.allreduce(tf.ones([1]), process_set=pair))
    with tf.GradientTape() as tape:
        variable = tf.Variable([float(rank)])
        loss = variable * variable
    got = hvd.DistributedGradientTape(tape, process_set=pair).gradient(loss, [variable])[0]
    same(got, [2.0])  # the average of 0 and 4; rank 1 keeps its own
    refuses(ValueError, ["already exists"], lambda: hvd.add_process_set([0, 2]))
    refuses(ValueError, ["ranks of 0 to"], lambda: hvd.add_process_set([0, 9]))
    refuses(hvd.HorovodInternalError, ["wants to add"], lambda: hvd.add_process_set([0, 1] if rank else [0]))
    assert hvd.remove_process_set(pair) and hvd.remove_process_set(last) and not hvd.remove_process_set(pair)
    refuses(ValueError, ["not registered"], lambda: hvd.allreduce(tf.ones([1]), process_set=pair))


def objects_and_state_are_shared(rank):
    assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    assert hvd.allgather_object([rank] * rank) == [[r] * r for r in ranks()]
    variables = [tf.Variable([float(rank)]), tf.Variable([rank, rank])]
    hvd.broadcast_variables(variables, root_rank=2)
    same(variables[0], [2.0])
    same(hvd.broadcast_(variables, 0)[1], [2, 2])
    same(tf.function(lambda: hvd.broadcast_variables(variables, 1))()[1], [2, 2])
    refuses(RuntimeError, ["eager"], lambda: hvd.broadcast_global_variables(0))
    assert hvd.rank_op().numpy() == rank and hvd.size_op().numpy() == hvd.size() and hvd.is_homogeneous()
    refuses(NotImplementedError, ["timeline"], lambda: hvd.start_timeline("x"))
    hvd.barrier()


def variables_of_a_session_are_shared(rank):
    """In a graph of TensorFlow 1, which does not order operations by itself."""
    types = tf.float32, tf.int64, tf.float32, tf.float64, tf.int32, tf.float16
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for i, dtype in enumerate(types):
            tf.compat.v1.get_variable(f"of_a_session_{i}", initializer=tf.cast(tf.fill([i + 1], i + rank), dtype))
        assigned = hvd.broadcast_global_variables(2)
        session.run(tf.compat.v1.global_variables_initializer())
        for i, got in enumerate(session.run(assigned)):
            same(got, [i + 2] * (i + 1))


def groups_of_a_session_are_in_order(rank):
    """Each rank first evaluates different later operations, as a session may."""
    size = hvd.size()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        made = [tf.fill([size * (i + 1)], float(i)) for i in range(6)]
        slow = tf.py_function(lambda: (time.sleep(0.2 * rank), 1.0)[1], [], tf.float32)
        late = [tensor * slow if (i + rank) % 2 else tensor for i, tensor in enumerate(made)]
        for tensor in late:
            tensor.set_shape([None])
        slices = [tf.IndexedSlices(tf.fill([2, 2], float(i)), tf.constant([i, rank]), tf.constant([9, 2])) for i in range(3)]
        rows, gathered = hvd.grouped_reducescatter(late, op=hvd.Sum), hvd.grouped_allgather(late)
        with tf.control_dependencies(rows):
            sums = hvd.grouped_allreduce([*slices, tf.ones([2]), tf.ones([3], tf.float64)], op=hvd.Sum)
        for i, got in enumerate(session.run(rows)):
            same(got, [float(i * size)] * (i + 1))
        for i, got in enumerate(session.run(gathered)):
            same(got, [float(i)] * (size * size * (i + 1)))
        for i, got in enumerate(session.run([each.indices for each in sums[:3]])):
            same(got, [index for r in ranks() for index in (i, r)])
        same(session.run(sums[3]), [size] * 2)


def gradients_of_groups_are_in_order(rank):
    """Also in a session. One gradient needs no collective of the forward pass, another one does."""
    size = hvd.size()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        slow = tf.py_function(lambda: (time.sleep(0.2 * rank), 1.0)[1], [], tf.float32)

        def late(tensor, i):  # different ones on each rank
            return tf.ensure_shape(tensor * slow if (i + rank) % 2 else tensor, tensor.shape)
        given = [late(tf.ones([size * (i + 1)]), i) for i in range(6)]
        for operation, rows, factor in ((functools.partial(hvd.grouped_reducescatter, op=hvd.Sum), 1, size),
                                        (hvd.grouped_allgather, size * size, 1)):
            made = operation(given)
            weights = [late(tf.fill([rows * (i + 1)], float(i)), i + 1) for i in range(6)]
            gradients = [tf.gradients(result, tensor, weight)[0] for result, tensor, weight in zip(made, given, weights)]
            for i, got in enumerate(session.run(gradients)):
                same(got, [float(i * factor)] * (size * (i + 1)))


def a_gradient_starts_after_its_call(rank):
    """Also in a session, in which both become ready in a different order on each rank and must not be summed with each
    other."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        slow = tf.py_function(lambda: (time.sleep(0.2), 1.0)[1], [], tf.float32)
        x, weight = (tf.ensure_shape(tf.constant([value, value]) * slow if rank % 2 == late else tf.constant([value, value]), [2])
                     for late, value in enumerate((2.0, 5.0)))
        y = hvd.allreduce(x, op=hvd.Sum)
        for got, value in zip(session.run([y, tf.gradients(y, x, weight)[0]]), (2.0, 5.0)):
            same(got, [value * hvd.size()] * 2)


def joined_ranks_take_part_with_zeros(rank):
    variable = tf.Variable([2.0])
    for step in range(rank + 1):
        same(hvd.allreduce(tf.ones([2]), op=hvd.Sum), [hvd.size() - step] * 2)
        with tf.GradientTape() as tape:
            loss = variable * 3.0
        same(hvd.DistributedGradientTape(tape).gradient(loss, [variable])[0], [3.0 * (hvd.size() - step) / hvd.size()], 1e-6)
        hvd.barrier()
    if rank == 2:
        refuses(tf.errors.FailedPreconditionError, ["not supported with Join"], lambda: hvd.allgather(tf.ones([1])))
    assert hvd.join() == 2
    refuses(NotImplementedError, ["tf.function"], tf.function(hvd.join))
    same(hvd.allreduce(tf.ones([1]), op=hvd.Sum), [hvd.size()])


# ---- Training ----


def data():
    random = np.random.default_rng(3)
    x = random.normal(size=[SAMPLES, 8]).astype(np.float32)
    return x, (x[:, :1] - 2 * x[:, 1:2]).astype(np.float32)


def share(array):
    """Returns this rank's samples, chosen so that the ranks' n-th batches together are the n-th batch of one process."""
    blocks = array.reshape([-1, hvd.size(), BATCH // hvd.size(), *array.shape[1:]])
    return blocks[:, hvd.rank()].reshape([-1, *array.shape[1:]])


def model_of(seed=5):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])


def fit(model, optimizer, x, y, batch, callbacks=()):
    model.compile(optimizer=optimizer, loss="mse")
    return model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))


def fit_equals_one_process(rank):
    x, y = data()
    for options in ({}, {"gradient_predivide_factor": 2.0}, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}):
        alone = keras.optimizers.SGD(0.05, gradient_accumulation_steps=options.get("backward_passes_per_step"))
        wanted, ours = model_of(), model_of(seed=5 + rank)
        history = fit(wanted, alone, x, y, BATCH)
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.05), **options)
        hvd.broadcast_variables(ours.variables, 0)
        got = fit(ours, optimizer, share(x), share(y), BATCH // hvd.size(), [hvd_keras.callbacks.MetricAverageCallback()])
        for a, b in zip(ours.get_weights(), wanted.get_weights()):
            same(a, b, 1e-4)
        same(got.history["loss"], history.history["loss"], 1e-4)


def passes_are_summed_unless_averaged(rank):
    for averages, wanted in ((False, -2.0), (True, -1.0)):
        variable = keras.Variable([0.0])
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2,
                                                   average_aggregated_gradients=averages)
        for _ in range(2):
            same(variable, [0.0])
            optimizer.apply([tf.constant([float(rank)])], [variable])  # 1 on average
        same(variable, [wanted])


def local_gradients_stay(rank):
    ours, theirs = tf.Variable([1.0]), tf.Variable([1.0])
    with tf.GradientTape() as recorded:
        loss = (ours + theirs) * float(rank + 1)
    tape = hvd.DistributedGradientTape(recorded)
    tape.register_local_source(ours)
    got = tape.gradient(loss, [ours, theirs])
    same(got[0], [(rank + 1) / hvd.size()], 1e-6)
    same(got[1], [2.0], 1e-6)


def callbacks_and_saved_models(rank):
    x, y = data()
    with tempfile.TemporaryDirectory() as own:
        path = os.path.join(hvd.broadcast_object(own), "best.keras")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        fit(model_of(seed=rank), optimizer, share(x), share(y), BATCH // hvd.size(), [
            hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), hvd_keras.callbacks.MetricAverageCallback(),
            hvd_keras.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1),
            hvd_keras.callbacks.BestModelCheckpoint(path, monitor="loss")])
        hvd.barrier()
        model = hvd_keras.load_model(path)
        refuses(ValueError, ["twice"], lambda: hvd_keras.DistributedOptimizer(model.optimizer))
        hvd.barrier()  # before rank 0 removes its folder
    assert hvd_of_keras.size() == hvd.size() and hvd_of_keras.DistributedOptimizer is hvd_keras.DistributedOptimizer
    same(hvd_keras.allreduce([float(rank)], op=hvd.Sum), [sum(ranks())])


def local_variables_are_not_broadcast(rank):
    model = model_of()
    for variable in model.variables:
        variable.assign(np.full(variable.shape, float(rank)))
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=[model.variables[0]])
    callback.set_model(model)
    callback.on_train_begin()
    same(model.variables[0], np.full(model.variables[0].shape, float(rank)))
    same(model.variables[1], np.ones(model.variables[1].shape))


def a_state_goes_on_after_a_restart(rank):
    """The second run represents the one that a launcher starts after a failure."""
    def begin():
        model = model_of(seed=rank)
        return model, hvd_keras.elastic.KerasState(model, keras.optimizers.Adam(0.01), epoch=5 * rank)

    def train(state, fails):
        begun.append((state.epoch, state.model.variables[0].numpy().copy()))
        state.model.variables[0].assign_add(tf.ones_like(state.model.variables[0]))
        state.epoch += 1
        state.commit()
        state.epoch = 99  # lost, because it is not committed
        if fails:
            raise RuntimeError("died")

    begun = []
    with tempfile.TemporaryDirectory() as own:
        path = os.environ["HOROVOD_ELASTIC_STATE"] = os.path.join(hvd.broadcast_object(own), "state")
        refuses(RuntimeError, ["died"], lambda: hvd.elastic.run(train)(begin()[1], True))
        model, state = begin()
        hvd.elastic.run(train)(state, False)
        assert [epoch for epoch, _ in begun] == [0, 1], begun
        same(begun[1][1], begun[0][1] + 1)
        hvd.barrier()
        assert not os.path.exists(path)  # the run that completed removed it
        variable = tf.Variable([float(rank)])
        other = hvd.elastic.TensorFlowState([variable], batch=rank)
        other.sync()
        variable.assign([7.0])
        other.restore()
        assert variable.numpy() == [0.0] and other.batch == 0
        if rank == 0:
            with open(path, "wb") as file:
                file.write(b"no state")
            refuses(RuntimeError, [path, "Remove the file"], lambda: hvd_elastic._read(path, {"batch"}))
        hvd.barrier()
    del os.environ["HOROVOD_ELASTIC_STATE"]


def wrong_options_are_refused(rank):
    sgd = keras.optimizers.SGD
    refuses(NotImplementedError, ["Adasum"], lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum))
    refuses(ValueError, ["predivide"], lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0))
    refuses(ValueError, ["> 0"], lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0))
    refuses(TypeError, ["optimizer of Keras 3"], lambda: hvd.DistributedOptimizer("sgd"))
    refuses(ValueError, ["process_sets"], lambda: (hvd.shutdown(), hvd.init(comm=[0])))
    refuses(ValueError, ["not been initialized"], hvd.rank)


class Halved(hvd.Compression.none):
    """A compressor of the program's own."""

    @staticmethod
    def decompress(tensor, ctx):
        return tensor / 2


def a_gradient_that_one_rank_lacks_is_named(rank):
    """Later steps work."""
    pair = hvd.add_process_set([0, 2])
    kernel, bias = tf.Variable([1.0, 2.0], name="kernel"), tf.Variable(0.5, name="bias")

    def step(has_bias, **options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kernel) * (rank + 1.0) + (bias if has_bias else 0.0)
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, [kernel, bias])
    for options in ({"compression": Halved}, {"gradient_predivide_factor": 4.0}, {"process_set": pair}):
        if pair not in options.values() or rank != 1:
            refuses(tf.errors.FailedPreconditionError, ["bias:0 is None", "ranks 0 and "], lambda: step(rank < 2, **options))
            scale = 0.5 if "compression" in options else 1.0
            same(step(False, **options)[0], [2.0 * scale] * 2)
            same(step(True, **options)[1], scale)
    assert hvd.remove_process_set(pair)


def a_gradient_that_no_rank_has_stays_none(rank):
    """Keras numbers its layers in each process, so ranks have different names for the same variable."""
    kernel, bias = tf.Variable([1.0, 2.0], name=f"dense_{rank + 1}/kernel"), tf.Variable(0.5, name=f"dense_{rank + 1}/bias")
    for options in ({"compression": Halved}, {"gradient_predivide_factor": 4.0}, {}):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kernel) * (rank + 1.0)
        gradients = hvd.DistributedGradientTape(tape, **options).gradient(loss, [kernel, bias])
        same(gradients[0], [1.0 if "compression" in options else 2.0] * 2)
        assert gradients[1] is None


# ---- What ends a job: a separate job each ----


def lonely_none(rank):
    """Rank 2's loss does not depend on the bias. Inside tf.function rank 0 gets the error in the next step."""
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    kernel, bias = tf.Variable([1.0, 2.0], name="kernel"), tf.Variable(0.5, name="bias")

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kernel) + (bias if rank == 0 else 0.0)
        return hvd.DistributedGradientTape(tape, gradient_predivide_factor=4.0, process_set=pair).gradient(loss, [kernel, bias])
    for _ in range(3 if rank != 1 else 0):
        step()


def a_gradient_that_is_none_on_one_rank_is_named():
    told = forked.Ranks(3, lonely_none)
    assert told.codes == [1, 0, 1], told.told()
    for text in (told.texts[0], told.texts[2]):
        assert all(word in text for word in ("FailedPreconditionError", "the gradient of variable 1, bias:0 is None on")), told.told()


def without_gradients(rank):
    """Rank 1 reduces no gradients while the others reduce theirs."""
    hvd.init()
    kernel = tf.Variable([1.0, 2.0], name="kernel")

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kernel) if rank != 1 else tf.constant(1.0)
        return hvd.DistributedGradientTape(tape, compression=Halved).gradient(loss, [kernel])
    step()


def a_rank_without_gradients_is_named():
    told = forked.Ranks(3, without_gradients, timeout_s=100)
    for code, text in zip(told.codes, told.texts):
        assert code == 1 and all(word in text for word in ("FailedPreconditionError", "called all-reduce", "called barrier")), told.told()


FUNCTIONS = [allreduce_takes_horovods_arguments, groups_mix_types_and_slices, rows_travel, gradients_are_horovods, mismatches_are_told,
             process_sets_are_apart, objects_and_state_are_shared, variables_of_a_session_are_shared,
             groups_of_a_session_are_in_order, gradients_of_groups_are_in_order,
             a_gradient_starts_after_its_call, joined_ranks_take_part_with_zeros,
             fit_equals_one_process, passes_are_summed_unless_averaged, local_gradients_stay,
             a_gradient_that_one_rank_lacks_is_named, a_gradient_that_no_rank_has_stays_none,
             callbacks_and_saved_models, local_variables_are_not_broadcast,
             a_state_goes_on_after_a_restart, wrong_options_are_refused]

if __name__ == "__main__":
    run_cases([*forked.Cases(3, FUNCTIONS, lambda: (hvd.init(), hvd.init())).report(), a_gradient_that_is_none_on_one_rank_is_named,
               a_rank_without_gradients_is_named])
