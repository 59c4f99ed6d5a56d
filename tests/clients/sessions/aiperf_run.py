"""AIPerf: a small benchmark run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from common import MODEL, URL, tell
from measuring import MODEL_FOLDER, run

NUM_REQUESTS = 8


def benchmark() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(
            *("aiperf", "profile", "--model", MODEL, "--url", URL, "--tokenizer", MODEL_FOLDER),
            *("--endpoint-type", "chat", "--streaming", "--ui", "simple"),
            *("--request-count", str(NUM_REQUESTS), "--concurrency", "2"),
            *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"),
            *("--artifact-dir", folder),
        )
        report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    assert report["completed_request_count"]["avg"] == NUM_REQUESTS, report["error_summary"]
    assert not report["error_summary"], report["error_summary"]


tell({"run": benchmark})
