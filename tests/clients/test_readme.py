"""README's table of clients is the one that was measured last."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("run_clients", Path(__file__).with_name("run.py"))
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)


def test_the_table_is_current():
    rows = run.read_rows()
    assert [row["client"] for row in rows] == list(run.CLIENTS)
    assert run.with_table(run.README.read_text(), rows) == run.README.read_text(), (
        "README's table of clients is not that of benchmarks/results/clients.csv; "
        "run tests/clients/run.py --readme"
    )


def test_a_failure_shows():
    failed = dict.fromkeys(run.COLUMNS, "ok") | {"client": "c", "version": "1", "tools": "no call"}
    assert run.failures(failed) == ["tools: no call"]
    assert "fails" in run.readme_table([failed])
    text = f"a{run.BEGIN}old{run.END}b"
    assert run.with_table(text, [failed]).startswith(f"a{run.BEGIN}\n| Client")
    assert "old" not in run.with_table(text, [failed])
