#!/usr/bin/env python3
"""smdistributed.modelparallel.tensorflow: losses, variables and checkpoints of a model in one, two and three partitions equal those of
one process; each misuse has its error."""
import os
import pathlib
import shutil
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import forked
from tap import expect, run_cases

# The vendor's package is smdistributed/, which a checkout has in python/.
sys.path[:0] = [str(forked.TOP / "python/smdistributed"), str(forked.TOP / "python")]
import smdistributed.modelparallel.tensorflow as smp  # noqa: E402
from smdistributed.modelparallel.exceptions import SMPConfigError, SMPError, SMPUnsupportedError  # noqa: E402

tf.get_logger().setLevel("ERROR")
STEPS, SAMPLES, MICROBATCHES = 3, 16, 4


def begin(partitions=None, **parameters):
    partitions = partitions or int(os.environ["WORLD_SIZE"])
    smp.init({"partitions": partitions, "microbatches": MICROBATCHES, **parameters})


def fails(function, kind, *words):
    try:
        function()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
        return
    raise AssertionError(f"no error with {words}")


def close(got, wanted):
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=1e-4, atol=1e-5)


# ---- Models ----------------------------------------------------------------------------------------------------------------


def seeded(kind, *args, seed, **options):
    return kind(*args, kernel_initializer=keras.initializers.GlorotUniform(seed), **options)


def chain():
    return [seeded(keras.layers.Conv2D, 4, 3, seed=1, activation="relu"), keras.layers.Flatten(), seeded(keras.layers.Dense, 8, seed=2),
            keras.layers.Dropout(0.0), seeded(keras.layers.Dense, 5, seed=3)]


def forks():
    """The first layer's result is used by the second one and by the sum."""
    return [seeded(keras.layers.Dense, 6, seed=1), seeded(keras.layers.Dense, 6, seed=2, activation="tanh"), keras.layers.Add(),
            keras.layers.Flatten(), seeded(keras.layers.Dense, 5, seed=3)]


def run_chain(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def run_forks(layers, x):
    first, second, add, flatten, last = layers
    x = first(x)
    return last(flatten(add([x, second(x)])))


def model_of(make, run, base=None):
    class Model(base or smp.DistributedModel):
        def __init__(self):
            super().__init__()
            for number, layer in enumerate(make()):
                setattr(self, f"layer{number}", layer)

        def call(self, x, training=None):
            return run([getattr(self, f"layer{number}") for number in range(5)], x)
    return Model()


def data(step):
    random = np.random.default_rng(step)
    return random.random((SAMPLES, 6, 6, 1)), random.integers(0, 5, SAMPLES).astype(np.uint8)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def reference(make, run, steps=STEPS):
    """One process that trains on the whole batch. Returns losses, the model, and its variables by the numbers of layers."""
    model, optimizer, losses = model_of(make, run, keras.Model), keras.optimizers.Adam(0.05), []
    for step in range(steps):
        x, y = data(step)
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        losses.append(float(loss))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return losses, model


class Trainer:
    """A script for the library. averaged: what it does with the gradient of a variable."""

    def __init__(self, make, run, uses_tape=False, averaged=lambda gradient: gradient):
        self.model, self.optimizer = model_of(make, run), keras.optimizers.Adam(0.05)
        model, optimizer = self.model, self.optimizer

        @smp.step
        def get_grads(x, y):
            with tf.GradientTape() as tape:
                result = model(x, training=True)
                loss = LOSS(y, result)
            gradients = tape.gradient(loss, model.trainable_variables) if uses_tape else optimizer.get_gradients(loss, model.trainable_variables)
            return gradients, loss, result

        @tf.function
        def train(x, y):
            gradients, loss, result = get_grads(x, y)
            optimizer.apply_gradients(zip([averaged(each.accumulate()) for each in gradients], model.trainable_variables))
            return loss.reduce_mean(), result.merge()
        self.train = lambda step: train(*map(tf.constant, data(step)))

        @smp.step(input_signature=[tf.TensorSpec([None, 6, 6, 1], tf.float64)])
        def test(x):
            return model(x, training=False)
        self.test = test

    def expect_variables_of(self, wanted):
        for number in range(5):
            own, whole = getattr(self.model, f"layer{number}"), getattr(wanted, f"layer{number}")
            if own.variables:
                for one, other in zip(own.variables, whole.variables):
                    close(one, other)
        held = sum(variable.shape.num_elements() for variable in self.model.local_variables())
        counts = tf.constant([held])
        import shoal.tensorflow as shoal
        total = int(shoal.allreduce(counts, shoal.ReduceOp.SUM)[0]) // smp.dp_size()
        assert total == wanted.count_params(), (total, wanted.count_params())


# ---- Training --------------------------------------------------------------------------------------------------------------


def models_train_as_one_process(rank):
    begin()
    for make, run, uses_tape in ((chain, run_chain, False), (forks, run_forks, False), (chain, run_chain, True)):
        losses, wanted = reference(make, run)
        trainer = Trainer(make, run, uses_tape)
        for step in range(STEPS):
            loss, result = trainer.train(step)
            close(loss, losses[step])
            assert result.shape == (SAMPLES, 5)
        trainer.expect_variables_of(wanted)
        close(trainer.test(tf.constant(data(9)[0])).concat(), wanted(data(9)[0], training=False))


def replicas_average(rank):
    """Pipelines with batches of their own, whose gradients Horovod's calls average: they train as one process on all batches."""
    import shoal.horovod.tensorflow as hvd
    for partitions, strategy in ((1, "cluster"), (smp_size() // 2, "cluster"), (smp_size() // 2, "spread"))[smp_size() == 2:]:
        begin(partitions, horovod=True, placement_strategy=strategy)
        replicas = smp_size() // partitions
        assert (smp.dp_size(), smp.pp_size(), hvd.size(), hvd.rank()) == (replicas, partitions, replicas, smp.dp_rank())
        assert smp.pp_rank() == (rank // replicas if strategy == "spread" else rank % partitions)
        model, optimizer = model_of(forks, run_forks, keras.Model), keras.optimizers.Adam(0.05)
        trainer = Trainer(forks, run_forks, averaged=hvd.allreduce)
        for step in range(STEPS):
            with tf.GradientTape() as tape:
                losses = [LOSS(y, model(x, training=True)) for x, y in (data(10 * step + each) for each in range(replicas))]
                loss = tf.add_n(losses) / replicas
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
            close(trainer.train(10 * step + smp.dp_rank())[0], losses[smp.dp_rank()])
        trainer.expect_variables_of(model)
        own = trainer.model.local_variables()
        if own and smp.dp_rank() > 0:
            own[0].assign(own[0] + 1)
        hvd.broadcast_variables(own, root_rank=0)
        trainer.expect_variables_of(model)
        folder = pathlib.Path(tempfile.gettempdir(), f"shoal-smp-replicas-{os.environ['SHOAL_JOB_ID']}-{partitions}-{strategy}")
        manager = smp.CheckpointManager(tf.train.Checkpoint(model=trainer.model), str(folder))
        assert bool(manager.save()) == (smp.dp_rank() == 0)
        smp.barrier()
        for variable in own:
            variable.assign(tf.zeros_like(variable))
        manager.restore()
        trainer.expect_variables_of(model)
        smp.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        fails(lambda: hvd.add_process_set([0]), NotImplementedError, "process sets together with partitions")


def smp_size():
    return int(os.environ["WORLD_SIZE"])


def partitions_follow_marks(rank):
    begin(auto_partition=False, default_partition=0)

    def make():
        layers = chain()
        return layers

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            for number, layer in enumerate(make()):
                with smp.partition(1 if number in (1, 4) else 0):
                    setattr(self, f"layer{number}", layer)

        def call(self, x):
            return run_chain([getattr(self, f"layer{number}") for number in range(5)], x)
    model = Model()
    result = smp.step(lambda x: model(x))(tf.constant(data(0)[0]))
    close(result.merge(), model_of(chain, run_chain, keras.Model)(data(0)[0]))
    assert [bool(getattr(model, f"layer{number}").variables) for number in (0, 2, 4)] == [rank == 0, rank == 0, rank == 1]


def folder_of(name):
    return pathlib.Path(tempfile.gettempdir(), f"shoal-smp-keras-{name}-{os.environ['SHOAL_JOB_ID']}")


def manager_of(trainer, folder, **options):
    return smp.CheckpointManager(tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer), str(folder), **options)


def drop(folder, rank):
    smp.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    smp.barrier()


def checkpoints_resume(rank):
    begin()
    (wanted, _), folder = reference(chain, run_chain, 5), folder_of("resume")
    trainer = Trainer(chain, run_chain)
    manager = manager_of(trainer, folder, max_to_keep=2)
    for step in range(2):
        trainer.train(step)
        manager.save()
    smp.barrier()
    assert sorted(os.listdir(folder)) == [f"mp_rank_{each}" for each in range(smp.mp_size())]
    other = Trainer(chain, run_chain)
    again = manager_of(other, folder, max_to_keep=2)
    other.train(7)  # makes the variables
    assert again.latest_checkpoint and again.checkpoints == manager.checkpoints
    again.restore().assert_consumed()
    for step in (2, 3):
        close(other.train(step)[0], wanted[step])
    again.save()
    smp.barrier()
    files = {each.name.split(".", 1)[1] for each in (folder / f"mp_rank_{rank}").glob("ckpt-*")}
    assert files == {"index", "data-00000-of-00001", "partitions"}, files
    assert sorted(each.stem for each in (folder / f"mp_rank_{rank}").glob("*.partitions")) == ["ckpt-2", "ckpt-3"]
    last = Trainer(chain, run_chain)
    manager_of(last, folder).restore()  # before the first step
    close(last.train(4)[0], wanted[4])
    smp.barrier()
    if rank == 0:
        (folder / "mp_rank_9").mkdir()
    smp.barrier()
    fails(again.restore, SMPError, "and this job 2")
    drop(folder, rank)


def models_are_divided_as_when_saved(rank):
    """The choice by measured times agrees with at most one of these divisions."""
    begin()
    for places in ([0, 1, 1, 1, 1], [0, 0, 0, 0, 1]):
        folder, trainer, other = folder_of(sum(places)), Trainer(chain, run_chain), Trainer(chain, run_chain)
        trainer.model._smp_division.prefer(places)
        trainer.train(0)
        manager_of(trainer, folder).save()
        smp.barrier()
        again = manager_of(other, folder)
        other.train(7)
        assert other.model._smp_division.places == places
        again.restore().assert_consumed()
        close(other.train(1)[0], trainer.train(1)[0])
        drop(folder, rank)


def other_divisions_are_refused(rank):
    begin()
    folder, trainer, late, early = folder_of("other"), *(Trainer(chain, run_chain) for _ in range(3))
    trainer.model._smp_division.prefer([0, 0, 0, 1, 1])
    trainer.train(0)
    manager_of(trainer, folder).save()
    smp.barrier()
    late.model._smp_division.prefer([0, 0, 1, 1, 1])
    late.train(7)
    fails(manager_of(late, folder).restore, SMPError, "[0, 0, 0, 1, 1]; now: [0, 0, 1, 1, 1]", "before the first step")
    begin(auto_partition=False, default_partition=0)
    for number in (1, 2, 3, 4):
        getattr(early.model, f"layer{number}")._smp_partition = 1
    manager_of(early, folder).restore()
    fails(lambda: early.test(tf.constant(data(7)[0])), SMPError, "[0, 0, 0, 1, 1]; now: [0, 1, 1, 1, 1]")
    drop(folder, rank)


def parameters_decide(rank):
    """memory_weight chooses stages of equal bytes; what has no effect is logged."""
    logged = []
    tf.get_logger().warning, plain = (lambda text, *words: logged.append(text % words)), tf.get_logger().warning
    begin(memory_weight=1.0, pipeline="simple", active_microbatches=3, ddp=True)
    tf.get_logger().warning = plain
    assert rank or [each.split(" has no effect")[0].split()[-1] for each in logged] == ["pipeline", "active_microbatches", "ddp"], logged
    make = lambda: [seeded(keras.layers.Conv2D, 2, 3, seed=1), keras.layers.Flatten(), seeded(keras.layers.Dense, 64, seed=2),  # noqa: E731
                    keras.layers.Dropout(0.0), seeded(keras.layers.Dense, 64, seed=3)]
    model = model_of(make, run_chain)
    smp.step(lambda x: model(x))(tf.constant(data(0)[0]))
    held = sum(each.shape.num_elements() for each in model.local_variables())
    assert held == (20 + 32 * 64 + 64 if rank == 0 else 64 * 64 + 64), held


def outputs_have_the_form_of_one_call(rank):
    begin()
    model = model_of(chain, run_chain)

    @smp.step(non_split_inputs=["whole"], input_split_axes={"turned": 1})
    def forms(x, whole, turned, flag):
        assert flag == "a"
        return {"mean": tf.reduce_mean(model(x)), "rows": (tf.shape(whole)[0], tf.shape(turned))}, None
    found, nothing = forms(tf.constant(data(0)[0]), tf.zeros([7, 2]), tf.zeros([3, 8]), "a")
    assert nothing is None or nothing == [None] * MICROBATCHES
    assert found["mean"].stack().shape == (MICROBATCHES,) and found["mean"].concat().shape == (MICROBATCHES,)
    close(found["mean"].reduce_sum(), 4 * found["mean"].reduce_mean())
    assert [int(each) for each in found["rows"][0].outputs] == [7] * MICROBATCHES
    assert [list(map(int, each)) for each in found["rows"][1].outputs] == [[3, 2]] * MICROBATCHES


# ---- Misuse ----------------------------------------------------------------------------------------------------------------


class Applies(keras.layers.Layer):
    """Cannot be copied."""

    def __init__(self, function):
        super().__init__(name="applies")
        self.function = lambda x: function(x)

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        raise NotImplementedError("no get_config")


def misuse_is_refused(rank):
    fails(smp.rank, SMPError, "call smp.init() first")
    fails(lambda: smp.init({"partitions": 3}), SMPConfigError, "2", "3")
    fails(lambda: smp.init({"partitions": 1}), SMPConfigError, "2 processes are 2 replicas of 1 partitions", "hvd.allreduce()")
    fails(lambda: smp.init({"partitions": 1, "horovod": True, "ddp": True}), SMPConfigError, "ddp and horovod are both true")
    fails(lambda: smp.init({"partitions": 2, "tensor_parallel_degree": 2, "ddp": True}), SMPUnsupportedError, "tensor_parallel_degree is served in PyTorch only")
    fails(lambda: smp.init({"partitions": 2, "bf16": True}), SMPUnsupportedError, "set keras.mixed_precision")
    begin()
    model = model_of(chain, run_chain)
    x = tf.constant(data(0)[0])
    fails(lambda: model(x), SMPError, "@smp.step only")
    fails(lambda: model.fit(x), SMPUnsupportedError, "model.fit() is not served")
    fails(lambda: smp.step(lambda x: model(x))(x[:15]), SMPConfigError, "the argument x has 15 samples, which 4 microbatches do not divide")
    fails(lambda: smp.step(non_split_inputs=["y"])(lambda x: model(x)), SMPConfigError, "has no argument y")
    fails(lambda: smp.partition(2).__enter__(), SMPConfigError, "must be a number less than the number of partitions, 2")
    between = model_of(chain, lambda layers, x: run_chain(layers[1:], layers[0](x) * 2.0))
    fails(lambda: smp.step(lambda x: between(x))(x), SMPUnsupportedError, "put operations between layers into a layer")
    behind = model_of(chain, lambda layers, x: run_chain(layers, x) * 2.0)
    fails(lambda: smp.step(lambda x: behind(x))(x), SMPUnsupportedError, "the model returns a tensor that is no layer's result")
    one = model_of(chain, lambda layers, x: layers[1](x))
    fails(lambda: smp.step(lambda x: one(x))(x), SMPError, "the model calls 1 layers (flatten", "2 partitions")
    unknown = model_of(lambda: [*chain()[:4], Applies(tf.abs)], run_chain)
    fails(lambda: smp.step(lambda x: unknown(x))(x), SMPError, "rank 0 cannot measure a copy of applies", "get_config")  # on all ranks
    assert (smp.rank(), smp.size(), smp.dp_rank(), smp.dp_size(), smp.local_size()) == (rank, 2, 0, 1, 2)


# ---- A rank that dies ----


def dies_between_steps(rank):
    begin()
    trainer = Trainer(chain, run_chain)
    for step in range(100):
        if rank == 1 and step == 1:
            os._exit(9)
        trainer.train(step)


def a_rank_that_dies_is_named():
    told = forked.Ranks(2, dies_between_steps)
    expect(told.codes == [1, 9] and "shoal:" in told.texts[0] and "rank 1" in told.texts[0], told.told())


def nothing(*_):
    pass


def cases(size, *functions):
    return forked.Cases(size, functions, nothing, nothing).report()


run_cases([*cases(1, models_train_as_one_process), *cases(2, models_train_as_one_process), *cases(3, models_train_as_one_process),
           *cases(2, replicas_average), *cases(4, replicas_average), *cases(2, partitions_follow_marks),
           *cases(2, checkpoints_resume, models_are_divided_as_when_saved, other_divisions_are_refused), *cases(2, parameters_decide),
           *cases(2, outputs_have_the_form_of_one_call), *cases(2, misuse_is_refused), a_rank_that_dies_is_named])
