"""GuideLLM: a small benchmark run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from common import MODEL, URL, tell
from measuring import MODEL_FOLDER, run

NUM_REQUESTS = 5


def benchmark() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        run(
            *("guidellm", "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={URL},model={MODEL}"),
            *("--profile", "kind=synchronous"),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--tokenizer", f"kind=hf_auto,model={MODEL_FOLDER}"),
            *("--output", f"kind=json,path={report}"),
        )
        [measured] = json.loads(report.read_text())["benchmarks"]
    outcomes = {how: len(measured["requests"][how]) for how in ("successful", "errored")}
    assert outcomes == {"successful": NUM_REQUESTS, "errored": 0}, outcomes


tell({"run": benchmark})
