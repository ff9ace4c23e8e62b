"""Callbacks for model.fit on several ranks. A front end's classes define in _job how ranks communicate: rank(), size(),
broadcast_variables(variables, root_rank), allgather_object(value), mean(numbers), and mismatch(text), an exception."""
from __future__ import annotations

import keras

from shoal import _replicas, _scaling

from .optimizer import is_averaged_by_all, measuring


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Copies the state of root_rank's model and optimizer to all ranks: when training begins, for the variables that exist by
    then, and after the first batch, which builds the rest.

    If the model's optimizer averages over all ranks, they compare hashes of the trainable variables every `compare_every` batches
    (0: never). If these differ, every rank warns once, with the name of the first such variable and the ranks that differ from the
    majority; with compare_raises training ends with an error instead."""

    _job = None

    def __init__(self, root_rank: int = 0, compare_every: int = _replicas.EVERY, compare_raises: bool = False):
        super().__init__()
        self.root_rank = root_rank
        self._comparing = compare_every, compare_raises, self._job.mismatch if self._job else RuntimeError
        self._begin()

    def _begin(self):
        """Ranks that have joined an elastic job count batches from 0, so all ranks do when training begins."""
        self._is_done, self._batches, self._comparison = False, 0, _replicas.Comparison(*self._comparing)

    def _shared(self, variables):
        """Returns the variables that are the same on all ranks."""
        return list(variables)

    def on_train_begin(self, logs=None):
        self._begin()
        if self.model.built and self.model.variables:
            self._job.broadcast_variables(self._shared(self.model.variables), self.root_rank)

    def on_train_batch_end(self, batch, logs=None):
        self._batches += 1
        if self._is_done:
            self._compare_if_due()
            return
        self._is_done = True
        optimizer = self.model.optimizer
        self._job.broadcast_variables(self._shared([*self.model.variables, *(optimizer.variables if optimizer else [])]), self.root_rank)


    def _compare_if_due(self):
        """Variables that no gradient changes may differ, and so may those that the program keeps for itself on each rank."""
        if self._job.size() == 1 or not self._comparison.is_due(self._batches) or not is_averaged_by_all(self.model.optimizer):
            return
        variables = [each for each in self._shared(self.model.trainable_variables) if not getattr(each, "overwrite_with_gradient", False)]
        different = _replicas.difference(self._job.allgather_object, [each.path for each in variables],
                                         [keras.ops.convert_to_numpy(each) for each in variables], f"after batch {self._batches}")
        if different:
            self._comparison.report(different)


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces the metrics of an epoch by their means over all ranks, for the callbacks after it and the history."""

    _job = None

    def on_epoch_end(self, epoch, logs=None):
        if not logs or self._job.size() == 1:
            return
        names = sorted(logs)
        for rank, theirs in enumerate(self._job.allgather_object(names)):
            if theirs != names:
                raise self._job.mismatch(f"shoal: metrics differ: rank {self._job.rank()} has {', '.join(names)}, and rank {rank} "
                                         f"{', '.join(theirs)}")
        for name, mean in zip(names, self._job.mean([float(logs[name]) for name in names])):
            logs[name] = mean


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies initial_lr by `multiplier`, a number or a function of the epoch, from start_epoch until before end_epoch. It
    does so when an epoch begins, and with staircase=False also at each batch, with fractions of an epoch."""

    def __init__(self, initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, steps_per_epoch=None):
        super().__init__()
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.steps_per_epoch = staircase, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self._epoch = 0

    def on_train_begin(self, logs=None):
        if not self.staircase and not self._steps():
            raise ValueError("shoal: steps_per_epoch is needed to change the learning rate within an epoch")

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._set(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        if not self.staircase:
            self._set(self._epoch + batch / self._steps())

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _steps(self):
        return self.steps_per_epoch or (self.params or {}).get("steps")

    def _set(self, epoch):
        if epoch >= self.start_epoch and (self.end_epoch is None or epoch < self.end_epoch):
            self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size() to initial_lr during the first epochs (Goyal et al., 2017). initial_lr
    is the rate for the global batch."""

    _job = None

    def __init__(self, initial_lr, warmup_epochs=5, steps_per_epoch=None, verbose=0):
        def multiplier(epoch):
            size = self._job.size()
            return 1 / size * (min(epoch + 1 / self._steps(), warmup_epochs) * (size - 1) / warmup_epochs + 1)
        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, steps_per_epoch)
        self.verbose, self.warmup_epochs = verbose, warmup_epochs

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose and self._job.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate has reached {self.initial_lr} after the warm-up", flush=True)


def _loss_scale(optimizer):
    """By which a LossScaleOptimizer multiplies gradients before they are averaged. It has no variable before its first step."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return 1.0
    return float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) if optimizer.built else optimizer.initial_scale


class _OfBatches(keras.callbacks.Callback):
    """The base of both callbacks below: passes the number of samples of each rank's batch to the optimizer's averages."""

    _job = None

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    @property
    def noise(self):
        """The noise scale (shoal._scaling.Noise), whose batch is that of a step of the optimizer: with
        gradient_accumulation_steps, that of all its batches."""
        return self._of_steps(measuring(self.model.optimizer).noise())

    def _of_steps(self, noise):
        return noise.of_batch(noise.batch * self._accumulated())

    def _accumulated(self):
        return getattr(self.model.optimizer, "gradient_accumulation_steps", None) or 1

    def _tell_batch(self):
        measuring(self.model.optimizer).set_batch(self.batch_size, 1 / _loss_scale(self.model.optimizer))


class NoiseScaleCallback(_OfBatches):
    """Measures how noisy gradients are. The model's optimizer is a DistributedOptimizer with noise_scale=True; batch_size is the
    number of samples that each rank has in a batch. At the end of an epoch the logs get noise_scale and noise_error, if these are
    known, and with verbose=1 rank 0 prints what the batch is in units of the noise scale, and what twice the batch would cost."""

    def __init__(self, batch_size, verbose=1):
        super().__init__(batch_size)
        self.verbose = verbose

    def on_train_begin(self, logs=None):
        self._tell_batch()

    def on_train_batch_begin(self, batch, logs=None):
        if isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer):
            self._tell_batch()

    def on_epoch_end(self, epoch, logs=None):
        noise = self.noise
        if logs is not None and noise.is_known:
            logs["noise_scale"], logs["noise_error"] = noise.scale, noise.error
        if self.verbose and self._job.rank() == 0:
            print(f"\nEpoch {epoch + 1}: {noise}", flush=True)


class ScaledLearningRate(_OfBatches):
    """Sets the learning rate in each step, for a global batch of batch_size samples on each rank, from a rate that was tuned for
    old_batch samples. rate is that rate, or a function of the number of steps of the old batch.

    rule: "linear", "sqrt", "adascale" or "none"; None takes "sqrt" for Adam and its like, and "linear" otherwise. "adascale" needs
    a DistributedOptimizer with noise_scale=True, and multiplies by 1 until the noise scale is known. warmup: steps of the old batch
    in which the factor rises from 1. total: steps of the old batch after which training ends.

    state() and load_state() are for checkpoints."""

    def __init__(self, rate, old_batch, batch_size, rule=None, warmup=0, total=None):
        super().__init__(batch_size)
        self.rate, self.old_batch, self.rule, self.warmup, self.total = rate, old_batch, rule, warmup, total
        self.scaling, self._loaded = None, None

    @property
    def iterations(self):
        """Steps of the old batch that the training is worth so far."""
        return self.scaling.iterations if self.scaling else 0.0

    def on_train_begin(self, logs=None):
        if self.scaling is None:
            self.scaling = _scaling.Scaling(self.rule, self.old_batch, self._global_batch(), self.warmup, self._is_adaptive())
            if self._loaded:
                self.load_state(self._loaded)
        if self.scaling.rule == "adascale":
            self._tell_batch()

    def on_train_batch_begin(self, batch, logs=None):
        noise = None
        if self.scaling.rule == "adascale":
            self._tell_batch()
            noise = self.noise
        self.scaling.look(self._global_batch(), noise)
        rate = self.rate(int(self.iterations)) if callable(self.rate) else self.rate
        self.model.optimizer.learning_rate = rate * self.scaling.rate.factor

    def on_train_batch_end(self, batch, logs=None):
        self._batches = getattr(self, "_batches", 0) + 1
        if self._batches % self._accumulated() == 0:
            self.scaling.count()
        if self.total is not None and self.iterations >= self.total:
            self.model.stop_training = True

    def _global_batch(self):
        return self.batch_size * self._job.size() * self._accumulated()

    def _is_adaptive(self):
        return _scaling.is_adaptive(getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer))

    def state(self):
        """The position in the schedule and, with "adascale", the averages of the noise scale: the same on all ranks."""
        noise = measuring(self.model.optimizer).noise_state() if self.scaling.rule == "adascale" else None
        return {"scaling": self.scaling.state(), "noise": noise}

    def load_state(self, state):
        """Restores state(), on all ranks, before or after training begins."""
        self._loaded = state
        if self.scaling is None:
            return
        self.scaling.load(state["scaling"])
        if state["noise"]:
            measuring(self.model.optimizer).load_noise_state(state["noise"])
        self._loaded = None
