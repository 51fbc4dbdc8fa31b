"""People compare the answers of an evaluation blind, and their votes come back into its report."""

import json
import shutil
from pathlib import Path

import pytest

from labeling_app.queue import Submission, TaskQueue
from labeling_app.store import Store
from rlhf.cli import main
from rlhf.jsonl import write_jsonl
from rlhf.ranked import read_ranked_file
from rlhf.rundir import RunDir


@pytest.fixture
def run(done: RunDir, tmp_path: Path) -> RunDir:
    """A copy of an evaluation; its four prompts have one pair each."""
    shutil.copytree(done.path, tmp_path / "evaluate")
    return RunDir(tmp_path / "evaluate")


def evaluate(run: RunDir, *arguments: str) -> int:
    return main(["evaluate", "--out", str(run.path), "--json", *arguments])


def vote(db: Path, new: set[str], *, num_votes: int) -> None:
    """Somebody prefers the new answer where they see one."""
    with Store(db) as store:
        queue = TaskQueue(store)
        queue.add_annotator("ann")
        for number in range(num_votes):
            task = queue.next_task("ann")
            assert task is not None
            best = next(place for place, id_ in enumerate(task.shown) if id_ in new)
            tiers = ((best,), (1 - best,))
            queue.submit("ann", Submission(id=f"v{number}", task_id=task.id, tiers=tiers))


def test_votes_travel_there_and_back(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = tmp_path / "labels.db"
    assert evaluate(run, "--to-db", str(db)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["queued"] == 4
    assert evaluate(run, "--to-db", str(db)) == 0  # once more: nothing new
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["queued"] == 0
    records = read_ranked_file(run.answers)
    vote(db, {record.responses[3].id for record in records}, num_votes=3)
    assert evaluate(run, "--from-db", str(db)) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rate = result["win_rate"]["people"]
    assert (rate["value"], rate["n"], rate["wins"], rate["losses"]) == (1.0, 3, 3, 0)
    # 3 wins, and one vote more for each side: m = 4/5, s² = 4/25; 7.849 · 0.16 / 0.09 = 13.95
    assert result["votes"] == {"given": 3, "prompts": 3, "still_needed": 14 - 3}
    assert result["verdict"] == {"judge": "people", "outcome": "unproven"}
    report = run.read_report()
    assert report["win_rate"]["people"] == rate
    assert {"gold", "reward", "ai"} < set(report["win_rate"])
    assert sum("people" in sample["scores"] for sample in report["samples"]) == 3
    page = run.report_html.read_text()
    assert "judged by the people" in page.replace("\n", " ")
    assert 'data-path="/votes/still_needed">11</data>' in page
    vote_again = evaluate(run, "--from-db", str(db))
    assert vote_again == 0  # reading twice changes nothing
    assert run.read_report() == report


def test_without_votes_the_report_stays(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.report_json.read_bytes()
    assert evaluate(run, "--to-db", str(tmp_path / "labels.db")) == 0
    assert evaluate(run, "--from-db", str(tmp_path / "labels.db")) == 2
    assert "Nobody has voted on the pairs" in " ".join(capsys.readouterr().err.split())
    assert run.report_json.read_bytes() == before


def test_equal_answers_are_not_asked_about(run: RunDir, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in run.answers.read_text().splitlines()]
    lines[0]["responses"][3]["text"] = lines[0]["responses"][0]["text"]
    write_jsonl(run.answers, lines)
    assert evaluate(run, "--to-db", str(tmp_path / "labels.db")) == 0
    with Store(tmp_path / "labels.db") as store:
        assert store.counts()["tasks"] == 3


def test_what_is_missing_is_named(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(run) == 2
    assert "--policy, --reference, --reward missing" in " ".join(capsys.readouterr().err.split())
    assert evaluate(run, "--to-db", "a.db", "--from-db", "a.db") == 2
    assert "Queue first, read votes later." in capsys.readouterr().err
    assert evaluate(RunDir(run.path / "none"), "--from-db", "a.db") == 2
    assert "does not hold a finished evaluate stage" in " ".join(capsys.readouterr().err.split())
