"""The training of tiny-v4: its documents, its forward pass, its result."""

import dataclasses
import gzip
import json
import random
import string
import struct
import zlib

import pytest
import torch
from tokenizers import Tokenizer
from transformers import DeepseekV4ForCausalLM
from transformers.utils import logging

from sluice.benchmarks.training.corpus import (
    HELD_OUT_SHARE,
    NAMES,
    Corpus,
    Phrases,
    tokenizer_texts,
)
from sluice.benchmarks.training.documents import ANSWER, DocumentMaker
from sluice.benchmarks.training.forward import Rows, training_forward
from sluice.benchmarks.training.loop import STAGES, Budget
from sluice.benchmarks.training.measures import recall
from sluice.benchmarks.training.model import save_checkpoint, starting_model
from sluice.benchmarks.training.optimizer import orthogonalized
from sluice.benchmarks.training.texts import (
    BIBLE,
    DICTIONARIES,
    NOVELS,
    packaged_texts,
    shipped_texts,
)
from sluice.benchmarks.training.train_tiny_v4 import SHIPPED, make_trained_checkpoint
from sluice.cache.pools import allocate_pools
from sluice.cache.spec import tables_of
from sluice.deploy.commands.recall import recall_task
from sluice.model.common.inputs import ForwardInputs
from sluice.model.make_checkpoint import TINY
from sluice.model.registry import load_model
from sluice.model.tokenizer import write_tokenizer
from sluice.model.v4.config import read_config
from sluice.protocol.messages import ConfigError

CONFIG = dataclasses.replace(TINY, vocab_size=2048)
# An untrained indexer scores many rows exactly 0, and which of those are chosen is open.
ALL_ROWS = dataclasses.replace(CONFIG, index_topk=1024)
SHORT = tuple(dataclasses.replace(stage, num_tokens=256, batch_size=2) for stage in STAGES)
TEXTS = dataclasses.replace(
    shipped_texts(), dialogues=(("Define adage.", "Boned wisdom for weak teeth."),)
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.fixture(scope="module")
def documents(tokenizer):
    return DocumentMaker(Corpus.of(TEXTS, tokenizer), Phrases(tokenizer), 2048, seed=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint after three steps of a much smaller model, and its metrics."""
    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("trained")
    metrics = make_trained_checkpoint(
        folder,
        TEXTS,
        Budget(3, "steps"),
        config=ALL_ROWS,
        stages=SHORT,
        distances=(64, 200),
        num_documents=2,
    )
    return folder, metrics


def one_shot(model, token_ids):
    """Our model's logits of every token, computed in one step over fresh pools."""
    tables = tables_of(model.specs)
    pages = {table: table.pages(0, len(token_ids)) for table in tables}
    assert all(held.start == 0 for held in pages.values())
    pools = allocate_pools(model.specs, {table: len(held) for table, held in pages.items()})
    count = torch.tensor([len(token_ids)])
    inputs = ForwardInputs(
        token_ids=torch.tensor(token_ids),
        positions=torch.arange(len(token_ids)),
        request_index=torch.zeros(len(token_ids), dtype=torch.int64),
        query_start=torch.cat([torch.zeros(1, dtype=torch.int64), count]),
        num_computed=torch.tensor([0]),
        num_history=torch.tensor([0]),
        page_tables={table: 1 + torch.arange(len(held))[None] for table, held in pages.items()},
    )
    return model.forward(inputs, pools, all_logits=True)


@torch.no_grad()
def reference_logits(model, token_ids):
    return model(input_ids=token_ids, use_cache=False).logits


def test_what_training_writes_serves_with_the_logits_of_transformers(trained, documents):
    folder, _ = trained
    token_ids = documents.recall_task(200).prompt_ids
    reference = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference_logits(reference, torch.tensor([token_ids]))[0]
    logits = one_shot(load_model(folder), token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_the_metrics_tell_recall_by_distance_and_text_loss(trained):
    folder, returned = trained
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert set(metrics["measured"]["recall_by_distance_tokens"]) == {"64", "200"}
    assert 5 < metrics["measured"]["text_loss"] < 10  # untrained: log(2048) = 7.6
    assert metrics["training"]["num_steps"] == returned["training"]["num_steps"] == 3


def test_a_written_checkpoint_has_the_tensors_of_the_shipped_one(tmp_path):
    from safetensors import safe_open

    save_checkpoint(starting_model(read_config(SHIPPED), seed=0), tmp_path)
    headers = []
    for folder in (tmp_path, SHIPPED):
        with safe_open(folder / "model.safetensors", "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            headers.append({k: (v.get_shape(), v.get_dtype()) for k, v in slices.items()})
    assert headers[0] == headers[1]
    configs = [json.loads((f / "config.json").read_text()) for f in (tmp_path, SHIPPED)]
    assert configs[0] == configs[1]


def test_equal_seeds_start_and_train_alike(tokenizer):
    one, other = starting_model(CONFIG, seed=5), starting_model(CONFIG, seed=5)
    state = other.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())
    corpus = Corpus.of(TEXTS, tokenizer)
    batches = [
        DocumentMaker(corpus, Phrases(tokenizer), 2048, seed=9).batch(4, 256, STAGES[0].mixture)
        for _ in range(2)
    ]
    assert torch.equal(batches[0][0], batches[1][0])


@pytest.mark.parametrize("num_tokens", [15, 64, 131])
@pytest.mark.parametrize("attend_to", Rows)
def test_the_training_forward_has_the_loss_of_the_reference(num_tokens, attend_to):
    model = starting_model(CONFIG if attend_to is Rows.TOP_K else ALL_ROWS, seed=1)
    generator = torch.Generator().manual_seed(num_tokens)
    for name, parameter in model.named_parameters():
        if "indexer" in name and parameter.ndim == 2:  # no two scores are equal then
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    token_ids = torch.randint(7, 2048, (2, num_tokens), generator=generator)
    with torch.no_grad():
        weights = torch.ones(token_ids.shape)
        logits = training_forward(model, token_ids, weights, attend_to=attend_to).logits
    expected = reference_logits(model, token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    losses = [
        torch.nn.functional.cross_entropy(x[:, :-1].transpose(1, 2), token_ids[:, 1:])
        for x in (logits, expected)
    ]
    assert abs(losses[0] - losses[1]) < 1e-4


def test_the_training_forward_has_the_gradients_of_the_reference():
    model = starting_model(ALL_ROWS, seed=6)
    token_ids = torch.arange(200, 296)[None]
    target = torch.arange(300, 396)
    output = training_forward(model, token_ids, torch.ones(1, 96), attend_to=Rows.ALL)
    expected = model(input_ids=token_ids, use_cache=False).logits
    learning = [p for name, p in model.named_parameters() if ".indexer." not in name]
    for one, other in zip(
        *(
            torch.autograd.grad(torch.nn.functional.cross_entropy(x[0], target), learning)
            for x in (output.logits, expected)
        ),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


def test_only_the_indexer_learns_from_its_loss():
    model = starting_model(CONFIG, seed=2)
    token_ids = torch.arange(100, 196)[None]
    output = training_forward(model, token_ids, torch.ones(1, 96), attend_to=Rows.ALL)
    output.indexer_loss.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert moved
    assert all(".indexer." in name for name in moved)


@pytest.mark.parametrize("distance", [40, 64, 200, 513, 1500])
def test_a_recall_task_states_its_code_at_the_distance_it_says(distance, documents, tokenizer):
    task = documents.recall_task(distance)
    period = len(task.prompt_ids) - distance - 1
    start = period - len(task.code_ids)
    assert task.prompt_ids[start:period] == task.code_ids
    name = tokenizer.decode(task.prompt_ids[-1:])
    assert tokenizer.decode(task.prompt_ids[: period + 1]).endswith(
        f" The secret code:{name}{tokenizer.decode(task.code_ids)}."
    )
    assert tokenizer.decode(task.prompt_ids).count(f" code:{name} ") == 1


def test_a_distance_that_cannot_hold_the_question_is_refused(documents):
    with pytest.raises(ValueError, match="distance is 5, the question alone has"):
        documents.recall_task(5)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: str(stage.num_tokens))
def test_every_kind_of_document_has_the_length_that_was_asked_for(stage, documents):
    for kind in stage.mixture:
        for _ in range(20):
            document = kind(documents, stage.num_tokens)
            lengths = (len(document.token_ids), len(document.weights))
            assert lengths == (stage.num_tokens, stage.num_tokens), kind


@pytest.mark.parametrize("num_tokens", [256, 512, 2048])
def test_what_needles_ask_for_stands_before(num_tokens, documents, tokenizer):
    document = documents.needles(num_tokens)
    text = tokenizer.decode(document.token_ids)
    answers = tokenizer.decode(
        [i for i, w in zip(document.token_ids, document.weights, strict=True) if w == ANSWER]
    ).split()
    assert answers
    assert all(text.index(f" {code}.") < text.index("What is the secret") for code in answers)


def test_training_and_demo_ask_in_the_same_words(tokenizer):
    task = recall_task(random.Random(1), words_before=5, words_after=9, num_distractors=0)
    phrases, name = Phrases(tokenizer), task.answer_start.split()[-1]
    frame, code, end = phrases.fact(name, phrases.encode(f" {task.code}"))
    said = tokenizer.encode(f" {task.fact}").ids
    assert [*frame, *code, *end] == said
    question = phrases.exchange(name, code).question
    asked = f"<｜User｜>{task.question}<｜Assistant｜>{task.answer_start}"
    assert question == tokenizer.encode(asked).ids


def test_names_and_two_digits_are_single_tokens_of_the_shipped_tokenizer(tokenizer):
    words = [f" {name}" for name in NAMES] + [f" {n:02d}" for n in range(100)]
    assert {len(tokenizer.encode(word).ids) for word in words} == {1}


def test_the_end_of_each_book_is_held_out(tokenizer):
    corpus = Corpus.of(TEXTS, tokenizer)
    book = TEXTS.books[0]
    assert book.endswith(tokenizer.decode(corpus.held_out[0]))
    share = len(tokenizer.decode(corpus.held_out[0])) / len(book)
    assert share == pytest.approx(HELD_OUT_SHARE, rel=0.01)


def test_the_shipped_checkpoint_recalls_what_an_untrained_one_does_not(documents):
    tasks = [documents.recall_task(128) for _ in range(4)]
    shipped = DeepseekV4ForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    untrained = starting_model(read_config(SHIPPED), seed=0)
    assert recall(shipped, tasks) >= 0.75
    assert recall(untrained, tasks) == 0


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (3, 32, 40)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    values = torch.linalg.svdvals(orthogonalized(matrix))
    assert values.min() > 0.4
    assert values.max() < 1.3


PLACES = string.ascii_uppercase + string.ascii_lowercase  # dictd's digits


def put(root, path, content):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)


def test_texts_are_read_from_where_packages_install_them(tmp_path):
    lines = (b"CHAPTER 1", b"", b"It was _so_,", b"she said.")
    vector = b"X\n..." + b"".join(struct.pack(">Ii", 0x40009, len(x)) + x for x in lines)
    record = struct.pack(">I", len(vector)) + zlib.compress(vector)
    put(tmp_path, NOVELS, record + record)
    verse = b"In the beginning<note n='1'>or: at first</note> was &amp; is. " * 99
    block = zlib.compress(b"<title>Book</title>" + verse)
    put(tmp_path, BIBLE / "nt.bzs", struct.pack("<III", 2, len(block), 0))
    put(tmp_path, BIBLE / "nt.bzz", b"--" + block)
    article = b"ADAGE, n.  Boned {wisdom}\nfor weak teeth.\n"
    put(tmp_path, DICTIONARIES / "devil.index", f"adage\tBA\t{PLACES[len(article)]}".encode())
    put(tmp_path, DICTIONARIES / "devil.dict.dz", gzip.compress(b"-" * 64 + article))
    texts = packaged_texts(tmp_path)
    assert texts.books[:2] == ("CHAPTER 1\nIt was so, she said.",) * 2
    assert texts.books[2].startswith("In the beginning was & is. In the")
    assert texts.dialogues == (("Define adage.", "Boned wisdom for weak teeth."),)


def test_a_new_tokenizer_makes_names_and_codes_as_short_as_the_shipped_one(tmp_path):
    write_tokenizer(tmp_path, tokenizer_texts(TEXTS, num_repeats=300), CONFIG)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert {len(tokenizer.encode(f" {name}").ids) for name in NAMES} == {1}
    assert {len(tokenizer.encode(f" {n:04d}").ids) for n in range(0, 10_000, 37)} == {2}


def test_a_folder_without_books_is_refused_with_the_packages_to_get(tmp_path):
    with pytest.raises(ConfigError, match="apt-get download r-cran-janeaustenr"):
        packaged_texts(tmp_path)


def test_a_broken_package_is_named(tmp_path):
    (tmp_path / "dict-devil_1.0_all.deb").write_text("not an archive")
    with pytest.raises(ConfigError, match=r"dict-devil_1\.0_all\.deb"):
        packaged_texts(tmp_path)
