"""Answers to apps and feedback on them: kept, judged, replaced, compared, forgotten."""

import asyncio
import json
import time

import pytest

from labeling_app.annotators.users import Users
from labeling_app.data_io.exporting import export
from labeling_app.data_io.served import store_served_feedback
from labeling_app.db.answers.served import (
    comparisons,
    count_thumbs,
    find_served,
    forget_served,
    insert_served,
    start_comparison,
)
from labeling_app.web.programs.served import ServedRecords
from rlhf.errors import InputError
from rlhf.records.jsonl import read_jsonl
from rlhf.records.schema import content_id
from rlhf.records.served import NotKeptError, ServedResponse
from tests.labeling_app.served import build_served
from tests.servers.coroutines import run_alone

SIDES = {"policy": "runs/a", "against": "base"}


@pytest.fixture
def keep(store):
    def run(*names: str, **more) -> None:
        with store.connections.write() as db:
            for name in names:
                insert_served(db, build_served(name, **more))

    return run


@pytest.fixture
def say(store):
    return lambda **payload: store_served_feedback(store, "shop", payload)


def test_a_person_and_an_app_without_a_token_never_share_a_name(store, keep):
    keep("c-1", "c-2")
    users, thumb = Users(store), {"id": "c-1", "thumbs": "up"}
    assert store_served_feedback(store, "app", thumb)
    with pytest.raises(InputError, match="'app' is a program that gives feedback"):
        users.add("app", "annotator", "long enough")
    users.add("bot", "annotator", "long enough")
    with pytest.raises(InputError) as caught:
        store_served_feedback(store, "bot", {"id": "c-2", "thumbs": "up"})
    assert str(caught.value) == (
        "'bot' is a person who signs in, and would give this feedback\n"
        "  Send the token of a program: rlhf users token NAME --db DB"
    )
    assert len(live(store)) == 1


def live(store) -> list[tuple]:
    return [(r.tiers, r.flags) for record in store.ranked_prompts() for r in record.rankings]


def test_what_nobody_judged_is_no_prompt_and_no_work(store, keep):
    keep("c-1")
    assert set(store.counts().values()) == {0}
    assert find_served(store.connections.db, "c-1") == build_served("c-1")
    assert find_served(store.connections.db, "c-2") is None


def test_a_thumb_is_exported_as_a_label(store, keep, say, tmp_path):
    keep("c-1")
    keep("c-2", text="Go away.")
    assert say(id="c-1", thumbs="up", note="kind")
    assert say(id="c-2", thumbs="down")
    export(store, tmp_path / "out", "kto", names=True)
    rows = list(read_jsonl(tmp_path / "out" / "train.jsonl"))
    assert [(row["completion"][0]["content"], row["label"]) for row in rows] == [
        ("Hello!", True),
        ("Go away.", False),
    ]
    [record] = store.ranked_prompts()
    assert {r.annotator for r in record.rankings} == {"shop"}
    assert store.counts()["tasks"] == 0


def test_a_changed_thumb_takes_the_place_of_the_earlier_also_back_and_forth(store, keep, say):
    keep("c-1")
    response = content_id("served", "c-1")
    for thumbs in ("up", "down", "up"):
        assert say(id="c-1", thumbs=thumbs)
        assert not say(id="c-1", thumbs=thumbs)
        assert live(store) == [(((response,),), (f"thumbs-{thumbs}",))]


def test_the_same_answer_twice_takes_two_thumbs(store, keep, say):
    keep("c-1", "c-2")
    assert say(id="c-1", thumbs="up")
    assert say(id="c-2", thumbs="down")
    assert len(live(store)) == 2


def test_a_pick_and_a_correction(store, keep, say, tmp_path):
    keep("c-1")
    keep("c-2", text="Go away.")
    assert say(ids=["c-2", "c-1"], pick=1)
    assert say(id="c-2", text="Welcome!")
    one, two = content_id("served", "c-1"), content_id("served", "c-2")
    written = content_id("served", "c-2", "person", "Welcome!")
    assert live(store) == [
        (((one,), (two,)), ()),
        (((written,), (two,)), ("edited",)),
    ]
    export(store, tmp_path / "out", "demonstrations")
    [row] = read_jsonl(tmp_path / "out" / "train.jsonl")
    assert row["completion"][0]["content"] == "Welcome!"


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"id": "c-1"}, "thumbs is None. Send up or down, for example"),
        ({"id": "c-1", "thumbs": "sideways"}, "thumbs is 'sideways'"),
        ({"id": "c-1", "thumbs": "up", "stars": 5}, "Unknown field 'stars'. Send id, thumbs, note"),
        ({"id": 7, "thumbs": "up"}, "id must be text"),
        ({"id": "c-1", "text": " "}, "text must be text that is not empty"),
        ({"id": "c-1", "text": "Hello! "}, "text is the response as it was"),
        ({"ids": ["c-1"], "pick": 0}, "ids must be a list of 2 to 10 ids"),
        ({"ids": ["c-1", "c-1"], "pick": 0}, "Two of the ids are the same"),
        ({"ids": ["c-1", "c-9"], "pick": 0}, "answer different conversations"),
        ({"ids": ["c-1", "c-2"], "pick": 2}, "2 is not a choice among 2 responses"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_stored(store, keep, say, payload, words):
    keep("c-1", "c-2")
    keep("c-9", question="Bye?")
    with pytest.raises(InputError) as caught:
        say(**payload)
    assert words in f"{caught.value.problem}. {caught.value.remedy}"
    assert store.counts()["rankings"] == store.counts()["responses"] == 0


def test_an_unknown_id_is_named(say):
    with pytest.raises(NotKeptError, match="No response with the id 'c-7' is kept"):
        say(id="c-7", thumbs="up")


def test_a_comparison_counts_the_first_thumb_of_each_conversation(store, keep, say):
    number = start_comparison(store.connections, SIDES, 0.1)
    assert start_comparison(store.connections, SIDES, 0.1) == number
    assert start_comparison(store.connections, SIDES, 0.2) == number + 1
    keep("c-1", "c-2", conversation="c-1", comparison=number)
    keep("c-3", comparison=number)
    keep("c-4", comparison=number, variant="against")
    keep("c-5")
    for name, thumbs in [("c-2", "up"), ("c-1", "down"), ("c-2", "down"), ("c-3", "down")]:
        assert say(id=name, thumbs=thumbs)
    assert say(id="c-4", thumbs="up")
    assert say(id="c-5", thumbs="up")
    counts = {"policy": (1, 1), "against": (1, 0)}
    assert count_thumbs(store.connections, number) == counts
    first, second = comparisons(store.connections)
    assert (first["policy"], first["share"], first["thumbs"]) == ("runs/a", 0.1, counts)
    assert second["thumbs"] == {"policy": (0, 0), "against": (0, 0)}


def test_old_answers_are_deleted_and_thumbs_stay(store, keep, say):
    number = start_comparison(store.connections, SIDES, 0.5)
    keep("c-1", "c-2", comparison=number)
    say(id="c-1", thumbs="up")
    assert forget_served(store.connections, time.time() - 60) == 0
    assert forget_served(store.connections, time.time() + 60) == 2
    db = store.connections.db
    assert find_served(db, "c-1") is None
    assert [tuple(row) for row in db.execute("SELECT id, content FROM served")] == [("c-1", None)]
    assert count_thumbs(store.connections, number)["policy"] == (1, 0)
    assert len(live(store)) == 1
    assert forget_served(store.connections, time.time() + 60) == 0


def test_requests_that_arrive_together_are_stored_and_only_the_wrong_are_refused(store):
    records = ServedRecords(store)

    async def run() -> list[object]:
        await asyncio.gather(*(records.keep(build_served(f"c-{n}")) for n in range(20)))
        payloads = [{"id": f"c-{n}", "thumbs": "up"} for n in range(22)]
        sent = (records.add_feedback("shop", one) for one in payloads)
        return await asyncio.gather(*sent, return_exceptions=True)

    found = run_alone(run())
    assert found[:20] == [True] * 20
    assert [type(one) for one in found[20:]] == [NotKeptError, NotKeptError]
    assert store.counts()["rankings"] == 20


def test_feedback_does_not_read_more_of_a_larger_database(store, keep):
    keep("c-1", "c-2")
    db, seen = store.connections.db, []
    db.conn.set_trace_callback(seen.append)
    for thumbs in ("up", "down"):
        store_served_feedback(store, "shop", {"id": "c-1", "thumbs": thumbs})
    count_thumbs(store.connections, 1)
    forget_served(store.connections, 0.0)
    db.conn.set_trace_callback(None)
    asked = [one for one in seen if one.lstrip().startswith(("SELECT", "UPDATE", "DELETE"))]
    plans = {row[3] for one in asked for row in db.execute(f"EXPLAIN QUERY PLAN {one}")}
    assert len(asked) > 10
    assert {one for one in plans if one.startswith("SCAN")} <= {"SCAN totals"}


def test_a_served_response_survives_json():
    served = build_served("c-1")
    content = json.loads(json.dumps(served.content))
    fields = {"id": "c-1", "conversation": "c-1", "variant": "policy"}
    assert ServedResponse.from_content(content, **fields) == served
