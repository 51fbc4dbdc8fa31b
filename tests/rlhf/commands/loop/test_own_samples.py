"""A later round says how many of its own samples are ranked, and what else is new."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from labeling_app.annotators.rounds import queue_round
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.store import Store
from rlhf.commands.loop import waiting
from rlhf.commands.loop.new_rankings import Exported, count_of_tasks, own_tasks
from rlhf.commands.loop.report import read_rounds
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.loop.waiting import RankingCheck, wait_for_rankings
from rlhf.commands.runs import runs
from rlhf.records.jsonl import write_json
from rlhf.run.locks import locked
from rlhf.run.loops.train_now import Waiting, read_waiting, write_waiting
from rlhf.run.rundir import RunDir
from tests.labeling_app.asking import rank_next
from tests.labeling_app.conftest import build_prompt, build_responses
from tests.rlhf.run.loops.folders import make_loop

PEOPLE = SimpleNamespace(kind=("human",), annotator=())
POLICY = Path("runs/a/round-0/ppo/policy")
PROMPTS = [build_prompt(f"Question {n}?") for n in range(6)]


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Four tasks of earlier rounds for two people each, then two samples of a policy."""
    path = tmp_path / "labels.db"
    with Store(path) as store:
        set_overlap(store.connections, 2)
        store.add_prompts(PROMPTS)
        store.add_responses(r for p in PROMPTS[:4] for r in build_responses(p, ["one", "two"]))
    return path


def queue_samples(db: Path) -> None:
    with Store(db) as store:
        chosen = [(p, build_responses(p, ["three", "four"]), "unsure") for p in PROMPTS[4:]]
        queue_round(store, {"policy": {"path": str(POLICY), "hash": "abc"}}, chosen, {})


def test_the_tasks_of_a_rounds_own_samples_are_counted(db: Path) -> None:
    assert own_tasks(db, POLICY) == []
    queue_samples(db)
    own = own_tasks(db, POLICY)
    assert len(own) == 2
    assert own_tasks(db, Path("runs/a/round-1/ppo/policy")) == []
    rank_next(db, "ann", 1)  # samples of the newest policy come first
    rank_next(db, "ben", 3)
    assert count_of_tasks(db, own, PEOPLE) == {"rankings": 3, "ranked": 2}
    assert count_of_tasks(db, own, SimpleNamespace(kind=(), annotator=("ben",))) == {
        "rankings": 2,
        "ranked": 2,
    }
    assert count_of_tasks(db, own, SimpleNamespace(kind=("ai",), annotator=()))["rankings"] == 0
    assert count_of_tasks(db, [], PEOPLE) == {"rankings": 0, "ranked": 0}


@pytest.mark.parametrize(
    ("new", "ranked", "of_samples", "said"),
    [
        (0, 0, 0, "None of this round's 24 new samples is ranked on the board yet."),
        (
            1,
            0,
            0,
            "None of this round's 24 new samples is ranked on the board yet; the new ranking is of "
            "another task or from elsewhere.",
        ),
        (
            16,
            0,
            0,
            "None of this round's 24 new samples is ranked on the board yet; all 16 new rankings "
            "are of other tasks or from elsewhere.",
        ),
        (
            20,
            1,
            4,
            "1 of this round's 24 new samples is ranked on the board; 16 of the 20 new rankings "
            "are of other tasks or from elsewhere.",
        ),
        (4, 2, 4, "2 of this round's 24 new samples are ranked on the board."),
    ],
)
def test_in_words(new: int, ranked: int, of_samples: int, said: str) -> None:
    found = Waiting(
        round=1,
        new=new,
        wanted=20,
        possible=9,
        samples=24,
        samples_ranked=ranked,
        of_samples=of_samples,
    )
    assert found.about_samples == said
    assert found.lacks_own_rankings is (new > 0 and ranked == 0)


def test_the_first_round_has_no_samples_of_its_own() -> None:
    first = Waiting(round=0, new=3, wanted=20, possible=9)
    assert (first.about_samples, first.lacks_own_rankings) == ("", False)


def test_a_round_that_trains_on_leftovers_says_so(
    db: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three are ranked while the round before is trained, one of the samples while it waits."""
    rank_next(db, "ann", 3)
    queue_samples(db)
    out, own = db.parent, own_tasks(db, POLICY)
    settings = LoopSettings(out=out, model="m", db=db, new_rankings=4)
    check = RankingCheck(RunDir(out), settings, PEOPLE, 1, Exported(), datetime.now(UTC), own)
    shown: list[Waiting | None] = []

    def look_and_rank(_: float) -> None:
        with locked(out, ""):
            shown.append(read_waiting(out))
        rank_next(db, "ben", 1)

    time = SimpleNamespace(sleep=look_and_rank, monotonic=lambda: 0.0)
    monkeypatch.setattr(waiting, "time", time)
    wait_for_rankings(check, lambda is_ready: None)
    assert [one and (one.samples, one.samples_ranked, one.of_samples) for one in shown] == [
        (2, 0, 0)
    ]
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "3 of 4 new rankings, 1 missing; 6 tasks open. None of this round's 2 new samples is "
        "ranked on the board yet; all 3 new rankings are of other tasks or from elsewhere.",
        "4 of 4 new rankings, 0 missing; 6 tasks open. 1 of this round's 2 new samples is ranked "
        "on the board; 3 of the 4 new rankings are of other tasks or from elsewhere.",
    ]


def test_train_now_says_what_it_trains_on(tmp_path: Path) -> None:
    out = make_loop(tmp_path / "loop", "m", status="running")
    settings = runs.Settings("train", out)
    with locked(out, ""):
        write_waiting(out, Waiting(round=1, new=16, wanted=20, possible=9, samples=24))
        said = runs.describe(settings, runs.run(settings))
        assert said == (
            "The round trains now, with 16 new rankings. None of this round's 24 new samples is "
            "ranked on the board yet; all 16 new rankings are of other tasks or from elsewhere."
        )
        older = {"round": 1, "new": 1, "wanted": None, "possible": 9}  # of a loop started before
        write_json(RunDir(out).waiting_file, older)
        said = runs.describe(settings, runs.run(settings))
        assert said == "The round trains now, with 1 new ranking."


def test_the_report_says_how_many_were_of_the_rounds_samples(tmp_path: Path) -> None:
    rate = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 9, "p_value": 0.5}
    evaluation = {
        "win_rate": {"reward": rate},
        "judges": {"reward": {"kind": "reward model", "name": "r"}},
        "kl": {},
        "rival": {"win_rate": {"reward": rate}},
    }
    for number in (0, 1):
        folder = tmp_path / f"round-{number}"
        write_json(folder / "reward" / "report.json", {"accuracy": None})
        write_json(folder / "rankings" / "manifest.json", {"rankings": 50})
        write_json(folder / "evaluate" / "report.json", evaluation)
        write_json(folder / "evaluate" / "stage.json", {"stage": "evaluate", "status": "done"})
    entries = [
        {"stage": "export", "round": 0, "new_rankings": 50},
        {"stage": "export", "round": 1, "new_rankings": 20, "rankings_of_samples": 4},
    ]
    write_json(tmp_path / "commands.json", {"commands": entries})
    counts = [(one["new_rankings"], one["rankings_of_samples"]) for one in read_rounds(tmp_path)]
    assert counts == [(50, None), (20, 4)]
