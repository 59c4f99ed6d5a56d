"""Muon for matrices, AdamW for the rest, and how fast both go in the course of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

MATRIX_RATE, OTHER_RATE = 0.02, 3e-3
MIN_MATRIX_SIDE = 32  # of a matrix whose update is worth making orthogonal
MATRIX_DECAY = 0.02
WARMUP_STEPS = 60
FULL_RATE_UNTIL, LAST_RATE = 0.55, 0.03  # of the training's length; of the full rate


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal: every direction of a matrix moves alike.

    Keller Jordan's Muon (2024), with Nesterov momentum. A tensor of more than two dimensions is a
    stack of matrices. Parameters without a gradient stay as they are.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the gradients are there before the step"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["momentum"])

    def _update(self, parameter: Tensor, gradient: Tensor, rate: float, momentum: float) -> None:
        state = self.state[parameter]
        mean = state.setdefault("mean", torch.zeros_like(parameter))
        mean.lerp_(gradient, 1 - momentum)
        update = orthogonalized(gradient.lerp(mean, momentum))
        rows, columns = parameter.shape[-2:]
        parameter.mul_(1 - rate * MATRIX_DECAY)
        parameter.sub_(update, alpha=rate * max(1.0, rows / columns) ** 0.5)


def orthogonalized(x: Tensor) -> Tensor:
    """Matrices x [..., rows, columns] with all singular values near 1, singular vectors kept.

    Five Newton-Schulz steps of the quintic whose coefficients are Muon's, in bf16.
    """
    tall = x.shape[-2] > x.shape[-1]
    result = (x.mT if tall else x).bfloat16()
    result = result / (result.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = result @ result.mT
        result = 3.4445 * result + (-4.7750 * gram + 2.0315 * gram @ gram) @ result
    return (result.mT if tall else result).to(x.dtype)


class Optimizers:
    """Both optimizers as one, with the schedule of their rates."""

    def __init__(self, model: nn.Module) -> None:
        matrices, others = [], []
        for name, parameter in model.named_parameters():
            if _is_matrix(name, parameter):
                matrices.append(parameter)
            else:
                others.append({"params": [parameter], "lr": OTHER_RATE * _caution(name)})
        self._optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=MATRIX_RATE),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        for group in self._groups():
            group["full_rate"] = group["lr"]

    def step(self, factor: float) -> None:
        """Change the parameters by their gradients at `factor` of the full rates; clear these."""
        for group in self._groups():
            group["lr"] = factor * group["full_rate"]
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def rate_factor(step: int, fraction_done: float) -> float:
    """Of the full rate: up in the first steps, then constant, then down to a little."""
    falling = max(LAST_RATE, (1 - fraction_done) / (1 - FULL_RATE_UNTIL))
    return min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, falling)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Maps between activations; not tables, small tensors or the residual streams' mixing."""
    if parameter.ndim < 2 or min(parameter.shape[-2:]) < MIN_MATRIX_SIDE:
        return False
    return not any(part in name for part in ("embed", "lm_head", "_hc", "hc_", "position_bias"))


def _caution(name: str) -> float:
    """A factor of the rate for parts that small steps already turn over."""
    if "_hc." in name or "hc_" in name:
        return 0.05
    return 0.25 if name.endswith(("gate.weight", "weights_proj.weight")) else 1.0
