"""The training itself: documents grow from 256 to 2,048 tokens, and the top-k comes in half-way."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import DeepseekV4ForCausalLM

from sluice.benchmarks.training.documents import ANSWER, LISTED, PROSE, DocumentMaker, Kind
from sluice.benchmarks.training.forward import Rows, TrainingOutput, training_forward
from sluice.benchmarks.training.optimizer import Optimizers, rate_factor

TOP_K_FROM = 0.5  # of the training: from here on, half of the steps see the top-k only
SHORTER_SHARE = 0.25  # of the steps take an earlier stage's documents, lest it be forgotten
INDEXER_SHARE = 0.5  # of the indexer's loss in the sum
MIN_INDEXER_WEIGHT = 0.05  # of queries whose next token does not count
MAX_GRADIENT_NORM = 1.0
BALANCE_RATE = 2e-3  # of the routers' biases towards even loads
RECORD_EVERY_STEPS = 25
MEMORY = 0.95  # of the running averages


@dataclass(frozen=True)
class Stage:
    """A part of the training, until a fraction of it is done: documents, and what kinds."""

    until: float
    num_tokens: int  # of each document
    batch_size: int
    mixture: Mapping[Kind, float]


_Make = DocumentMaker
STAGES = (
    Stage(0.40, 256, 10, {
        _Make.prose: 0.18, _Make.dialogues: 0.06, _Make.copy: 0.06, _Make.periodic: 0.12,
        _Make.repeated_facts: 0.33, _Make.listed_facts: 0.10, _Make.needles: 0.15,
    }),
    Stage(0.64, 512, 5, {
        _Make.prose: 0.22, _Make.dialogues: 0.12, _Make.copy: 0.03,
        _Make.repeated_facts: 0.08, _Make.listed_facts: 0.15, _Make.needles: 0.40,
    }),
    Stage(0.86, 1024, 3, {
        _Make.prose: 0.25, _Make.dialogues: 0.15, _Make.copy: 0.02,
        _Make.listed_facts: 0.08, _Make.needles: 0.50,
    }),
    Stage(1.00, 2048, 2, {
        _Make.prose: 0.20, _Make.dialogues: 0.15,
        _Make.listed_facts: 0.05, _Make.needles: 0.60,
    }),
)  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """How long to train: a number of steps, or of seconds, of which the last step may exceed it."""

    amount: float
    unit: Literal["steps", "s"]

    def used(self, num_steps: int, started: float) -> float:
        return num_steps if self.unit == "steps" else time.monotonic() - started


@dataclass
class Progress:
    """How far a training is, and running averages of how well it goes."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    averages: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)

    def note(self, **values: Tensor | None) -> None:
        for name, value in values.items():
            if value is not None:
                new = float(value.detach())
                old = self.averages.get(name, new)
                self.averages[name] = MEMORY * old + (1 - MEMORY) * new

    def record(self) -> None:
        rounded = {name: round(value, 4) for name, value in self.averages.items()}
        self.history.append({"step": self.num_steps, "seconds": round(self.seconds, 1), **rounded})


def train(
    model: DeepseekV4ForCausalLM,
    documents: DocumentMaker,
    budget: Budget,
    *,
    seed: int,
    stages: Sequence[Stage] = STAGES,
) -> Progress:
    """Train the model in place until the budget is used up. With steps, equal seeds train alike."""
    optimizers, rng, progress = Optimizers(model), random.Random(seed), Progress()
    started = time.monotonic()
    model.train()
    with tqdm(total=budget.amount, unit=budget.unit, bar_format=_BAR) as bar:
        while (used := budget.used(progress.num_steps, started)) < budget.amount:
            done = used / budget.amount
            stage = _stage(stages, done, rng)
            rows = Rows.TOP_K if done >= TOP_K_FROM and rng.random() < 0.5 else Rows.ALL
            batch = documents.batch(stage.batch_size, stage.num_tokens, stage.mixture)
            factor = rate_factor(progress.num_steps, done)
            _step(model, optimizers, batch, rows, factor, progress)
            progress.seconds = time.monotonic() - started
            if progress.num_steps % RECORD_EVERY_STEPS == 0:
                progress.record()
            bar.set_postfix(progress.averages, refresh=False)
            bar.update(min(budget.used(progress.num_steps, started), budget.amount) - bar.n)
    progress.record()
    return progress


_BAR = "{l_bar}{bar}| {n:.0f}/{total:.0f} {unit} [{elapsed}{postfix}]"


def _stage(stages: Sequence[Stage], done: float, rng: random.Random) -> Stage:
    """The stage whose turn it is, or sometimes an earlier one."""
    number = next(number for number, stage in enumerate(stages) if done < stage.until)
    if number and rng.random() < SHORTER_SHARE:
        number = rng.randrange(number)
    return stages[number]


def _step(
    model: DeepseekV4ForCausalLM,
    optimizers: Optimizers,
    batch: tuple[Tensor, Tensor],
    rows: Rows,
    factor: float,
    progress: Progress,
) -> None:
    """One batch: loss, gradients, new weights. batch: token ids and weights, [B, S] each."""
    token_ids, weights = batch
    counted = weights[:, 1:]  # of predicting the token behind
    asking = F.pad(counted, (0, 1)).clamp_min(MIN_INDEXER_WEIGHT)
    with torch.autocast("cpu", torch.bfloat16):
        output = training_forward(model, token_ids, asking, attend_to=rows)
    logits = output.logits[:, :-1].float()
    losses = F.cross_entropy(logits.transpose(1, 2), token_ids[:, 1:], reduction="none")  # [B, S-1]
    loss = (losses * counted).sum() / counted.sum()
    if output.indexer_loss is not None:
        loss = loss + INDEXER_SHARE * output.indexer_loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizers.step(factor)
    _balance(model, output, factor)
    progress.num_steps += 1
    progress.num_tokens += token_ids.numel()
    prose, answers = counted == PROSE, (counted == LISTED) | (counted == ANSWER)
    right = (logits.argmax(-1) == token_ids[:, 1:]).float()
    progress.note(
        text_loss=_mean(losses, prose),
        recall_loss=_mean(losses, answers),
        recall=_mean(right, answers),
        indexer_loss=output.indexer_loss,
    )


def _mean(values: Tensor, where: Tensor) -> Tensor | None:
    """The mean of the chosen values; None if there are none."""
    return values[where].mean() if where.any() else None


@torch.no_grad()
def _balance(model: DeepseekV4ForCausalLM, output: TrainingOutput, factor: float) -> None:
    """Make experts with little to do likelier choices, as DeepSeek does instead of a loss."""
    routers: list[Any] = [layer.mlp.gate for layer in model.model.layers if not layer.mlp.is_hash]
    for router, load in zip(routers, output.expert_loads, strict=True):
        lacking = load.float().mean() - load
        router.e_score_correction_bias += BALANCE_RATE * factor * lacking.sign()
