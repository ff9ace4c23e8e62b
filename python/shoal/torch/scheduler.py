"""A learning-rate scheduler for another batch size than the rate was tuned for.

    model = shoal.torch.DistributedDataParallel(model, noise_scale=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)                     # tuned for 64 samples
    scheduler = shoal.torch.ScaledLR(optimizer, "adascale", old_batch=64, batch=512, model=model)

include/shoal/scaling.h has the rules; docs/batch-size.md helps to choose one.
"""
from __future__ import annotations

from torch.optim.lr_scheduler import LRScheduler

from .. import _native, _scaling
from .._scaling import Noise  # noqa: F401


class ScaledLR(LRScheduler):
    """Multiplies an optimizer's rates, which were tuned for a global batch of `old_batch` samples, by the factor for `batch`
    samples. Call step() after each step of the optimizer.

    rule: "linear", "sqrt", "adascale" or "none". None means "sqrt" for Adam and its like, and "linear" otherwise. "adascale" needs
    `model`, a shoal.torch.DistributedDataParallel with noise_scale=True, and multiplies by 1 until the noise scale is known.

    schedule: the schedule of the rate for the old batch, in steps of the old batch. It is a function of their number that returns a
    factor, as for LambdaLR, or a scheduler of the same optimizer; the program must not step that scheduler itself. Each step of the
    new batch is worth `gain` steps of the old batch, so the training ends when `iterations` reaches their number.

    warmup: steps of the old batch in which the factor rises from 1 to its value. `batch` may be changed between steps."""

    def __init__(self, optimizer, rule=None, *, old_batch, batch, model=None, schedule=None, warmup=0, last_epoch=-1):
        if rule == "adascale" and model is None:
            raise ValueError("shoal: the rule adascale follows the noise scale: pass model=, a DistributedDataParallel with "
                             "noise_scale=True")
        if model is not None:
            model.noise_scale()  # raises an error if it does not measure
        if isinstance(schedule, LRScheduler) and schedule.optimizer is not optimizer:
            raise ValueError("shoal: schedule is a scheduler of another optimizer")
        self._scaling = _scaling.Scaling(rule, old_batch, batch, warmup, _scaling.is_adaptive(optimizer))
        self._model, self._schedule, self.batch = model, schedule, batch
        self._unscaled = [float(group["lr"]) for group in optimizer.param_groups]  # at the present iteration
        super().__init__(optimizer, last_epoch)

    @property
    def iterations(self):
        """Steps of the old batch that the training is worth so far."""
        return self._scaling.iterations

    @property
    def factor(self):
        """The number by which the rate of the next step is multiplied."""
        return self._scaling.rate.factor

    @property
    def gain(self):
        """Steps of the old batch that the next step is worth."""
        return self._scaling.rate.gain

    def step(self, epoch=None):
        if self._step_count:  # the constructor's call sets the first rate
            self._scaling.count()
            self._scaling.look(self.batch, self._model.noise_scale() if self._model is not None else None)
            self._follow_schedule()
        super().step()

    def get_lr(self):
        return [rate * self.factor for rate in self._rates()]

    def _rates(self):
        if callable(self._schedule):
            return [rate * self._schedule(int(self.iterations)) for rate in self.base_lrs]
        return self.base_lrs if self._schedule is None else self._unscaled

    def _follow_schedule(self):
        """Steps another scheduler as often as iterations have passed. Many schedulers compute a rate from the one before, so this
        one sees rates without the factor."""
        if not isinstance(self._schedule, LRScheduler) or self._schedule.last_epoch >= int(self.iterations):
            return
        for group, rate in zip(self.optimizer.param_groups, self._unscaled):
            group["lr"] = rate
        while self._schedule.last_epoch < int(self.iterations):
            self._schedule.step()
        self._unscaled = [float(group["lr"]) for group in self.optimizer.param_groups]

    # ---- Checkpoints ----

    def state_dict(self):
        """Returns the state; with a model, also the averages of its noise scale. A schedule that is a function is not saved, as in
        LambdaLR."""
        state = {name: getattr(self, name) for name in ("last_epoch", "_step_count", "_last_lr", "base_lrs", "_unscaled")}
        state["scaling"] = self._scaling.state()
        state["schedule"] = self._schedule.state_dict() if isinstance(self._schedule, LRScheduler) else None
        state["noise"] = self._model.noise_state_dict() if self._model is not None else None
        return state

    def load_state_dict(self, state):
        """Restores a state. Call it on all ranks. The rates are in the optimizer's own state. The batch stays this scheduler's own,
        because the number of ranks may be another one now."""
        state = dict(state)
        state.pop("batch", None)  # in states of earlier checkouts
        self._scaling.load(state.pop("scaling"))
        schedule, noise = state.pop("schedule"), state.pop("noise")
        if isinstance(self._schedule, LRScheduler) and schedule is not None:
            self._schedule.load_state_dict(schedule)
        if self._model is not None and noise is not None:
            self._model.load_noise_state_dict(noise)
        self.__dict__.update(state)


def scale_moments(optimizer, k):
    """Sets the betas and epsilon of Adam and its like for k times the batch: 1 - beta is multiplied by k, and epsilon divided by the
    root of k (Malladi et al. 2022, arXiv 2205.10287). Call it once, for an optimizer with the settings of the old batch. ScaledLR
    with the rule "sqrt" sets its rate. Raises ValueError, and changes nothing, if k is above 1 / (1 - beta1)."""
    if not 0 < k < float("inf"):
        raise ValueError(f"shoal: the batch cannot be {k} times the old one")
    beta, chosen = _native.load().scaling_beta, []
    for group in optimizer.param_groups:
        if "betas" not in group:
            raise ValueError(f"shoal: {type(optimizer).__name__} has no betas: only Adam and its like have moments to scale")
        chosen.append(tuple(beta(each, k) for each in group["betas"]))
        if min(chosen[-1]) < 0:
            most = min(1 / (1 - each) for each in group["betas"])
            raise ValueError(f"shoal: betas {group['betas']} can be scaled for up to {most:g} times the batch, not {k:g} times: use a "
                             "smaller batch, or the rule \"adascale\"")
    for group, betas in zip(optimizer.param_groups, chosen):
        group["betas"] = betas
        if "eps" in group:
            group["eps"] /= k ** 0.5
