"""Runner: a model with the pools of one role, able to compute a batch."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sluice.cache.budget import plan_pages
from sluice.cache.manager import CacheManager, PageCopy
from sluice.cache.pools import allocate_pools
from sluice.cache.spec import PoolSpec
from sluice.engine.batch import Chunk, build_inputs
from sluice.engine.checks import checked_tokens
from sluice.engine.graphs import DecodeSteps
from sluice.engine.request import Request
from sluice.kernels import cpu
from sluice.model.registry import Model, load_model
from sluice.protocol.config import RoleConfig, SluiceConfig
from sluice.protocol.grammar import Grammars, Matcher
from sluice.protocol.messages import (
    ConfigError,
    GenerateRequest,
    InvalidRequest,
    NodeInfo,
    Role,
    SamplingParams,
)
from sluice.protocol.special_tokens import eos_token_ids, readable_tokenizer

# Of a prefill node's cache memory that running requests do not need: see benchmarks/trace_replay.py
RESUME_SHARE = 0.15


class Runner:
    """Owns a model, its pools in the role's layout, and the manager of their pages."""

    def __init__(
        self,
        model: Model,
        role: RoleConfig,
        *,
        max_step_tokens: int,
        max_model_len: int,
        grammars: Grammars | None = None,
        resumes: bool = True,
    ) -> None:
        """Allocate the pools. Raises ConfigError if layout or memory cannot work.

        resumes: whether computation goes on from cached prefixes here, which takes room for
        window and state pages; a node that is sent these needs none.
        """
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_model_len = max_model_len
        self._grammars = grammars
        self.device = role.device
        self.specs = role_specs(model.specs, role)
        try:
            num_pages = plan_pages(
                self.specs,
                cache_bytes=role.cache_bytes,
                max_requests=role.max_running_requests,
                max_step_tokens=max_step_tokens,
                max_model_len=max_model_len,
                keep_prefixes=role.prefix_cache,
                resume_share=RESUME_SHARE if resumes and role.prefix_cache else 0.0,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.pools = allocate_pools(self.specs, num_pages)
        self.manager = CacheManager(
            self.specs,
            num_pages,
            role.max_running_requests,
            identity=model.fingerprint,
            prefix_cache=role.prefix_cache,
            replay_tokens=model.replay_tokens,
        )
        self.decode_steps = DecodeSteps(
            model, self.pools, self.manager, max_tokens=max_model_len, device=self.device
        )

    @classmethod
    def load(cls, config: SluiceConfig, role: Role) -> Runner:
        """Load the checkpoint and allocate the pools of one role. Raises ConfigError."""
        section = config.role(role)
        torch.set_num_threads(section.num_cpus)
        if section.device == "cpu":
            cpu.prepare()
        model = load_model(
            config.model.path,
            cache_path=config.model.cache_path,
            dtype=config.model.dtype,
            weights=config.model.weights,
            device=section.device,
        )
        return cls.around(model, config, role)

    @classmethod
    def around(cls, model: Model, config: SluiceConfig, role: Role) -> Runner:
        """Allocate the pools of one role for a loaded model. Raises ConfigError."""
        section = config.role(role)
        max_model_len = config.model.max_model_len or model.max_model_len
        if max_model_len > model.max_model_len:
            raise ConfigError(
                f"model.max_model_len is {max_model_len}, expected at most {model.max_model_len}, "
                "which is what the checkpoint was made for; lower it or leave it out"
            )
        prefills = role is Role.PREFILL
        max_step_tokens = section.max_batch_tokens if prefills else section.max_running_requests
        if not prefills:  # short prompts, and those that have outgrown every prefill node
            max_step_tokens += section.max_batch_tokens
        return cls(
            model,
            section,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            grammars=Grammars(
                config.model.path,
                vocab_size=model.vocab_size,
                eos_token_ids=eos_token_ids(
                    config.model.path, model.vocab_size, readable_tokenizer(config.model.path)
                ),
            ),
            resumes=prefills,
        )

    def describe(
        self, *, node_id: str, role: Role, host: str, agent: bytes, max_batch_tokens: int
    ) -> NodeInfo:
        """The node around this runner as peers and router see it; a new incarnation each time."""
        return NodeInfo(
            node_id=node_id,
            incarnation=uuid.uuid4().hex,
            role=role,
            host=host,
            fingerprint=self.model.fingerprint,
            specs=self.specs,
            max_model_len=self.max_model_len,
            max_running_requests=self.manager.max_requests,
            max_batch_tokens=max_batch_tokens,
            num_pages=self.manager.num_pages,
            agent=agent,
        )

    def take(self, request: GenerateRequest, grant_id: str) -> Request:
        """The request as this node will work on it. Any thread; a schema may take its time.

        Raises InvalidRequest for what the node cannot do: past this, no number and no schema can
        raise where a step computes.
        """
        token_ids = checked_tokens(
            request, vocab_size=self.vocab_size, max_model_len=self.max_model_len
        )
        state = Request.of(request, grant_id, self._matcher_for(request.sampling), token_ids)
        if state.matcher is not None:
            state.matcher.prepare(request.emitted_token_ids)
        return state

    def _matcher_for(self, sampling: SamplingParams) -> Matcher | None:
        if self._grammars is not None:
            return self._grammars.matcher_for(sampling)
        if sampling.json_schema or sampling.grammar:
            raise InvalidRequest("response_format: not served here", param="response_format")
        return None

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Carry out copies that the manager asks for, in every pool of their tables."""
        for copy in copies:
            for spec in self.specs:
                if spec.table == copy.table:
                    self.pools[spec.name].copy_page(copy.source, copy.target)

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk], *, all_logits: bool = False) -> torch.Tensor:
        """Compute the chunks; returns fp32 logits [num_requests, vocab] of their last tokens.

        all_logits: of all tokens, [num_tokens, vocab]; for a step of few, as that is much memory.
        The pages for [start, end) of every chunk must be held. The logits may be overwritten by the
        next step.
        """
        if not all_logits and all(end - start == 1 for _, start, end in chunks):
            return self.decode_steps.run(chunks)
        inputs = build_inputs(chunks, self.manager, self.device)
        return self.model.forward(inputs, self.pools, all_logits=all_logits)


def role_specs(specs: Sequence[PoolSpec], role: RoleConfig) -> tuple[PoolSpec, ...]:
    """The model's pools in a role's own layout. Raises ConfigError naming pool and field."""
    known = [spec.name for spec in specs]
    for name in role.pools:
        if name not in known:
            raise ConfigError(
                f"pools.{name}: the model has no such pool; it has {', '.join(known)}"
            )
    return tuple(_laid_out(spec, role) for spec in specs)


def _laid_out(spec: PoolSpec, role: RoleConfig) -> PoolSpec:
    changes: dict[str, Any] = {"device": role.device}
    if (layout := role.pools.get(spec.name)) is not None:
        changes |= layout.model_dump(exclude_none=True)
    try:
        stored = spec.stored_as(changes.pop("dtype", spec.dtype))
        return dataclasses.replace(stored, **changes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
