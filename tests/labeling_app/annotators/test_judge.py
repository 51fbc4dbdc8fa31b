"""A judge behind a real HTTP server: both orders, ties, retries, resuming, calibration."""

import json
from collections.abc import Iterator

import pytest

from labeling_app.annotators.judges import annotate_with_judge
from labeling_app.db.board.checks import make_check
from labeling_app.db.queue import Submission, TaskQueue
from rlhf.cli import main
from rlhf.endpoints.judge import Endpoint
from rlhf.records.schema import Message, Prompt, Ranking
from tests.servers.judge import JudgeServer


@pytest.fixture
def server(monkeypatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr("rlhf.endpoints.retries.time.sleep", lambda seconds: None)
    with JudgeServer() as server:
        yield server


@pytest.fixture
def judge(store, server, capsys):
    def run(*more: str) -> dict | str:
        arguments = ["annotate", "--db", str(store.connections.path), "--annotator", "judge"]
        code = main([*arguments, "--endpoint", server.url, "--model", "m", "--json", *more])
        captured = capsys.readouterr()
        return json.loads(captured.out) if code == 0 else f"{code} {captured.err}"

    return run


def tiers(store) -> list[list[list[str]]]:
    found = []
    for record in store.ranked_prompts(kinds=["ai"]):
        texts = {response.id: response.text for response in record.responses}
        found += [[[texts[i] for i in tier] for tier in r.tiers] for r in record.rankings]
    return found


def test_pairs_are_asked_in_both_orders_and_become_a_ranking(
    store, server, judge, make_prompt, make_responses, monkeypatch
):
    monkeypatch.setenv("RLHF_JUDGE_API_KEY", "k1")
    prompt = make_prompt("Hi?")
    store.add_prompts([prompt])
    store.add_responses(make_responses(prompt, ["mid one", "short", "the longest"]))
    result = judge()
    assert (result["annotator"], result["kind"], result["ranked"]) == ("judge:m", "ai", 1)
    assert tiers(store) == [[["the longest"], ["mid one"], ["short"]]]
    assert store.annotators() == {"judge:m": "ai"}
    assert len(server.calls) == 6
    assert {call["path"] for call in server.calls} == {"/v1/chat/completions"}
    assert {(call["key"], call["model"], call["temperature"]) for call in server.calls} == {
        ("Bearer k1", "m", 0)
    }
    stored = list(store.connections.db.query("SELECT * FROM judge_calls"))
    assert len(stored) == 6
    assert all("[[A]]? No: so." in row["answer"] for row in stored)
    assert all("# Request\nHi?" in json.loads(row["request"])[0]["content"] for row in stored)
    assert judge()["ranked_before"] == 1
    assert len(server.calls) == 6


def test_a_judge_is_told_what_the_system_turn_says(store, server, judge, make_responses):
    turns = (Message(role="system", content="Be brief."), Message(role="user", content="Hi?"))
    prompt = Prompt.create(turns, "train", "")
    store.add_prompts([prompt])
    store.add_responses(make_responses(prompt, ["short", "longer"]))
    judge()
    stored = list(store.connections.db.query("SELECT * FROM judge_calls"))
    asked = [json.loads(row["request"])[0]["content"] for row in stored]
    assert all("# Request\nBe brief.\n\nHi?" in words for words in asked)


def test_a_judge_drawn_to_the_first_place_makes_ties(store, judge, make_prompt, make_responses):
    prompt = make_prompt("Hi?")
    store.add_prompts([prompt])
    store.add_responses(make_responses(prompt, ["biased one", "biased two, longer"]))
    judge()
    [[tied]] = tiers(store)
    assert sorted(tied) == ["biased one", "biased two, longer"]


def test_a_busy_server_is_asked_again(store, server, judge, fill):
    fill(1, 2)
    server.failures = [503, 429, 500]
    assert judge("--parallel", "1")["ranked"] == 1
    assert len(server.calls) == 2 + 3


def test_an_interrupted_run_goes_on_where_it_was(store, server, judge, fill):
    fill(3, 2)
    server.failures = [0, 0, 0] + [500] * 5
    message = judge("--parallel", "1")
    assert message.startswith("75 ")
    assert "does not answer after 5 attempts (status 500)" in message
    count = "SELECT COUNT(*) FROM judge_calls"
    assert store.connections.db.execute(count).fetchone() == (3,)
    result = judge()
    assert (result["ranked"], result["ranked_before"]) == (2, 1)
    # Three prompts make six questions; none of the three that were answered is asked again.
    assert len(server.calls) == 6 + 5


def test_refusals(store, server, judge, fill, refused):
    fill(1, 2)
    server.failures = [401] * 9
    message = judge()
    assert message.startswith("2 ")
    assert "refused the request (status 401)" in message
    assert "RLHF_JUDGE_API_KEY" in message
    db = str(store.connections.path)
    said = refused("annotate", "--db", db, "--annotator", "judge", "--model", "m")
    assert "A judge needs --endpoint (is ''), --model (is 'm')" in said


def test_unclear_answers_are_counted_and_make_no_ranking(store, server, judge, fill):
    fill(1, 2)
    server.unclear = True
    result = judge()
    assert (result["ranked"], result["unclear_pairs"]) == (1, 1)
    assert tiers(store) == []


def test_calibration_against_people_and_gold(store, judge, make_prompt, make_responses):
    prompts = [make_prompt(text) for text in ("agrees", "differs", "golden")]
    store.add_prompts(prompts)
    for prompt in prompts:
        longer, shorter = make_responses(prompt, ["longer text", "short"])
        store.add_responses([longer, shorter])
        order = (longer, shorter) if prompt.text != "differs" else (shorter, longer)
        known = tuple((response.id,) for response in order)
        ranking = Ranking(
            id=prompt.id, prompt_id=prompt.id, annotator="ann", kind="human", tiers=known
        )
        if prompt.text == "golden":
            shown = [response.id for response in order]
            make_check(store.connections, ranking, shown, "gold", "")
        else:
            store.add_rankings([ranking])
    found = judge()["calibration"]
    assert (found["people"]["value"], found["people"]["n"]) == (0.5, 2)
    assert (found["gold"]["value"], found["gold"]["n"]) == (1.0, 1)


def test_another_rubric_is_judged_anew(store, server, judge, fill, tmp_path):
    fill(1, 2)
    judge()
    (tmp_path / "rubric.md").write_text("Shorter is better.")
    assert judge("--rubric", str(tmp_path / "rubric.md"))["ranked"] == 1
    assert "Shorter is better." in server.calls[-1]["messages"][0]["content"]
    assert len(tiers(store)) == 1  # the newer one is live


@pytest.fixture
def trace(store, run_json):
    return lambda ranking_id: run_json("trace", ranking_id, "--db", store.connections.path)


def test_trace_tells_by_which_rubric_a_judge_and_a_person_ranked(
    store, judge, trace, fill, tmp_path
):
    fill(1, 2)
    judge()
    (tmp_path / "rubric.md").write_text("Shorter is better.")
    judge("--rubric", str(tmp_path / "rubric.md"))
    queue = TaskQueue(store)
    queue.add_annotator("ann")
    task = queue.next_task("ann")
    version = store.add_rubric("Be kind.")
    queue.submit("ann", Submission(id="a1", task_id=task.id, tiers=((0,), (1,)), rubric=version))
    query = "SELECT id FROM rankings ORDER BY seq"
    found = [trace(row["id"]) for row in store.connections.db.query(query)]
    assert [(f["annotator"]["kind"], f["rubric"]["text"], f["live"]) for f in found] == [
        ("ai", "", False),
        ("ai", "Shorter is better.", True),
        ("human", "Be kind.", True),
    ]
    assert found[2]["rubric"]["version"] == version


BEATS = {
    "rock": {"scissors"},
    "scissors": {"paper"},
    "paper": {"rock", "well"},
    "well": {"rock", "scissors"},
}


def test_pairs_that_fit_no_order_stay_when_another_response_comes(
    store, server, make_prompt, make_responses
):
    server.is_first_better = lambda first, second: second in BEATS[first]
    endpoint = Endpoint(url=server.url, model="m")
    prompt = make_prompt("Best?")
    store.add_prompts([prompt])
    circle = [[["rock"], ["scissors"]], [["paper"], ["rock"]], [["scissors"], ["paper"]]]
    of_the_well = [[["paper"], ["well"]], [["well"], ["rock"]], [["well"], ["scissors"]]]
    for texts, expected in (
        (["rock", "paper", "scissors"], circle),
        (["rock", "paper", "scissors", "well"], circle + of_the_well),
    ):
        store.add_responses(make_responses(prompt, texts))
        annotate_with_judge(store, endpoint, name="j", rubric="", parallel=1)
        assert sorted(tiers(store)) == sorted(expected)
        assert store.counts()["rankings"] == len(expected)


def test_a_rubric_that_comes_back_stands_again_without_a_question(
    store, server, judge, trace, fill, tmp_path
):
    fill(1, 2)
    (tmp_path / "other.md").write_text("Shorter is better.")
    judge()
    judge("--rubric", str(tmp_path / "other.md"))
    assert len(server.calls) == 4
    assert judge()["ranked"] == 1
    assert len(server.calls) == 4
    query = "SELECT id FROM rankings WHERE live = 1"
    [alive] = store.connections.db.query(query)
    assert trace(alive["id"])["rubric"]["text"] == ""
    assert judge()["ranked_before"] == 1
