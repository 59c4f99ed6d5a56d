"""What a trained model can do: recall by distance, and the loss on prose it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from sluice.benchmarks.training.documents import DocumentMaker, RecallTask
from sluice.benchmarks.training.forward import Rows, training_forward
from sluice.model.tokenizer import PAD_TOKEN_ID

DISTANCES = (64, 256, 512, 1024, 2048)
PROSE_TOKENS = 512
BATCH_SIZE = 8

Item = TypeVar("Item")


@dataclass(frozen=True)
class Measures:
    """recall: distance in tokens -> share of codes answered right. text_loss: in nats a token."""

    recall: Mapping[int, float]
    text_loss: float


def measure(
    model: DeepseekV4ForCausalLM,
    documents: DocumentMaker,
    *,
    distances: Sequence[int] = DISTANCES,
    num_documents: int = 32,
) -> Measures:
    """Measure a model with the top-k that serving uses, in its parameters' dtype."""
    tasks = {
        distance: [documents.recall_task(distance) for _ in range(num_documents)]
        for distance in distances
    }
    prose = [documents.held_out_prose(PROSE_TOKENS) for _ in range(num_documents)]
    return Measures(
        recall={distance: recall(model, tasks[distance]) for distance in distances},
        text_loss=text_loss(model, prose),
    )


def recall(model: DeepseekV4ForCausalLM, tasks: Sequence[RecallTask]) -> float:
    """The share of tasks whose code greedy decoding would give, all of its tokens.

    Decided in one pass: a greedy answer is right just if every token of the right one is the most
    likely after those before it.
    """
    right = 0
    for batch in _batches(tasks):
        best = _logits(model, [[*task.prompt_ids, *task.code_ids] for task in batch]).argmax(-1)
        for row, task in zip(best.tolist(), batch, strict=True):
            start = len(task.prompt_ids) - 1
            right += row[start : start + len(task.code_ids)] == task.code_ids
    return right / len(tasks)


def text_loss(model: DeepseekV4ForCausalLM, prose: Sequence[list[int]]) -> float:
    """Mean loss of predicting each token of texts of equal length, in nats."""
    losses = []
    for batch in _batches(prose):
        logits = _logits(model, batch)[:, :-1]
        target = torch.tensor(batch)[:, 1:]
        losses.append(F.cross_entropy(logits.transpose(1, 2), target, reduction="none").mean(1))
    return float(torch.cat(losses).mean())


@torch.no_grad()
def _logits(model: DeepseekV4ForCausalLM, token_ids: Sequence[list[int]]) -> Tensor:
    """fp32 logits [B, S, vocab] of texts, the shorter ones padded behind."""
    longest = max(map(len, token_ids))
    padded = torch.tensor([ids + [PAD_TOKEN_ID] * (longest - len(ids)) for ids in token_ids])
    output = training_forward(model, padded, torch.ones(padded.shape), attend_to=Rows.TOP_K)
    return output.logits.float()


def _batches(items: Sequence[Item]) -> list[Sequence[Item]]:
    return [items[start : start + BATCH_SIZE] for start in range(0, len(items), BATCH_SIZE)]
