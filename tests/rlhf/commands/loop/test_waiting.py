"""Waiting for people: what counts, what is printed, and when it ends."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from labeling_app.annotators.rounds import queue_round
from labeling_app.data_io.exporting import export
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.imports.unfinished import importing
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.store import Store
from rlhf.commands.loop import waiting
from rlhf.commands.loop.new_rankings import Exported, count_new, has_round, last_exported
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.loop.waiting import RankingCheck, wait_for_rankings, wait_while_paused
from rlhf.errors import InputError
from rlhf.records.jsonl import write_json
from rlhf.records.schema import AnnotatorKind, Ranking
from rlhf.run.locks import locked
from rlhf.run.loops.pausing import end_pause, request_pause
from rlhf.run.loops.train_now import request_training, training_requested_by
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import listening
from tests.labeling_app.conftest import build_prompt, build_responses

PEOPLE = SimpleNamespace(kind=("human",), annotator=())
NONE = Exported()
PROMPTS = [build_prompt(f"Question {n}?") for n in range(3)]


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Three prompts with two responses each, all to be ranked."""
    path = tmp_path / "labels.db"
    with Store(path) as store:
        store.add_prompts(PROMPTS)
        store.add_responses(r for p in PROMPTS for r in build_responses(p, ["one", "two"]))
    return path


def rank(db: Path, number: int, by: str = "ann", kind: AnnotatorKind = "human") -> None:
    first, second = build_responses(PROMPTS[number % 3], ["one", "two"])
    ranking = Ranking(
        id=f"r{number}",
        prompt_id=first.prompt_id,
        annotator=by,
        kind=kind,
        tiers=((first.id,), (second.id,)),
    )
    with Store(db) as store:
        store.add_rankings([ranking], supersede=True)


def test_new_rankings_are_counted_from_those_of_the_last_export(db: Path, tmp_path: Path) -> None:
    assert count_new(db, NONE, PEOPLE) == {"new": 0, "open": 3}
    rank(db, 0)
    rank(db, 1, by="vader", kind="signal")
    assert count_new(db, NONE, PEOPLE)["new"] == 1
    with Store(db) as store:
        manifest = export(store, tmp_path / "out", "ranked")
    assert (manifest["newest_ranking"], manifest["newest_import"]) == (2, 0)
    rank(db, 3)  # of the first prompt again, in place of the earlier one
    assert count_new(db, NONE, PEOPLE)["new"] == 1
    assert count_new(db, last_exported(tmp_path / "out", 0), PEOPLE)["new"] == 1
    everybody = SimpleNamespace(kind=(), annotator=())
    assert count_new(db, NONE, everybody)["new"] == 2
    assert count_new(db, NONE, SimpleNamespace(kind=(), annotator=("ann", "bob")))["new"] == 1


def test_what_arrives_while_an_export_starts_is_not_counted_again(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank(db, 0)
    names = Store.annotators

    def rank_one_more(store: Store) -> dict[str, AnnotatorKind]:
        rank(db, 1)
        return names(store)

    monkeypatch.setattr(Store, "annotators", rank_one_more)  # which an export reads first
    with Store(db) as store:
        assert export(store, tmp_path / "out", "ranked")["rankings"] == 2
    assert count_new(db, last_exported(tmp_path / "out", 1), PEOPLE)["new"] == 0
    rank(db, 2)
    assert count_new(db, last_exported(tmp_path / "out", 1), PEOPLE)["new"] == 1


def test_what_an_unfinished_import_hides_from_an_export_is_new_later(
    db: Path, tmp_path: Path
) -> None:
    rank(db, 0)
    with Store(db) as store, importing(store.connections, "in.jsonl") as current:
        best, worst = build_responses(PROMPTS[1], ["one", "two"])
        for number in range(2):
            judged = Ranking(
                id=f"i{number}",
                prompt_id=best.prompt_id,
                annotator=f"eve {number}",
                kind="human",
                tiers=((best.id,), (worst.id,)),
            )
            store.add_rankings([judged], import_id=current.id)
            rank(db, 2 + 3 * number)  # on the board meanwhile, the second in place of the first
        export(store, tmp_path / "out", "ranked")
        before = last_exported(tmp_path / "out", 0)
        assert count_new(db, before, PEOPLE)["new"] == 0
    assert count_new(db, before, PEOPLE)["new"] == 2
    with Store(db) as store:
        export(store, tmp_path / "next", "ranked")
    assert count_new(db, last_exported(tmp_path / "next", 0), PEOPLE)["new"] == 0


def test_exports_of_earlier_versions_are_counted_from_what_the_loop_recorded(
    tmp_path: Path,
) -> None:
    manifest = {"format": "ranked", "content_hash": ""}
    write_json(tmp_path / "manifest.json", manifest)
    assert last_exported(tmp_path, 7) == Exported(ranking=7)
    write_json(tmp_path / "manifest.json", {**manifest, "newest_ranking": "8", "newest_import": 0})
    with pytest.raises(InputError, match="has 'newest_ranking' as '8', not as int"):
        last_exported(tmp_path, 7)


def test_a_round_is_known_by_the_policy_that_was_sampled(db: Path) -> None:
    policy = Path("runs/a/round-0/ppo/policy")
    assert not has_round(db, policy)
    with Store(db) as store:
        chosen = [(PROMPTS[0], build_responses(PROMPTS[0], ["one", "two"]), "random")]
        queue_round(store, {"policy": {"path": str(policy), "hash": "abc"}}, chosen, {})
    assert has_round(db, policy)
    assert not has_round(db, Path("runs/a/round-1/ppo/policy"))


def no_sampling(is_ready: Callable[[], bool]) -> None:
    raise AssertionError("a round that can begin samples no responses")


def wait(
    db: Path,
    wanted: int | None,
    number: int = 0,
    hours: float = 0.0,
    sample: Callable[..., None] = lambda is_ready: None,
    **more: str,
) -> None:
    """Wait for rankings of a round that began so many hours ago."""
    settings = LoopSettings(out=db.parent, model="m", db=db, new_rankings=wanted, **more)
    began, run = datetime.now(UTC) - timedelta(hours=hours), RunDir(db.parent)
    wait_for_rankings(RankingCheck(run, settings, PEOPLE, number, NONE, began), sample)


class Clock:
    """The time, which passes only while somebody sleeps: 40 seconds each."""

    def __init__(self, *then: Callable[[], None]) -> None:
        self.seconds, self.then = 0, list(then)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, _: float) -> None:
        self.seconds += 40
        self.then.pop(0)()


def test_it_goes_on_when_the_last_ranking_arrives(
    db: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank(db, 0)
    said: list[list[str]] = []
    prompts = iter((1, 2))

    def look_at_what_it_said() -> None:
        said.append(capsys.readouterr().err.splitlines())

    def rank_one() -> None:
        look_at_what_it_said()
        rank(db, next(prompts))

    clock = Clock(rank_one, look_at_what_it_said, look_at_what_it_said, rank_one)
    monkeypatch.setattr(waiting, "time", clock)
    phases: list[str] = []
    with listening(lambda phase, step: phases.append(phase)):
        wait(db, 3, number=4)
    look_at_what_it_said()
    assert phases == [f"waiting for rankings: {n} of 3" for n in (1, 2, 3)]
    assert said == [
        [
            "",
            "Round 4 trains when there are 3 new rankings.",
            f"People rank with: rlhf label --db {db}",
            "1 of 3 new rankings, 2 missing; 3 tasks open.",
        ],
        [],  # another one came, 40 seconds later
        ["2 of 3 new rankings, 1 missing; 3 tasks open."],  # 80 seconds
        [],
        ["3 of 3 new rankings, 0 missing; 3 tasks open."],
    ]


def test_enough_rankings_are_not_waited_for(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        rank(db, number)
    wait(db, 2, sample=no_sampling)
    assert capsys.readouterr().err == "3 of 2 new rankings, 0 missing; 3 tasks open.\n"


def test_it_looks_while_responses_are_sampled(
    db: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(is_ready: Callable[[], bool]) -> None:
        rank(db, 0)
        assert not is_ready()
        rank(db, 1)
        assert is_ready()

    monkeypatch.setattr(waiting, "time", Clock(lambda: None))
    wait(db, 2, sample=sample)
    assert capsys.readouterr().err.splitlines()[3:] == [
        "0 of 2 new rankings, 2 missing; 3 tasks open.",
        "2 of 2 new rankings, 0 missing; 3 tasks open.",
    ]


def test_it_says_so_where_nothing_is_left_to_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "labels.db"
    Store(path).close()

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting.time, "sleep", stop)
    with pytest.raises(KeyboardInterrupt):
        wait(path, 2)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "0 of 2 new rankings, 2 missing; 0 tasks open. Import more prompts (rlhf import, "
        "or the Data page), or start the loop again with a smaller --new-rankings."
    )


def stop_waiting(_: float = 0.0) -> None:
    raise KeyboardInterrupt


def test_a_task_on_somebodys_screen_is_still_open(
    db: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(db) as store:
        queue = TaskQueue(store)
        queue.add_annotator("ann")
        for number in range(3):
            task = queue.next_task("ann")
            if number < 2:
                tiers = ((0,), (1,))
                queue.submit("ann", Submission(id=f"s{number}", task_id=task.id, tiers=tiers))
    monkeypatch.setattr(waiting.time, "sleep", stop_waiting)
    with pytest.raises(KeyboardInterrupt):
        wait(db, 3)
    line = "2 of 3 new rankings, 1 missing; 1 task open."
    assert capsys.readouterr().err.splitlines()[-1] == line


def test_it_says_how_many_rankings_the_open_tasks_can_give(
    db: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(db) as store:
        set_overlap(store.connections, 2)
        queue = TaskQueue(store)
        queue.add_annotator("ann")
        task = queue.next_task("ann")
        queue.submit("ann", Submission(id="s", task_id=task.id, tiers=((0,), (1,))))
        queue.next_task("ann")  # stays on the screen: 3 tasks for two people less one ranking
    monkeypatch.setattr(waiting.time, "sleep", stop_waiting)
    with pytest.raises(KeyboardInterrupt):
        wait(db, 6)
    line = "1 of 6 new rankings, 5 missing; 3 tasks open."
    assert capsys.readouterr().err.splitlines()[-1] == line
    with pytest.raises(KeyboardInterrupt):
        wait(db, 7)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "1 of 7 new rankings, 6 missing; 3 tasks open. They can give 5 rankings. Import more "
        f"prompts (rlhf import, or the Data page), or train now: rlhf runs train {db.parent}"
        " (or Train now on the Runs page)."
    )


def test_a_round_trains_at_once_where_somebody_asks(
    db: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, refused = db.parent, list[str]()

    def ask() -> None:
        try:
            request_training(out, "lea")
        except InputError as error:
            refused.append(error.problem)

    def pause_and_ask() -> None:
        request_pause(out, "lea")
        ask()
        end_pause(out)
        rank(db, 0)

    ask()
    monkeypatch.setattr(waiting, "time", Clock(ask, pause_and_ask, lambda: None, ask))
    with locked(out, ""):
        wait(db, 3, number=4)
        ask()
    assert refused == [
        f"The loop in {out} does not wait for rankings",
        "Round 4 has no new rankings to train on",
        f"The loop in {out} does not wait for rankings",
        f"The loop in {out} does not wait for rankings",
    ]
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "lea starts the training with the rankings there are.",
        "1 of 3 new rankings, 2 missing; 3 tasks open.",
    ]
    assert (training_requested_by(out, 4), training_requested_by(out, 5)) == ("lea", None)
    wait(db, 3, number=4)  # also of a loop that was killed after the request
    monkeypatch.setattr(waiting, "time", Clock(stop_waiting))
    with pytest.raises(KeyboardInterrupt):
        wait(db, 3, number=5)  # the next round waits


def test_at_its_time_a_round_starts_with_fewer_rankings(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank(db, 0)
    wait(db, 9, hours=7, start_at="every 6 hours")
    assert capsys.readouterr().err == "1 of 9 new rankings, 8 missing; 3 tasks open.\n"
    wait(db, None, hours=7, start_at="every 6 hours")
    assert capsys.readouterr().err == "1 new ranking; 3 tasks open.\n"


def test_without_a_new_ranking_its_time_is_the_next_one(
    db: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    clock = Clock(lambda: rank(db, 0), stop)  # one that came after the time had passed
    monkeypatch.setattr(waiting, "time", clock)
    phases: list[str] = []
    with listening(lambda phase, step: phases.append(phase)), pytest.raises(KeyboardInterrupt):
        wait(db, 9, hours=7, start_at="every 6 hours")
    at = f"{datetime.now().astimezone() + timedelta(hours=6):%Y-%m-%d %H:%M}"
    earlier = f"{datetime.now().astimezone() + timedelta(hours=6, minutes=-1):%Y-%m-%d %H:%M}"
    assert phases[-1] in {f"waiting for rankings: 1 of 9, or at {one}" for one in (at, earlier)}
    first = capsys.readouterr().err.splitlines()[1]
    assert first in {
        f"Round 0 trains when there are 9 new rankings, or at {one} with at least one."
        for one in (at, earlier)
    }


def test_a_paused_loop_waits_until_it_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    wait_while_paused(run, 0)
    assert capsys.readouterr().err == ""
    request_pause(tmp_path, "lea")
    clock = Clock(lambda: None, lambda: end_pause(tmp_path))
    monkeypatch.setattr(waiting, "time", clock)
    phases: list[str] = []
    with listening(lambda phase, step: phases.append(phase)):
        wait_while_paused(run, 2)
    assert (phases, clock.then) == (["paused by lea"], [])
    assert capsys.readouterr().err == (
        f"\nPaused by lea. To go on: rlhf runs resume {tmp_path}  (or Resume on the Runs page)\n"
        "Resumed.\n"
    )


def test_a_pause_also_holds_a_round_for_which_there_are_enough_rankings(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank(db, 0)
    request_pause(db.parent, "lea")

    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "time", Clock(lambda: None, stop))
    with pytest.raises(KeyboardInterrupt):
        wait(db, 1)
