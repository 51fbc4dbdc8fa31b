import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.records.jsonl import BadLineError, write_jsonl
from rlhf.run.metrics import append_metrics, forget_metrics_after, progress, read_metrics

ROWS = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}, {"step": 3, "loss": 0.125}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """metrics.jsonl after three steps."""
    path = tmp_path / "metrics.jsonl"
    for row in ROWS:
        append_metrics(path, row)
    return path


def test_rows_come_back_in_order(file: Path) -> None:
    assert read_metrics(file) == ROWS


def test_only_a_line_feed_ends_a_row(tmp_path: Path) -> None:
    rows = [{"answer": "one\u2028two\u2029three\x85four"}, {"answer": "b"}]
    write_jsonl(tmp_path / "judge.jsonl", rows)
    assert read_metrics(tmp_path / "judge.jsonl") == rows
    append_metrics(tmp_path / "judge.jsonl", rows[0])
    assert read_metrics(tmp_path / "judge.jsonl") == [*rows, rows[0]]


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []
    forget_metrics_after(tmp_path / "none.jsonl", 0)
    assert list(tmp_path.iterdir()) == []


def test_steps_after_the_checkpoint_are_forgotten(file: Path) -> None:
    forget_metrics_after(file, 2)
    assert read_metrics(file) == ROWS[:2]
    append_metrics(file, {"step": 3, "loss": 9.0})
    assert read_metrics(file) == [*ROWS[:2], {"step": 3, "loss": 9.0}]


def test_a_line_cut_short_by_a_kill_does_not_stop_a_resumed_run(file: Path) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write('{"step": 4, "lo')
    assert read_metrics(file) == ROWS
    forget_metrics_after(file, 3)
    append_metrics(file, {"step": 4, "loss": 0.0})
    assert read_metrics(file) == [*ROWS, {"step": 4, "loss": 0.0}]


def test_a_broken_line_in_the_middle_is_named(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace('{"step": 2', "step 2")
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadLineError, match=r"metrics\.jsonl:2: not valid JSON"):
        read_metrics(file)


def test_only_the_main_process_writes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    append_metrics(file, {"step": 4})
    forget_metrics_after(file, 0)
    assert read_metrics(file) == ROWS


@pytest.mark.parametrize(("rank", "seen"), [("0", True), ("1", False)])
def test_progress_goes_to_stderr_of_the_main_process(rank: str, seen: bool) -> None:
    code = (
        f"import os; os.environ['RANK'] = '{rank}'\n"
        "from rlhf.run.metrics import progress\n"
        "with progress('ppo', total=4, done=1) as bar:\n"
        "    bar.advance(2)\n"
        "    bar.show('reward +1.00')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert all((words in done.stderr) is seen for words in ("ppo", "3/4", "reward +1.00"))


def test_progress_lets_failures_through() -> None:
    with pytest.raises(ValueError, match="oh"), progress("work", total=2):
        raise ValueError("oh")
