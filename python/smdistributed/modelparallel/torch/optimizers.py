"""smp.optimizers: optimizers of the vendor's library that torch does not have. "Fused" is part of their names."""
from __future__ import annotations

import torch

from smdistributed.modelparallel.torch._norms import OwnNorms


class _Optimizer(torch.optim.Optimizer):
    """What the optimizers share. A step calls _begin_step() once, _step_parameter() for each parameter that has a gradient, and
    _end_step(). norms: how norms are computed; smp.DistributedOptimizer sets those of the job. made_of: for each group the model's
    parameters, in the order of group["params"], into which a wrapper for 16 bits may put master copies."""
    norms = OwnNorms()
    made_of = ()

    def __init__(self, params, **defaults):
        beta1, beta2 = defaults["betas"]
        if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
            raise ValueError(f"smp: betas must be from 0 on and below 1, not {defaults['betas']}")
        if defaults["lr"] < 0.0 or defaults["eps"] < 0.0 or defaults["weight_decay"] < 0.0:
            raise ValueError(f"smp: lr, eps and weight_decay must be from 0 on, not {defaults['lr']}, {defaults['eps']} and "
                             f"{defaults['weight_decay']}")
        super().__init__(params, defaults)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.made_of = [*self.made_of, list(self.param_groups[-1]["params"])]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [(group, each) for group in self.param_groups for each in group["params"] if each.grad is not None]
        self._begin_step(stepped)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1  # schedulers of the vendor's scripts read it
        for group, parameter in stepped:
            self._step_parameter(group, parameter, self.state[parameter])
        self._end_step()
        return loss

    def _begin_step(self, stepped):
        """Computes what depends on all gradients. stepped: (group, parameter)."""

    def _end_step(self):
        """Finishes the step of parameters of which this rank has a part."""

    @staticmethod
    def _corrections(group):
        """Returns what the two moments are divided by."""
        if not group["bias_correction"]:
            return 1.0, 1.0
        return tuple(1.0 - beta ** group["step"] for beta in group["betas"])


class FusedLAMB(_Optimizer):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", 2019, algorithm 2): Adam's direction, scaled for each parameter
    by the norm of its values over that of its update. max_grad_norm clips the norm of all gradients of this optimizer before. Norms are
    those of whole parameters and of the whole model, also if ranks divide them. Parameters without weight decay are not scaled, unless use_nvlamb is set. adam_w_mode: the decay is not part of the gradients."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False,
                 adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False):
        if amsgrad:
            raise ValueError("smp: FusedLAMB has no amsgrad")
        self._factor, self._sets_none, self._held = 1.0, set_grad_none, []
        super().__init__(params, lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay,
                         adam_w_mode=adam_w_mode, grad_averaging=grad_averaging, max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb)

    def zero_grad(self, set_to_none=None):
        super().zero_grad(self._sets_none if set_to_none is None else set_to_none)

    def _begin_step(self, stepped):
        self._held = []  # a former step may have raised
        bound = self.defaults["max_grad_norm"]
        norm = self.norms.of_gradients([each for _, each in stepped]) if bound else 0.0
        self._factor = bound / norm if bound and norm > bound else 1.0

    def _step_parameter(self, group, parameter, state):
        if not state:
            state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        beta1, beta2 = group["betas"]
        gradient = parameter.grad * self._factor
        if not group["adam_w_mode"]:
            gradient = gradient + group["weight_decay"] * parameter
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        first, second = self._corrections(group)
        update = (state["exp_avg"] / first) / ((state["exp_avg_sq"] / second).sqrt() + group["eps"])
        if group["adam_w_mode"]:
            update = update + group["weight_decay"] * parameter
        if self._is_scaled(group) and self.norms.is_part(parameter):
            self._held.append((group, parameter, update))
        else:
            norms = torch.stack([parameter.norm(), update.norm()]) if self._is_scaled(group) else None
            self._apply(group, parameter, update, norms)

    def _end_step(self):
        if not self._held:
            return
        held, self._held = self._held, []
        norms = torch.stack([torch.stack([parameter.norm(), update.norm()]) for _, parameter, update in held])
        norms = self.norms.of_whole([parameter for _, parameter, _ in held], norms)
        for (group, parameter, update), own in zip(held, norms):
            self._apply(group, parameter, update, own)

    @staticmethod
    def _is_scaled(group):
        return bool(group["weight_decay"] or group["use_nvlamb"])

    @staticmethod
    def _apply(group, parameter, update, norms):
        """norms: those of the parameter and of its update, or None if it is not scaled."""
        size, change = norms.tolist() if norms is not None else (0.0, 0.0)
        parameter.add_(update, alpha=-group["lr"] * (size / change if size > 0.0 and change > 0.0 else 1.0))


class FusedNovoGrad(_Optimizer):
    """NovoGrad (Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", 2019): the second moment is one number
    for each parameter, the average of the squared norm of its gradients, also if ranks have parts of it. norm_type 0: the largest magnitude of late takes its place."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False,
                 reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, set_grad_none=True):
        if amsgrad:
            raise ValueError("smp: FusedNovoGrad has no amsgrad")
        if norm_type not in (0, 2):
            raise ValueError(f"smp: FusedNovoGrad: norm_type must be 2 or 0 (the largest magnitude), not {norm_type!r}")
        self._sets_none, self._norms = set_grad_none, {}
        super().__init__(params, lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay,
                         reg_inside_moment=reg_inside_moment, grad_averaging=grad_averaging, norm_type=norm_type, init_zero=init_zero)

    def zero_grad(self, set_to_none=None):
        super().zero_grad(self._sets_none if set_to_none is None else set_to_none)

    def _begin_step(self, stepped):
        for is_largest in (False, True):
            own = [each for group, each in stepped if (group["norm_type"] == 0) == is_largest]
            if own:
                norms = torch.stack([each.grad.float().norm(float("inf") if is_largest else 2) for each in own])
                self._norms.update(zip(map(id, own), self.norms.of_whole(own, norms, is_largest)))

    def _step_parameter(self, group, parameter, state):
        beta1, beta2 = group["betas"]
        is_largest, norm = group["norm_type"] == 0, self._norms.pop(id(parameter))
        if not state:
            state.update(exp_avg=torch.zeros_like(parameter), norm=torch.zeros_like(norm) if group["init_zero"] else norm.clone())
        if is_largest:
            average = torch.maximum(state["norm"] * beta2, norm)
        else:
            average = (beta2 * state["norm"] ** 2 + (1.0 - beta2) * norm ** 2).sqrt()
        state["norm"].copy_(average)
        first, second = self._corrections(group)
        direction = parameter.grad / (average / second ** 0.5 + group["eps"])
        if group["reg_inside_moment"]:
            direction = direction + group["weight_decay"] * parameter
        state["exp_avg"].mul_(beta1).add_(direction, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)
        update = state["exp_avg"] / first
        if not group["reg_inside_moment"]:
            update = update + group["weight_decay"] * parameter
        parameter.add_(update, alpha=-group["lr"])
