"""DeepSeek-V4: the forward pass of one step over pool pages."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.cache.spec import PoolSpec
from sluice.kernels.hyper_connections import collapse_head, mix_in, mix_out
from sluice.kernels.matmul import BlockScaled, linear
from sluice.kernels.moe import choose_experts, mlp, routed_experts
from sluice.kernels.norm import rms_norm
from sluice.kernels.rope import inverse_frequencies, yarn_inverse_frequencies
from sluice.model.common.checkpoint import check_tensors, read_weights
from sluice.model.common.inputs import ForwardInputs
from sluice.model.common.weight_files import fingerprint
from sluice.model.v4.attention import attention
from sluice.model.v4.config import DeepseekV4Config
from sluice.model.v4.inventory import tensor_shapes
from sluice.model.v4.pools import replay_tokens
from sluice.model.v4.step import LayerStep, Planner, Pools, RopeFrequencies, StepFrame, plan_hybrid
from sluice.model.v4.weights import (
    HyperWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    build_weights,
)


class DeepseekV4:
    """A loaded model. Holds weights and no request's data: all of that is in the pools."""

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: ModelWeights,
        specs: tuple[PoolSpec, ...],
        fingerprint: str,
        plan: Planner = plan_hybrid,
    ) -> None:
        """plan: where the rows of `specs` lie and which are made anew: hybrid or native."""
        self.config = config
        self.weights = weights
        self.specs = specs
        self.fingerprint = fingerprint
        self.plan = plan
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_model_len
        self.replay_tokens = replay_tokens(specs, config.sliding_window)
        self.repeats = plan is plan_hybrid  # steps of the native path compute the whole context
        self._frequencies = _rope_frequencies(config, weights.norm.device)

    @classmethod
    def load(
        cls,
        folder: Path,
        config: DeepseekV4Config,
        specs: tuple[PoolSpec, ...],
        *,
        dtype: torch.dtype,
        device: str,
        stored: bool = False,
        plan: Planner = plan_hybrid,
    ) -> DeepseekV4:
        """Read a checkpoint. Raises ConfigError if files or tensors are not as they should be.

        stored: keep quantised matrices as they are stored, rounding what they are multiplied with.
        """
        named = read_weights(folder)
        check_tensors(named, tensor_shapes(config), str(folder))
        weights = build_weights(named, config, dtype=dtype, device=device, stored=stored)
        rounds = stored and any(isinstance(weight, BlockScaled) for weight in named.values())
        identity = fingerprint(folder) + ("-stored" if rounds else "")
        return cls(config, weights, specs, identity, plan)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, pools: Pools, *, all_logits: bool = False) -> Tensor:
        """Compute a step: write its rows to the pools, return fp32 logits.

        pools: by name, each in a layout of its own choice; the pages of `spec.pages(start, end)`
            must be in `inputs.page_tables` for every request.
        Returns [R, vocab] of each request's last token, or [T, vocab] with `all_logits`.
        """
        config, weights = self.config, self.weights
        step = self.plan(StepFrame(inputs, config, self._frequencies, pools))
        x = F.embedding(inputs.token_ids, weights.embed)
        streams = x.unsqueeze(1).repeat(1, config.hc_mult, 1)  # [T, hc_mult, hidden]
        for number, layer in enumerate(weights.layers):
            streams = self._layer(streams, layer, LayerStep(number, step))
        if not all_logits:
            streams = streams[inputs.query_start[1:] - 1]
        x = collapse_head(
            streams, *_parts(weights.head_hc), eps=config.hc_eps, norm_eps=config.norm_eps
        )
        return linear(rms_norm(x.float(), weights.norm, config.norm_eps), weights.head)

    def _layer(self, streams: Tensor, layer: LayerWeights, at: LayerStep) -> Tensor:
        """Streams [T, hc_mult, hidden] through attention and experts."""
        config = self.config
        x, post, comb = self._mix_in(streams, layer.attn_hc)
        x = rms_norm(x, layer.attn_norm, config.norm_eps)
        x = attention(x, layer.attention, at)
        streams = mix_out(x, streams, post, comb)

        x, post, comb = self._mix_in(streams, layer.ffn_hc)
        x = rms_norm(x, layer.ffn_norm, config.norm_eps)
        x = moe(x, at.inputs.token_ids, layer.moe, config)
        return mix_out(x, streams, post, comb)

    def _mix_in(self, streams: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        return mix_in(
            streams,
            *_parts(weights),
            sinkhorn_iters=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.norm_eps,
        )


def _parts(weights: HyperWeights) -> tuple[Tensor, Tensor, Tensor]:
    return weights.fn, weights.scale, weights.base


def moe(x: Tensor, token_ids: Tensor, weights: MoeWeights, config: DeepseekV4Config) -> Tensor:
    """Routed experts and the shared one: [T, hidden] to [T, hidden], added in fp32, cast once."""
    by = weights.bias if weights.tid2eid is None else weights.tid2eid
    assert by is not None, "a router has a table of token ids or a bias"
    experts, chosen = choose_experts(
        x, weights.gate, by, token_ids, config.num_experts_per_token, config.routed_scale
    )
    limit = config.swiglu_limit
    routed = routed_experts(x, experts, chosen, weights.w13, weights.w2, limit)
    return (routed + mlp(x, weights.shared_w13, weights.shared_w2, limit)).to(x.dtype)


def _rope_frequencies(config: DeepseekV4Config, device: torch.device) -> RopeFrequencies:
    theta, yarn = config.compress_rope_theta, config.compress_yarn
    if yarn is None:
        compressed = inverse_frequencies(theta, config.rope_dim)
    else:
        compressed = yarn_inverse_frequencies(
            theta,
            config.rope_dim,
            factor=yarn.factor,
            original_max_tokens=yarn.original_max_tokens,
            beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow,
        )
    sliding = inverse_frequencies(config.rope_theta, config.rope_dim)
    return RopeFrequencies(sliding.to(device), compressed.to(device))
