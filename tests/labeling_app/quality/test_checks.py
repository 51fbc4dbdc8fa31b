"""Training comes first, gold and repeats are mixed in, and none of them is exported."""

import json
import re

import pytest

from labeling_app.db.board.checks import CheckRates
from labeling_app.db.board.overlap import num_open
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.rounds import ensure_round
from labeling_app.quality.checks import check_scores
from labeling_app.web.board.session import Board
from tests.labeling_app.asking import ask
from tests.labeling_app.conftest import quality_page


def rank(queue: TaskQueue, name: str, task, first: str) -> None:
    best = task.texts.index(first)
    others = tuple(i for i in range(len(task.texts)) if i != best)
    id = f"{name}-{task.id}"
    queue.submit(name, Submission(id=id, task_id=task.id, tiers=((best,), others)))


@pytest.fixture
def imported(store, import_lines):
    """One training item, two gold items and 30 plain tasks."""
    lines = [
        {"prompt": f"{purpose} {n}", "responses": ["good", "bad"], "tiers": [[0], [1]],
         "purpose": purpose, "explanation": "Because **so**."}
        for purpose, count in {"training": 1, "gold": 2}.items() for n in range(count)
    ]  # fmt: skip
    lines += [{"prompt": f"plain {n}", "responses": ["good", "bad"]} for n in range(30)]
    import_lines(*lines)
    return store


def prompt_of(task) -> str:
    return task.messages[0]["content"]


def test_training_comes_first_and_answers_back(imported, queue):
    queue.add_annotator("ann")
    board = Board(imported, queue)
    screen = ask(board, "ann", {"op": "next"})
    html = [card["html"] for card in screen["task"]["cards"]]
    good = next(i for i, text in enumerate(html) if "good" in text)
    wrong = [[1 - good], [good]]
    submit = {"op": "submit", "id": "u1", "ticket": screen["task"]["ticket"], "tiers": wrong}
    after = ask(board, "ann", submit)
    assert after["feedback"]["agreement"] == 0.0
    assert after["feedback"]["expected"] == [[good], [1 - good]]
    assert "<strong>so</strong>" in after["feedback"]["explanation"]
    assert "plain 0" in after["task"]["prompt"][0]["html"]  # without rates, no gold
    plain = {"op": "submit", "id": "u2", "ticket": after["task"]["ticket"], "tiers": [[0], [1]]}
    assert ask(board, "ann", plain)["feedback"] is None


def test_gold_items_are_scored_and_everybody_gets_them(imported):
    queue = TaskQueue(imported, checks=CheckRates(gold_every=1))
    for name, answers in {"ann": ["good", "good"], "bob": ["good", "bad"]}.items():
        queue.add_annotator(name)
        rank(queue, name, queue.next_task(name), "good")  # training
        for answer in answers:
            task = queue.next_task(name)
            assert prompt_of(task).startswith("gold")
            rank(queue, name, task, answer)
        assert prompt_of(queue.next_task(name)).startswith("plain")  # no gold is left
    gold = check_scores(imported.connections)["gold"]
    assert (gold["ann"][0], gold["bob"][0]) == (1.0, 0.5)


def test_repeats_measure_self_agreement_and_come_once(imported):
    queue = TaskQueue(imported, checks=CheckRates(repeat_every=1))
    queue.add_annotator("ann")
    seen = []
    for _ in range(14):
        task = queue.next_task("ann")
        seen.append(prompt_of(task))
        rank(queue, "ann", task, "good" if task.purpose != "repeat" else "bad")
    # After the training item and eleven plain ones, the oldest but ten is asked again.
    assert seen[:12] == ["training 0", *[f"plain {n}" for n in range(11)]]
    assert seen[12] == "plain 0"
    assert seen[13] == "plain 11"
    assert check_scores(imported.connections)["repeat"]["ann"][0] == 0.0
    assert "ann" in quality_page(imported)


def test_checks_are_never_exported(imported):
    queue = TaskQueue(imported, checks=CheckRates(gold_every=1, repeat_every=1))
    queue.add_annotator("ann")
    while task := queue.next_task("ann"):
        rank(queue, "ann", task, "good")
    exported = [r.prompt.text for r in imported.ranked_prompts() if r.rankings]
    assert exported == [f"plain {n}" for n in range(30)]
    assert all(len(r.rankings) <= 1 for r in imported.ranked_prompts())


def test_a_check_without_an_answer_is_a_bad_line(tmp_path, refused):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"prompt": "a", "responses": ["b", "c"], "purpose": "gold"}))
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert "purpose is 'gold', and tiers name 0 of 2 responses" in said
    for responses, of_all in ((["b"], "1 response"), (["b", "c"], "2 responses")):
        alone = {"prompt": "a", "responses": responses, "tiers": [[0]], "purpose": "gold"}
        path.write_text(json.dumps(alone))
        words = refused("import", path, "--db", tmp_path / "new.db")
        assert re.search(rf"purpose is 'gold', and tiers name 1 of {of_all}\b", words)


GOLD = {"prompt": "plain 0", "responses": ["good", "bad"], "tiers": [[0], [1]], "purpose": "gold"}


def test_an_import_counts_its_checks_and_says_which_it_did_not_make(
    imported, queue, import_lines, tmp_path
):
    queue.add_annotator("ann")
    rank(queue, "ann", queue.next_task("ann"), "good")  # training
    assert prompt_of(queue.next_task("ann")) == "plain 0"
    lines = [
        GOLD,
        {**GOLD, "prompt": "plain 1"},
        {**GOLD, "prompt": "gold 0"},
        {**GOLD, "prompt": "gold 0", "tiers": [[1], [0]]},
        {**GOLD, "prompt": "gold 0", "purpose": "training"},
    ]
    report = import_lines(*lines)
    path = tmp_path / "more.jsonl"
    # "gold 0" of the third line is that very check already: neither made nor refused.
    assert (report["new_checks"], report["checks_not_made"], report["bad_lines"]) == (1, 3, 0)
    assert report["first_not_made"] == [
        f"{path}:1: no gold task was made: somebody has seen this prompt",
        f"{path}:4: no gold task was made: the prompt has one with another answer",
        f"{path}:5: no training task was made: the prompt has a gold task",
    ]


def test_a_check_shows_the_responses_of_its_line_alone(imported, queue, import_lines):
    more = {**GOLD, "prompt": "plain 3", "responses": ["fine", "poor", "who knows"]}
    assert import_lines(more)["new_checks"] == 1
    query = "SELECT responses, purpose FROM tasks JOIN prompts p ON p.id = prompt_id WHERE messages"
    [task] = imported.connections.db.query(f"{query} LIKE '%plain 3%'")
    [prompt] = [prompt for prompt in imported.prompts() if prompt.text == "plain 3"]
    texts = {response.id: response.text for response in imported.responses(prompt.id)}
    assert sorted(texts.values()) == ["bad", "fine", "good", "poor", "who knows"]
    assert [texts[id_] for id_ in json.loads(task["responses"])] == more["responses"]
    assert task["purpose"] == "gold"


def test_new_responses_make_no_check_of_a_prompt_that_somebody_has_seen(
    imported, queue, import_lines
):
    queue.add_annotator("ann")
    rank(queue, "ann", queue.next_task("ann"), "good")  # training
    assert prompt_of(queue.next_task("ann")) == "plain 0"
    before = imported.counts()["tasks"]
    report = import_lines({**GOLD, "responses": ["fine", "poor"]})
    assert (report["new_checks"], report["checks_not_made"]) == (0, 1)
    assert "somebody has seen this prompt" in report["first_not_made"][0]
    assert imported.counts()["tasks"] == before


def test_a_prompt_that_a_round_has_chosen_becomes_no_check(imported, import_lines):
    number = ensure_round(imported.connections.db, "hash", {})
    imported.connections.db.execute("UPDATE tasks SET round_id = ?", [number])
    report = import_lines(GOLD)
    assert report["checks_not_made"] == 1
    assert "a round or an evaluation has chosen this prompt" in report["first_not_made"][0]


def test_what_is_a_check_gets_no_new_responses_and_no_task_for_them(imported, make_responses):
    checks = {p.text for p, _ in imported.prompts_lacking_responses(1, "a model")}
    assert checks == {f"plain {n}" for n in range(30)}
    [gold] = [prompt for prompt in imported.prompts() if prompt.text == "gold 0"]
    [training] = [prompt for prompt in imported.prompts() if prompt.text == "training 0"]
    before = imported.counts()["tasks"]
    for prompt in (gold, training):
        imported.add_responses(make_responses(prompt, ["new"]))
    assert imported.counts()["tasks"] == before


def test_checks_and_what_one_person_is_asked_again_leave_nothing_open(imported):
    queue = TaskQueue(imported, checks=CheckRates(gold_every=1, repeat_every=1))
    queue.add_annotator("ann")
    assert imported.counts()["open"] == 30
    assert num_open(imported.connections) == 30
    while (task := queue.next_task("ann")).purpose != "repeat":
        assert num_open(imported.connections) == imported.counts()["open"] + (
            task.purpose == "rank"
        )
        rank(queue, "ann", task, "good")
    # Eleven plain ones are done; the repeat on the screen is nobody else's work.
    assert num_open(imported.connections) == imported.counts()["open"] == 19
    assert "<dd>19 of 30</dd>" in quality_page(imported)  # not of the checks and the repeat, too
