"""Mixture of experts: which experts a token goes to, with what weight, and what they compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """sqrt(softplus(x @ weight.T)) in fp32: [num_tokens, num_experts].

    x: [num_tokens, hidden]; weight: [num_experts, hidden] fp32.
    """
    return F.softplus(F.linear(x.float(), weight)).sqrt()


def route(scores: Tensor, experts: Tensor, routed_scale: float) -> Tensor:
    """Weights of the chosen experts, summing to `routed_scale`: [num_tokens, num_chosen] fp32.

    scores: [num_tokens, num_experts]; experts: [num_tokens, num_chosen] int64.
    """
    chosen = scores.gather(1, experts)
    return chosen * (routed_scale / chosen.sum(1, keepdim=True).clamp(min=1e-20))


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), in fp32.

    gate_up: [n, 2 * width], gate first. Returns fp32 [n, width].
    """
    gate, up = gate_up.float().chunk(2, dim=1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def mlp(x: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """One expert for all tokens: [num_tokens, hidden].

    x: [num_tokens, hidden]; w13: [2 * width, hidden], gate first; w2: [hidden, width].
    """
    return F.linear(swiglu(F.linear(x, w13), limit).to(x.dtype), w2)


def routed_experts(
    x: Tensor, experts: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """Weighted sum of each token's experts: fp32 [num_tokens, hidden].

    x: [num_tokens, hidden]; experts, weights: [num_tokens, num_chosen].
    w13: [num_experts, 2 * width, hidden], gate first; w2: [num_experts, hidden, width].
    A token's sum runs in the order of its choices, whatever else is in the batch.
    """
    num_tokens, num_chosen = experts.shape
    order = experts.flatten().argsort(stable=True)  # [num_tokens * num_chosen], by expert
    counts = experts.flatten().bincount(minlength=w13.shape[0]).tolist()
    hidden = swiglu(_grouped_linear(x[order // num_chosen], counts, w13), limit)
    hidden *= weights.flatten()[order].unsqueeze(1)  # before w2, as the models were trained
    outputs = x.new_empty(num_tokens * num_chosen, x.shape[1], dtype=torch.float32)
    outputs[order] = _grouped_linear(hidden.to(x.dtype), counts, w2).float()
    return outputs.view(num_tokens, num_chosen, -1).sum(1)


def _grouped_linear(x: Tensor, counts: list[int], weight: Tensor) -> Tensor:
    """Rows sorted by expert, each times its own expert's matrix.

    x: [n, in], `counts[e]` rows for expert e in turn; weight: [num_experts, out, in]. -> [n, out]
    """
    groups = x.split(counts)
    hit = [e for e, count in enumerate(counts) if count]
    return torch.cat([F.linear(groups[e], weight[e]) for e in hit])
