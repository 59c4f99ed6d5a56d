"""lm-eval: a task that generates, and one whose choices are compared by their log-probabilities."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from common import API, MODEL, tell
from measuring import MODEL_FOLDER, run

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {questions}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
GENERATION = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: [" calm", " wild"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


def evaluate(kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        questions = folder / "questions.jsonl"
        lines = [{"question": f"How was the sea {i}?", "answer": "calm"} for i in range(3)]
        questions.write_text("\n".join(map(json.dumps, lines)))
        task = TASK.format(name="sea", questions=questions) + kind
        (folder / "sea.yaml").write_text(task)
        run(
            *("lm-eval", "run", "--model", "local-completions", "--tasks", "sea"),
            "--model_args",
            f"base_url={API}/completions,model={MODEL},tokenizer={MODEL_FOLDER},"
            "tokenizer_backend=huggingface,num_concurrent=2,max_retries=1",
            *("--include_path", name, "--output_path", str(folder / "out")),
            HF_DATASETS_OFFLINE="1",
            HF_DATASETS_CACHE=str(folder / "cache"),
        )
        [report] = (folder / "out").rglob("results*.json")
        assert "sea" in json.loads(report.read_text())["results"]


tell({"run": lambda: evaluate(GENERATION), "choose": lambda: evaluate(CHOICE)})
