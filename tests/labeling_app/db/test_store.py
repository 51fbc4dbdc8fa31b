"""The database keeps what it is given, exactly, and refuses what makes no sense."""

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from labeling_app.annotators.rounds import queue_round
from labeling_app.db.store import Store
from labeling_app.db.tasks import open_tasks, set_priorities
from rlhf.errors import InputError
from rlhf.records.schema import Response, Sampling
from tests.labeling_app.conftest import build_ranking as ranking

HOSTILE = [
    "<script>window.x=1</script>",
    "${window.x=1}",
    "\\u12 \\",
    "\u202eabc",
    "é" * 100_000,
    "🦊",
]


def test_every_field_of_a_response_comes_back(store, make_prompt):
    prompt = make_prompt("How?")
    response = Response(
        id="a", prompt_id=prompt.id, text="So.", model="m", model_fingerprint="f1",
        tokenizer_fingerprint="t1", sampling=Sampling(temperature=0.7, seed=3), sample_index=2,
        token_ids=(5, 6, 7), finished=False,
    )  # fmt: skip
    bare = Response(id="b", prompt_id=prompt.id, text="Thus.", model="a")
    store.add_prompts([prompt])
    assert store.add_responses([response, bare]) == 2
    assert store.responses(prompt.id) == [bare, response]  # model "a" sorts before "m"
    assert store.prompts() == [prompt]


def test_adding_twice_changes_nothing(store, make_prompt, make_responses):
    prompt = make_prompt("How?")
    first, second = make_responses(prompt, ["one", "two"])
    judged = ranking(prompt.id, [[first.id], [second.id]])
    counts = []
    for _ in range(2):
        counts.append(store.add_prompts([prompt]))
        counts.append(store.add_responses([first, second]))
        counts.append(store.add_rankings([judged]))
    assert counts == [1, 2, 1, 0, 0, 0]
    expected = {"prompts": 1, "responses": 2, "rankings": 1, "tasks": 1, "open": 1}
    assert store.counts() == expected


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_stored_exactly(store, text, make_prompt, make_responses):
    prompt = make_prompt(text)
    store.add_prompts([prompt])
    store.add_responses(make_responses(prompt, [text, "other"]))
    [record] = store.ranked_prompts()
    assert record.prompt.text == text
    assert record.responses[0].text == text


def test_prompts_lacking_responses(store, make_prompt):
    asked, unasked = make_prompt("asked"), make_prompt("unasked")
    store.add_prompts([asked, unasked])
    answer = Response(id="a", prompt_id=asked.id, text="x", model="m", model_fingerprint="f")
    store.add_responses([answer])
    assert store.prompts_lacking_responses(1, "f") == [(unasked, 0)]
    assert store.prompts_lacking_responses(2, "f") == [(asked, 1), (unasked, 0)]
    assert store.prompts_lacking_responses(1, "other model") == [(asked, 0), (unasked, 0)]


def test_prompts_of_one_split(store, make_prompt):
    train, test = make_prompt("a"), make_prompt("b", "test")
    store.add_prompts([train, test])
    assert store.prompts("test") == [test]
    assert store.prompts() == [train, test]


def test_filters_choose_rankings_and_keep_prompts(store, make_prompt, make_responses):
    prompt, unanswered = make_prompt("How?"), make_prompt("Unanswered")
    first, second = make_responses(prompt, ["one", "two"])
    store.add_prompts([prompt, unanswered])
    store.add_responses([first, second])
    people = ranking(prompt.id, [[first.id], [second.id]])
    signal = ranking(
        prompt.id, [[second.id], [first.id]], id="r2", annotator="signal:x:y", kind="signal"
    )
    store.add_rankings([people, signal])
    assert [r.rankings for r in store.ranked_prompts()] == [(people, signal)]
    assert [r.rankings for r in store.ranked_prompts(kinds=["human"])] == [(people,)]
    assert [r.rankings for r in store.ranked_prompts(annotators=["signal:x:y"])] == [(signal,)]
    assert [r.rankings for r in store.ranked_prompts(kinds=["ai"])] == [()]


def test_superseding_keeps_the_old_ranking_in_the_database(store, make_prompt, make_responses):
    prompt = make_prompt("How?")
    first, second = make_responses(prompt, ["one", "two"])
    store.add_prompts([prompt])
    store.add_responses([first, second])
    old = ranking(prompt.id, [[first.id], [second.id]])
    new = ranking(prompt.id, [[second.id], [first.id]], id="r2")
    store.add_rankings([old])
    store.add_rankings([new], supersede=True)
    [record] = store.ranked_prompts()
    assert record.rankings == (new,)
    assert store.counts()["rankings"] == 1
    assert store.connections.db.execute("SELECT COUNT(*) FROM rankings").fetchone()[0] == 2


def test_scores_come_back_as_they_were(store, make_prompt, make_responses):
    prompt = make_prompt("How?")
    first, second = make_responses(prompt, ["one", "two"])
    store.add_prompts([prompt])
    store.add_responses([first, second])
    scored = ranking(prompt.id, [[second.id], [first.id]], scores=(0.1 + 0.2, -7))
    store.add_rankings([scored])
    [record] = store.ranked_prompts()
    assert record.rankings == (scored,)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM rankings",
        "UPDATE rankings SET tiers = '[]'",
        "UPDATE rankings SET scores = '[1, 0]'",
    ],
)
def test_rankings_cannot_be_changed_or_deleted(store, statement, make_prompt, make_responses):
    prompt = make_prompt("How?")
    first, second = make_responses(prompt, ["one", "two"])
    store.add_prompts([prompt])
    store.add_responses([first, second])
    store.add_rankings([ranking(prompt.id, [[first.id], [second.id]])])
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        store.connections.db.execute(statement)


def test_a_signal_cannot_pass_for_a_person(store, make_prompt, make_responses):
    prompt = make_prompt("How?")
    first, second = make_responses(prompt, ["one", "two"])
    store.add_prompts([prompt])
    store.add_responses([first, second])
    store.add_rankings([ranking(prompt.id, [[first.id], [second.id]])])
    with pytest.raises(InputError, match=r"'ann' is an annotator of kind human .* not signal"):
        store.add_rankings([ranking(prompt.id, [[first.id]], id="r2", kind="signal")])


def test_refusals_say_what_is_wrong(store, tmp_path, make_prompt):
    prompt = make_prompt("How?")
    empty = Response(id="e", prompt_id=prompt.id, text=" \n", model="m")
    with pytest.raises(InputError, match=r"Response e .* is empty"):
        store.add_responses([empty])
    with pytest.raises(InputError, match="which is not in the database"):
        store.add_responses([Response(id="a", prompt_id=prompt.id, text="x", model="m")])
    store.add_prompts([prompt])
    with pytest.raises(InputError, match=r"names responses its prompt does not have: \['zz'\]"):
        store.add_rankings([ranking(prompt.id, [["zz"]])])
    with pytest.raises(InputError, match=r"No label database at .*\n.*rlhf import"):
        Store(tmp_path / "none.db", must_exist=True)
    not_a_database = tmp_path / "letter.db"
    not_a_database.write_text("Dear Sir or Madam, this is a letter and not a database at all.")
    with pytest.raises(InputError, match="cannot be used as a label database"):
        Store(not_a_database)


def test_new_responses_join_an_unseen_task_and_open_another_after_that(
    store, queue, make_prompt, make_responses
):
    prompt = make_prompt("How?")
    store.add_prompts([prompt])
    store.add_responses(make_responses(prompt, ["one"]))
    assert store.counts()["tasks"] == 0  # one response is nothing to rank
    store.add_responses(make_responses(prompt, ["one", "two"]))
    store.add_responses(make_responses(prompt, ["three"], model="z"))
    queue.add_annotator("ann")
    task = queue.next_task("ann")
    assert sorted(task.texts) == ["one", "three", "two"]
    store.add_responses(make_responses(prompt, ["four"], model="z2"))
    assert store.counts()["tasks"] == 2
    assert len(queue.next_task("ann").texts) == 3  # what was shown stays as it was shown


def test_new_responses_leave_the_choice_of_a_round_alone(
    store, make_prompt, make_responses
) -> None:
    prompt = make_prompt("How?")
    first, second, third = make_responses(prompt, ["one", "two", "three"])
    queue_round(
        store, {"policy": {"path": "p", "hash": "h"}}, [(prompt, (first, second), "why")], {}
    )
    store.add_responses([third])
    query = "SELECT responses, round_id, reason FROM tasks ORDER BY id"
    tasks = store.connections.db.execute(query)
    assert [(json.loads(ids), *rest) for ids, *rest in tasks] == [
        ([first.id, second.id], 1, "round 1: why"),
        ([first.id, second.id, third.id], None, ""),
    ]


def test_an_explanation_that_begins_like_a_round_is_only_read_by_people(
    store, make_prompt, make_responses
) -> None:
    prompt = make_prompt("How?")
    first, second = make_responses(prompt, ["one", "two"])
    store.add_prompts([prompt])
    store.add_responses([first, second])
    [(task_id, _, _)] = open_tasks(store.connections)
    set_priorities(store.connections, [(task_id, "round numbers first")])
    assert [task for task, _, _ in open_tasks(store.connections)] == [task_id]


def test_eight_threads_read_then_write_and_lose_nothing(store):
    store.connections.db.execute("INSERT INTO settings VALUES ('counter', '0')")

    def add(num: int) -> None:
        for _ in range(num):
            with store.connections.write() as db:
                query = "SELECT value FROM settings WHERE name = 'counter'"
                value = int(db.execute(query).fetchone()[0])
                update = "UPDATE settings SET value = ? WHERE name = 'counter'"
                db.execute(update, [str(value + 1)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, [40] * 8))
    query = "SELECT value FROM settings WHERE name = 'counter'"
    assert store.connections.db.execute(query).fetchone()[0] == "320"


def test_a_failed_transaction_leaves_nothing(store, make_prompt):
    def add_and_fail() -> None:
        with store.connections.write():
            store.add_prompts([make_prompt("a")])
            raise KeyError

    with pytest.raises(KeyError):
        add_and_fail()
    assert store.counts()["prompts"] == 0
