"""People compare the answers of an evaluation blind, and their votes come back into its report."""

import json
import shutil
from pathlib import Path

import pytest

from labeling_app.annotators.comparisons import count_votes
from labeling_app.db.board.overlap import num_open, num_wanted, set_overlap
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.store import Store
from rlhf.cli import main
from rlhf.commands.loop.new_rankings import Exported, count_new
from rlhf.commands.loop.report import Stop, build_report, read_rounds
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.loop.stages import stages_of_round
from rlhf.records.jsonl import write_json, write_jsonl
from rlhf.records.ranked import read_ranked_file
from rlhf.run.loops.asking import num_asked, read_asked
from rlhf.run.rundir import RunDir
from tests.policies.evaluate.report_pages import require_numbers_of_report
from tests.rlhf.run.loops.folders import make_loop, make_round


@pytest.fixture
def run(done: RunDir, tmp_path: Path) -> RunDir:
    """A copy of an evaluation with a rival; its four prompts have two pairs each."""
    shutil.copytree(done.path, tmp_path / "evaluate")
    return RunDir(tmp_path / "evaluate")


def evaluate(run: RunDir, *arguments: str) -> int:
    return main(["evaluate", "--out", str(run.path), "--json", *arguments])


@pytest.fixture
def others(run: RunDir) -> dict[str, list[str]]:
    """The ids of what the policy's first answers are compared with, prompt by prompt."""
    records = read_ranked_file(run.answers)
    places = {"reference": 0, "policy": 3, "rival": 5}
    return {side: [r.responses[place].id for r in records] for side, place in places.items()}


def vote(db: Path, annotator: str, shares: dict[str, float]) -> None:
    """Somebody says how the policy's answers fare, by the id of the other; skips the rest."""
    with Store(db) as store:
        queue = TaskQueue(store)
        queue.add_annotator(annotator)
        while (task := queue.next_task(annotator)) is not None:
            name = f"{annotator}{task.id}"
            other = next((n for n, id_ in enumerate(task.shown_order) if id_ in shares), None)
            if other is None:
                queue.skip(annotator, skip_id=name, task_id=task.id, reason="unsure", note="")
                continue
            share = shares[task.shown_order[other]]
            order = (other, 1 - other) if share == 0 else (1 - other, other)
            tiers = (order,) if share == 0.5 else tuple((place,) for place in order)
            queue.submit(annotator, Submission(id=name, task_id=task.id, tiers=tiers))


def retract(db: Path, *ids: str) -> None:
    """The people who have ranked one of these answers think better of it; "" is all of them."""
    with Store(db) as store:
        for id_ in ids:
            store.connections.db.execute(f"UPDATE rankings SET live = 0 WHERE tiers LIKE '%{id_}%'")


def printed(capsys: pytest.CaptureFixture[str]) -> dict:
    """The JSON that the last command has printed."""
    found: dict = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_database_that_is_made_for_votes_is_said(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed_wrong = tmp_path / "lables.db"
    assert main(["evaluate", "--out", str(run.path), "--to-db", str(typed_wrong)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Queued 8 pairs for people, in a new database: {typed_wrong}.\n")


def test_votes_travel_there_and_back(
    run: RunDir,
    others: dict[str, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    db = tmp_path / "labels.db"
    assert evaluate(run, "--to-db", str(db)) == 0
    assert printed(capsys)["queued"] == 2 * 4  # against the original, and against the rival
    with Store(db) as store:  # answers that differ are chosen ones: not to be reused as samples
        stored = [one for prompt in store.prompts() for one in store.responses(prompt.id)]
    assert len(stored) > 8
    assert {response.sampling for response in stored} == {None}
    assert evaluate(run, "--to-db", str(db)) == 0  # once more: nothing new
    assert printed(capsys)["queued"] == 0
    shares = dict(zip(others["rival"], [0.0, 0.0, 0.5, 0.0], strict=True))
    vote(db, "ann", shares | dict.fromkeys(others["reference"][:3], 1.0))
    assert evaluate(run, "--from-db", str(db)) == 0
    result = printed(capsys)
    rate = result["win_rate"]["people"]
    assert (rate["value"], rate["n"], rate["wins"], rate["losses"]) == (1.0, 3, 3, 0)
    # 3 wins, and one vote more for each side: m = 4/5, s² = 4/25; 7.849 · 0.16 / 0.09 = 13.95
    one = {"people": 1, "same_answers": 0}
    assert result["votes"] == {**one, "given": 3, "prompts": 3, "still_needed": 14 - 3}
    assert result["verdict"] == {"judge": "people", "outcome": "unproven"}
    against = result["rival"]["win_rate"]["people"]
    assert (against["value"], against["n"], against["ties"], against["losses"]) == (0.125, 4, 1, 3)
    # m = 1.5/6, s² = 1.25/6 - 1/16 = 7/48; 7.849 · 0.14583 / 0.0625 = 18.31
    assert result["rival"]["votes"] == {**one, "given": 4, "prompts": 4, "still_needed": 19 - 4}
    report = run.read_report()
    assert report["win_rate"]["people"] == rate
    assert report["rival"]["win_rate"]["people"] == against
    assert {"gold", "reward", "ai"} < set(report["win_rate"])
    assert sum("people" in sample["scores"] for sample in report["samples"]) == 3
    page = run.report_html.read_text()
    assert "judged by the people" in page.replace("\n", " ")
    assert 'data-path="/votes/still_needed">11</data> more votes, on other prompts' in page
    assert 'data-path="/rival/votes/still_needed">15</data>' in page
    require_numbers_of_report(run.path)
    # people have no groups, the next judge has
    assert 'data-path="/win_rate_by_source/ai/' in page
    assert "by length of the prompt (n: prompts), judged by the AI judge</figcaption>" in page
    assert 'alt="Win rate with its interval for each source of prompts' in page
    vote_again = evaluate(run, "--from-db", str(db))
    assert vote_again == 0  # reading twice changes nothing
    assert run.read_report() == report
    retract(db, others["rival"][0], others["reference"][0])
    assert evaluate(run, "--from-db", str(db)) == 0
    assert run.read_report()["rival"]["win_rate"]["people"]["n"] == 3
    assert sum("people" in one["scores"] for one in run.read_report()["samples"]) == 2
    retract(db, *others["rival"])
    assert evaluate(run, "--from-db", str(db)) == 0
    assert "votes" not in run.read_report()["rival"]
    assert "people" not in run.read_report()["rival"]["win_rate"]
    retract(db, "")
    assert evaluate(run, "--from-db", str(db)) == 0
    assert run.read_report()["verdict"]["judge"] == "ai"
    assert "votes" not in run.read_report()
    assert evaluate(run, "--from-db", str(db)) == 2


def test_votes_that_prove_nothing_leave_no_price_of_a_point(
    run: RunDir, others: dict[str, list[str]], tmp_path: Path
) -> None:
    report = run.read_report()
    report["cost"] |= {"price_per_hour": 3.0, "price": 30.0, "price_per_point": 1.2}
    write_json(run.report_json, report)
    db = tmp_path / "labels.db"
    assert evaluate(run, "--to-db", str(db)) == 0
    vote(db, "ann", dict(zip(others["reference"][:2], [1.0, 0.5], strict=True)))
    assert evaluate(run, "--from-db", str(db)) == 0
    # people see 75 %, but on two prompts; what another judge saw no longer counts
    assert run.read_report()["win_rate"]["people"]["value"] == 0.75
    assert run.read_report()["cost"]["price_per_point"] is None
    assert "/cost/price_per_point" not in run.report_html.read_text()


def test_votes_against_the_other_model_alone(
    run: RunDir,
    others: dict[str, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    db = tmp_path / "labels.db"
    assert evaluate(run, "--to-db", str(db)) == 0
    vote(db, "ann", dict.fromkeys(others["rival"], 1.0))
    capsys.readouterr()
    assert main(["evaluate", "--out", str(run.path), "--from-db", str(db)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "against the original on 4 prompts, judged by people" not in said
    # m = 5/6, s² = 5/36: 7.849 · 0.13889 / 0.11111 = 9.81
    assert "on 4 prompts, judged by people. About 6 more votes, on other prompts" in said
    assert run.read_report()["verdict"]["judge"] == "ai"
    require_numbers_of_report(run.path)


def test_prompts_with_the_same_answer_twice_are_told_of(
    run: RunDir, others: dict[str, list[str]], tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in run.answers.read_text().splitlines()]
    lines[0]["responses"][3]["text"] = lines[0]["responses"][0]["text"]
    write_jsonl(run.answers, lines)
    db = tmp_path / "labels.db"
    assert evaluate(run, "--to-db", str(db)) == 0
    vote(db, "ann", dict.fromkeys(others["reference"], 1.0))
    assert evaluate(run, "--from-db", str(db)) == 0
    votes = run.read_report()["votes"]
    assert (votes["prompts"], votes["same_answers"]) == (3, 1)
    page = " ".join(run.report_html.read_text().split())
    assert 'To <data value="1" data-path="/votes/same_answers">1</data> more prompts both' in page


def test_several_votes_on_a_pair_count_as_one_prompt(
    run: RunDir,
    others: dict[str, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    db = tmp_path / "labels.db"
    with Store(db) as store:  # two rankings that wait already
        [first, second, *_] = read_ranked_file(run.answers)
        store.add_prompts([first.prompt, second.prompt])
        store.add_responses([*first.responses[:2], *second.responses[:2]])
    assert evaluate(run, "--to-db", str(db), "--people-per-pair", "2", "--mix") == 0
    with Store(db) as store:
        query = "SELECT purpose, overlap, priority FROM tasks"
        tasks = store.connections.db.execute(query).fetchall()
    assert sorted(task[:2] for task in tasks) == [("compare", 2)] * 8 + [("rank", 1)] * 2
    assert len({priority for _, _, priority in tasks}) == 10  # an order of all
    [*three, _] = others["reference"]
    vote(db, "ann", dict.fromkeys(three, 1.0))
    vote(db, "ben", dict(zip(three, [1.0, 1.0, 0.0], strict=True)))
    capsys.readouterr()
    assert evaluate(run, "--from-db", str(db)) == 0
    # shares 1, 1, ½, and one prompt more for each side: m = 7/10, s² = 4/25;
    # 7.849 · 0.16 / 0.04 = 31.40, so 32 prompts, 29 more with two votes on each
    assert printed(capsys)["votes"] == {
        "given": 6,
        "people": 2,
        "prompts": 3,
        "same_answers": 0,
        "still_needed": 58,
    }


def test_without_votes_the_report_stays(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.report_json.read_bytes()
    assert evaluate(run, "--to-db", str(tmp_path / "labels.db")) == 0
    assert evaluate(run, "--from-db", str(tmp_path / "labels.db")) == 2
    assert "Nobody has voted on the pairs" in " ".join(capsys.readouterr().err.split())
    assert run.report_json.read_bytes() == before


def test_a_database_that_never_had_the_pairs_changes_nothing(
    run: RunDir, others: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(run, "--to-db", str(tmp_path / "labels.db")) == 0
    vote(tmp_path / "labels.db", "ann", dict.fromkeys(others["reference"], 1.0))
    assert evaluate(run, "--from-db", str(tmp_path / "labels.db")) == 0
    before = run.report_json.read_bytes()
    with Store(tmp_path / "other.db"):
        pass
    assert evaluate(run, "--from-db", str(tmp_path / "other.db")) == 2
    assert "has no tasks for the pairs of" in " ".join(capsys.readouterr().err.split())
    assert run.report_json.read_bytes() == before


def test_equal_answers_are_not_asked_about(run: RunDir, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in run.answers.read_text().splitlines()]
    lines[0]["responses"][3]["text"] = lines[0]["responses"][0]["text"]
    write_jsonl(run.answers, lines)
    assert evaluate(run, "--to-db", str(tmp_path / "labels.db")) == 0
    with Store(tmp_path / "labels.db") as store:
        assert store.counts()["tasks"] == 3 + 4


def test_what_is_missing_is_named(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(run) == 2
    assert "--policy, --reference and --reward are missing" in " ".join(
        capsys.readouterr().err.split()
    )
    assert evaluate(run, "--to-db", "a.db", "--from-db", "a.db") == 2
    assert "Queue first, read the votes later." in capsys.readouterr().err
    assert evaluate(RunDir(run.path / "none"), "--from-db", "a.db") == 2
    assert "does not hold a finished evaluate stage" in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def loop(done: RunDir, tmp_path: Path) -> Path:
    """A loop whose round 0 has this evaluation, and whose database one ranking by a person."""
    out = make_loop(tmp_path / "loop", "m")
    folder = make_round(out, 0)
    shutil.rmtree(folder / "evaluate")
    shutil.copytree(done.path, folder / "evaluate")
    write_json(folder / "reward" / "report.json", {"accuracy": None})
    write_json(folder / "rankings" / "manifest.json", {"rankings": 1})
    stop = Stop("1 of 1 round is done.", "rounds")
    write_json(out / "report.json", build_report(read_rounds(out), out, stop))
    ranked = {"prompt": "Why?", "responses": ["So.", "No."], "tiers": [[0], [1]], "kind": "human"}
    write_jsonl(tmp_path / "ranked.jsonl", [ranked])
    assert main(["import", str(tmp_path / "ranked.jsonl"), "--db", str(out / "labels.db")]) == 0
    return out


def test_people_are_asked_about_a_round_and_their_votes_train_nothing(
    loop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db, asked = loop / "labels.db", RunDir(loop / "round-0" / "evaluate")
    capsys.readouterr()
    assert main(["runs", "votes", str(loop)]) == 2
    assert "error People were not asked about round 0" in capsys.readouterr().err
    assert main(["runs", "ask", str(loop), "--round", "1"]) == 2
    assert f"error Round 1 of {loop} is not evaluated" in capsys.readouterr().err
    for queued in (8, 0):  # four prompts, two other models
        assert main(["runs", "ask", str(loop), "--json"]) == 0
        assert printed(capsys) == {"round": 0, "queued": queued, "people_per_pair": 1}
    found = read_asked(asked)
    assert found is not None
    assert (found.pairs, num_asked(loop)) == (8, 8)
    assert main(["runs", "votes", str(loop)]) == 2
    assert "error Nobody has voted on round 0 yet" in capsys.readouterr().err
    with Store(db) as store:
        assert num_open(store.connections) == 8  # the pairs, which people see
        assert num_wanted(store.connections) == 0  # no ranking comes from them
    records = read_ranked_file(asked.answers)
    vote(db, "ann", {one.responses[0].id: 1.0 for one in records})

    assert main(["runs", "votes", str(loop), "--json"]) == 0
    told = printed(capsys)
    assert (told["judge"], told["outcome"], told["votes"]["given"]) == ("people", "unproven", 4)
    assert told["win_rate"]["original"]["value"] == 1.0
    report = RunDir(loop).read_report()
    assert report["rounds"] == [told]
    assert report["stopped"].startswith(
        "Round 0: wins 100 % "
    )  # no longer what the judge before said
    assert "judged by people (4 votes by 1 person): no gain" in report["stopped"]
    assert report["stopped_by"] == "stop_without_gain"

    export = next(one for one in stages_of_round(LoopSettings(out=loop, model="m"), 0)
                  if one.name == "export")  # fmt: skip
    assert count_new(db, Exported(), export.settings())["new"] == 1
    rankings = tmp_path / "rankings"
    assert main(["export", "--db", str(db), "--out", str(rankings)]) == 0
    exported = [one for file in rankings.glob("*.jsonl") for one in read_ranked_file(file)]
    assert sum(len(one.rankings) for one in exported) == 1


def test_people_are_not_asked_in_a_new_database(
    loop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loop's relative --db is another file for a command that is typed in another folder."""
    with (loop / "config.yaml").open("a") as config:
        config.write("db: people.db\n")
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "ask", str(loop)]) == 2
    assert "error There is no label database at people.db" in capsys.readouterr().err
    assert not (tmp_path / "people.db").exists()
    assert num_asked(loop) == 0


def test_as_many_people_vote_on_a_pair_as_rank_a_task(
    loop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db, asked = loop / "labels.db", RunDir(loop / "round-0" / "evaluate")
    with Store(db) as store:
        set_overlap(store.connections, 2)
    capsys.readouterr()
    assert main(["runs", "ask", str(loop)]) == 0
    said = capsys.readouterr().out
    assert "Queued 8 pairs for people, 2 votes on each. Then: rlhf runs votes" in said
    found = read_asked(asked)
    assert found is not None
    assert (found.db, len(set(found.tasks))) == (str(db.resolve()), 8)
    shares = {one.responses[0].id: 1.0 for one in read_ranked_file(asked.answers)}
    for name in ("ann", "ben"):
        vote(db, name, shares)
    with Store(db, read_only=True) as store:
        counted = count_votes(store.connections, found.tasks)
    assert (counted.given, counted.wanted, counted.people) == (8, 16, 2)
    assert main(["runs", "votes", str(loop)]) == 0
    assert "judged by people (8 votes by 2 people): no gain." in capsys.readouterr().out
