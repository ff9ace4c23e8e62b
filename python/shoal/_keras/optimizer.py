"""An optimizer that averages gradients over all ranks before it applies them."""
from __future__ import annotations

import keras


class _Distributed:
    """Averages gradients before the optimizer's own work on them: unscaling, clipping, accumulation."""

    _shoal = None  # the object that averages: average(gradients, variables)

    def apply(self, grads, trainable_variables=None):
        grads = list(grads)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        trainable = [not getattr(variable, "overwrite_with_gradient", False) for variable in variables]
        if len(grads) == len(variables):
            chosen = [i for i, is_one in enumerate(trainable) if is_one]
            averages = self._shoal.average([grads[i] for i in chosen], [variables[i] for i in chosen])
            for i, gradient in zip(chosen, averages):
                grads[i] = gradient
        return super().apply(grads, trainable_variables)


def is_averaged_by_all(optimizer):
    """Returns true if the optimizer averages gradients over all ranks of the job."""
    return isinstance(optimizer, _Distributed) and getattr(optimizer._shoal, "world", 0) == 0


def measuring(optimizer):
    """Returns the optimizer's averages, which measure the noise scale."""
    averages = optimizer._shoal if isinstance(optimizer, _Distributed) else None
    if not getattr(averages, "noise_window", 0):
        raise ValueError("shoal: the noise scale is not measured: compile the model with "
                         "shoal.DistributedOptimizer(optimizer, noise_scale=True)")
    return averages


def wrap(optimizer, settings):
    """Makes the optimizer average gradients with settings.average(gradients, variables)."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"shoal: DistributedOptimizer takes an optimizer of Keras 3, and was given a "
                        f"{type(optimizer).__name__}; keras.optimizers.get() makes one of a name")
    if isinstance(optimizer, _Distributed):
        raise ValueError("shoal: this optimizer averages gradients already: DistributedOptimizer was called on it twice")
    scales = keras.optimizers.LossScaleOptimizer
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, scales):
        optimizer = scales(optimizer)
    plain = type(optimizer)
    # Keeps the name and module of the plain class, so that a saved model is restored with that class.
    optimizer.__class__ = type(plain.__name__, (_Distributed, plain), {"__module__": plain.__module__, "_shoal": settings})
    return optimizer
