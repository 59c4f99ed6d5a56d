"""Mixture of experts: which experts a token goes to, with what weight, and what they compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.aot import Case
from sluice.kernels.cpu import call, dtype_of, few_rows
from sluice.kernels.launch import block_size, runs_triton
from sluice.kernels.matmul import Weight, grouped_linear, linear


def choose_experts(
    x: Tensor, gate: Tensor, by: Tensor, token_ids: Tensor, num_chosen: int, routed_scale: float
) -> tuple[Tensor, Tensor]:
    """Each token's experts, int64 [num_tokens, num_chosen], and their weights, fp32.

    x: [num_tokens, hidden]; gate: [num_experts, hidden] fp32.
    by: a bias [num_experts] fp32 that joins the scores in the choice of the best; or a table
        [vocab, num_chosen] int64 of the experts for each of the token_ids [num_tokens].
    """
    has_table = by.dtype == torch.int64
    if few_rows(x):
        experts = token_ids.new_empty(len(x), num_chosen)
        weights = gate.new_empty(len(x), num_chosen)
        bias, table = (None, by) if has_table else (by, None)
        logits = linear(x.float(), gate)
        sizes = (*logits.shape, num_chosen, routed_scale)
        call("choose_experts", logits, bias, table, token_ids, experts, weights, *sizes)
        return experts, weights
    scores = router_scores(x, gate)
    experts = by[token_ids] if has_table else (scores + by).topk(num_chosen).indices
    return experts, route(scores, experts, routed_scale)


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """sqrt(softplus(x @ weight.T)) in fp32: [num_tokens, num_experts].

    x: [num_tokens, hidden]; weight: [num_experts, hidden] fp32.
    """
    return F.softplus(linear(x.float(), weight)).sqrt()


def route(scores: Tensor, experts: Tensor, routed_scale: float) -> Tensor:
    """Weights of the chosen experts, summing to `routed_scale`: [num_tokens, num_chosen] fp32.

    scores: [num_tokens, num_experts]; experts: [num_tokens, num_chosen] int64.
    """
    chosen = scores.gather(1, experts)
    return chosen * (routed_scale / chosen.sum(1, keepdim=True).clamp(min=1e-20))


def swiglu(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * weights, in fp32, cast once.

    gate_up: [n, 2 * width], gate first; weights: [n] fp32, or None for ones. Returns [n, width] of
    gate_up's dtype.
    """
    if not runs_triton(gate_up):
        return swiglu_reference(gate_up, limit, weights)
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(n, width)
    if n:
        block = block_size(width, high=1024)
        _swiglu[(n, triton.cdiv(width, block))](
            gate_up.contiguous(), weights, result, limit, width, BLOCK=block
        )
    return result


def swiglu_reference(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """`swiglu` in torch."""
    gate, up = gate_up.float().chunk(2, dim=1)
    gated = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if weights is not None:
        gated *= weights.unsqueeze(1)
    return gated.to(gate_up.dtype)


def mlp(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """One expert for all tokens: [num_tokens, hidden].

    x: [num_tokens, hidden]; w13: [2 * width, hidden], gate first; w2: [hidden, width].
    """
    if isinstance(w13, Tensor) and isinstance(w2, Tensor) and few_rows(x, w13, w2):
        return _routed_few(x, None, None, w13.unsqueeze(0), w2.unsqueeze(0), limit).to(x.dtype)
    return linear(swiglu(linear(x, w13), limit), w2)


def routed_experts(
    x: Tensor, experts: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float
) -> Tensor:
    """Weighted sum of each token's experts: fp32 [num_tokens, hidden].

    x: [num_tokens, hidden]; experts, weights: [num_tokens, num_chosen].
    w13: [num_experts, 2 * width, hidden], gate first; w2: [num_experts, hidden, width].
    A token's sum runs in the order of its choices, whatever else is in the batch.
    """
    if isinstance(w13, Tensor) and isinstance(w2, Tensor) and few_rows(x, w13, w2):
        return _routed_few(x, experts, weights, w13, w2, limit)
    num_tokens, num_chosen = experts.shape
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)  # [num_tokens * num_chosen], by expert
    counts = chosen.new_zeros(len(w13)).index_add_(0, chosen, torch.ones_like(chosen))
    gate_up = grouped_linear(x, w13, counts, torch.div(order, num_chosen, rounding_mode="floor"))
    # Weighted before w2, as the models were trained.
    hidden = swiglu(gate_up, limit, weights.flatten()[order])
    outputs = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
    outputs[order] = grouped_linear(hidden, w2, counts).float()
    return outputs.view(num_tokens, num_chosen, -1).sum(1)


def _routed_few(
    x: Tensor,
    experts: Tensor | None,
    weights: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    limit: float,
) -> Tensor:
    """`routed_experts` of few tokens, fp32 between the products; no `experts`: the only one."""
    result = x.new_empty(x.shape, dtype=torch.float32)
    num_chosen = 1 if experts is None else experts.shape[1]
    sizes = (len(x), num_chosen, len(w13), x.shape[1], w2.shape[2], limit)
    pointers = (x.contiguous(), experts, weights, w13, w2, result)
    call("experts", *pointers, *sizes, dtype_of(x), torch.get_num_threads())
    return result


@triton.jit
def _swiglu(
    gate_up: tl.tensor,
    weights: tl.tensor,
    result: tl.tensor,
    limit: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row, part) writes BLOCK channels of result [n, width] from gate_up [n, 2 * width].

    weights: [n] fp32 or None.
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    at = gate_up + row * 2 * width + channel
    gate = tl.minimum(tl.load(at, mask=inside, other=0).to(tl.float32), limit)
    up = tl.load(at + width, mask=inside, other=0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * tl.minimum(tl.maximum(up, -limit), limit)
    if weights is not None:
        gated *= tl.load(weights + row)
    tl.store(result + row * width + channel, gated.to(result.dtype.element_ty), mask=inside)


AOT = (
    Case(
        _swiglu,
        "V4-Flash expert",
        {"gate_up": "*bf16:16", "weights": "*fp32:16", "result": "*bf16:16"}
        | {"limit": "fp32", "width": "i32:16"},
        {"BLOCK": 1024},
    ),
)
