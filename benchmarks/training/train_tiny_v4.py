"""Train a checkpoint like the shipped deploy/models/tiny-v4, on a CPU in a quarter of an hour.

    python -m sluice.benchmarks.training.train_tiny_v4 OUT --minutes 15 --texts DEBS

writes config, weights, tokenizer and metrics.json into OUT. The shipped checkpoint took 1,069 steps
over 3.0 million tokens. By minutes, a rerun repeats the method and not the bits: how far it comes
depends on the machine. By steps it repeats the documents and their order too.
The parts: training_texts (sources and licences), training_documents (tasks), training_forward,
training_model, training_optimizer, training_loop, training_measures.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer
from transformers import DeepseekV4ForCausalLM
from transformers.utils import logging

from sluice.benchmarks.training.corpus import Corpus, Phrases, tokenizer_texts
from sluice.benchmarks.training.documents import DocumentMaker
from sluice.benchmarks.training.loop import STAGES, Budget, Progress, Stage, train
from sluice.benchmarks.training.measures import DISTANCES, Measures, measure
from sluice.benchmarks.training.model import save_checkpoint, starting_model
from sluice.benchmarks.training.texts import Texts, packaged_texts, shipped_texts
from sluice.model.tokenizer import write_tokenizer
from sluice.model.v4.config import DeepseekV4Config, read_config
from sluice.protocol.messages import ConfigError

SHIPPED = Path(__file__).parents[2] / "deploy" / "models" / "tiny-v4"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MEASURING_SEED = 1_000_003  # added to the seed: other documents than those trained on


def main(
    out_folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    minutes: Annotated[float | None, typer.Option(help="Train for so long.", min=0.01)] = None,
    steps: Annotated[int | None, typer.Option(help="Train so many steps.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the start and the documents.")] = 0,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the .deb files of training_texts, or a root they are installed "
            "under. [default: the chapters that the project ships]",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    new_tokenizer: Annotated[
        bool, typer.Option(help="Train a tokenizer on the texts, instead of the shipped one.")
    ] = False,
    num_documents: Annotated[
        int, typer.Option(help="Measured at each distance, after training.", min=1)
    ] = 32,
) -> None:
    """Train a tiny DeepSeek-V4 checkpoint and measure it."""
    if (minutes is None) == (steps is None):
        raise typer.BadParameter("give one of --minutes and --steps")
    budget = Budget(steps, "steps") if steps else Budget(60 * (minutes or 0.0), "s")
    try:
        sources = packaged_texts(texts) if texts else shipped_texts()
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    logging.disable_progress_bar()
    metrics = make_trained_checkpoint(
        out_folder,
        sources,
        budget,
        seed=seed,
        new_tokenizer=new_tokenizer,
        num_documents=num_documents,
    )
    typer.echo(json.dumps(metrics["measured"], indent=1))
    typer.echo(f"written: {out_folder}")


def make_trained_checkpoint(
    folder: Path,
    texts: Texts,
    budget: Budget,
    *,
    config: DeepseekV4Config | None = None,
    seed: int = 0,
    new_tokenizer: bool = False,
    stages: Sequence[Stage] = STAGES,
    distances: tuple[int, ...] = DISTANCES,
    num_documents: int = 32,
) -> dict[str, Any]:
    """Train, write the checkpoint into `folder`, measure what was written; returns the metrics.

    config: the shipped checkpoint's unless given.
    """
    config = config or read_config(SHIPPED)
    folder.mkdir(parents=True, exist_ok=True)
    _put_tokenizer(folder, texts, config, new_tokenizer=new_tokenizer)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    corpus, phrases = Corpus.of(texts, tokenizer), Phrases(tokenizer)
    documents = DocumentMaker(corpus, phrases, config.vocab_size, seed)
    model = starting_model(config, seed)
    progress = train(model, documents, budget, seed=seed, stages=stages)
    save_checkpoint(model, folder)
    written = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    unseen = DocumentMaker(corpus, phrases, config.vocab_size, seed + MEASURING_SEED)
    measures = measure(written, unseen, distances=distances, num_documents=num_documents)
    metrics = _metrics(written, progress, measures, seed=seed, num_documents=num_documents)
    text = json.dumps(metrics, indent=1) + "\n"
    (folder / "metrics.json").write_text(text, encoding="utf-8")
    return metrics


def _put_tokenizer(
    folder: Path, texts: Texts, config: DeepseekV4Config, *, new_tokenizer: bool
) -> None:
    if new_tokenizer:
        write_tokenizer(folder, tokenizer_texts(texts), config)
        return
    for name in TOKENIZER_FILES:
        shutil.copyfile(SHIPPED / name, folder / name)


def _metrics(
    model: DeepseekV4ForCausalLM,
    progress: Progress,
    measures: Measures,
    *,
    seed: int,
    num_documents: int,
) -> dict[str, Any]:
    """What metrics.json holds: the training, and what its result measures to."""
    return {
        "num_parameters": model.num_parameters(),
        "measured": {
            "what": "the written bf16 weights, fp32 compute, held-out prose, 3 distractors",
            "num_documents_per_distance": num_documents,
            "recall_by_distance_tokens": measures.recall,
            "text_loss": round(measures.text_loss, 4),
            "text_perplexity": round(math.exp(measures.text_loss), 2),
        },
        "training": {
            "seed": seed,
            "num_steps": progress.num_steps,
            "num_tokens": progress.num_tokens,
            "minutes": round(progress.seconds / 60, 2),
            "history": progress.history,
        },
    }


if __name__ == "__main__":
    typer.run(main)
