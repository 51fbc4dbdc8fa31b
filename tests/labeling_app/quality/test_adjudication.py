"""A lead settles what people differ on: nameless opinions in, the lead's ranking out."""

import json

import pytest

from labeling_app.db.board.overlap import num_open, set_overlap
from labeling_app.db.queue import Submission
from labeling_app.quality.adjudication import Opinion, open_adjudication, opinions_on
from labeling_app.quality.report import measure_quality
from labeling_app.web.board.session import Board
from rlhf.errors import InputError
from tests.labeling_app.asking import ask


def rank(queue, name: str, task, texts: list[str], number: int = 0, **extra) -> None:
    places = {text[-1]: place for place, text in enumerate(task.texts)}
    tiers = tuple((places[text],) for text in texts)
    queue.submit(
        name, Submission(id=f"{name}{task.id}-{number}", task_id=task.id, tiers=tiers, **extra)
    )


@pytest.fixture
def disputed(store, queue, fill) -> int:
    """Two people differ on a task of two answers, 0 and 1, that nobody else has seen."""
    fill(1, 2)
    set_overlap(store.connections, 2)
    for name, order in {"ann": ["0", "1"], "bob": ["1", "0"]}.items():
        queue.add_annotator(name)
        task = queue.next_task(name)
        worst = next(i for i, text in enumerate(task.texts) if text.endswith(order[1]))
        rank(queue, name, task, order, note=f"by {name}", response_flags=((worst, "untrue"),))
    for lead in ("lea", "max"):
        queue.add_annotator(lead)
    return task.id


def decide(queue, lead: str, task_id: int, order: list[str], number: int = 0) -> None:
    open_adjudication(queue, lead, task_id)
    rank(queue, lead, queue.next_task(lead), order, number)


def exported(store, **chosen) -> list[tuple[str, str, bool]]:
    """(annotator, last character of the best answer, whether adjudicated) of every ranking."""
    [record] = store.ranked_prompts(**chosen)
    texts = {response.id: response.text for response in record.responses}
    return [
        (r.annotator, texts[r.tiers[0][0]][-1], "adjudicated" in r.flags) for r in record.rankings
    ]


def test_a_decision_stands_instead_of_what_it_settles(store, queue, disputed):
    assert exported(store) == [("ann", "0", False), ("bob", "1", False)]
    decide(queue, "lea", disputed, ["1", "0"])
    assert exported(store) == [("lea", "1", True)]
    assert exported(store, annotators=["ann"]) == [("ann", "0", False)]
    assert queue.next_task("lea") is None
    assert queue.next_task("max") is None
    decide(queue, "max", disputed, ["0", "1"])
    assert exported(store) == [("max", "0", True)]
    decide(queue, "lea", disputed, ["0", "1"], number=1)
    assert exported(store) == [("lea", "0", True)]


def test_opinions_name_nobody_and_use_the_letters_of_the_screen(
    store, queue, disputed, monkeypatch
):
    monkeypatch.setattr("labeling_app.db.board.leases.random.shuffle", list.reverse)
    open_adjudication(queue, "lea", disputed)
    task = queue.next_task("lea")
    zero, one = ("A", "B") if task.texts[0].endswith("0") else ("B", "A")
    assert sorted(opinions_on(store.connections, task), key=lambda o: o.note) == [
        Opinion(answer=f"{zero} > {one}", flags=[f"{one} untrue"], note="by ann"),
        Opinion(answer=f"{one} > {zero}", flags=[f"{zero} untrue"], note="by bob"),
    ]


def test_the_dashboard_lists_it_and_then_what_was_decided(store, queue, disputed):
    [before] = measure_quality(store).disagreements
    assert (before.task_id, before.adjudication) == (disputed, "")
    assert before.answers == ["A > B", "B > A"]
    decide(queue, "lea", disputed, ["1", "0"])
    after = measure_quality(store)
    assert after.disagreements[0].adjudication in before.answers
    assert {person.name for person in after.people} == {"ann", "bob"}


def test_the_dashboard_says_all_bad_and_does_not_call_it_a_tie(store, queue, disputed):
    all_bad = {"tiers": ((0, 1),), "flags": ("all-bad",)}
    queue.submit("bob", Submission(id="bob-2", task_id=disputed, **all_bad))
    [before] = measure_quality(store).disagreements
    assert sorted(before.answers)[1] == "all bad"
    open_adjudication(queue, "lea", disputed)
    queue.submit("lea", Submission(id="lea", task_id=queue.next_task("lea").id, **all_bad))
    assert measure_quality(store).disagreements[0].adjudication == "all bad"


def test_only_leads_decide_and_only_what_was_ranked(store, queue, disputed):
    board = Board(store, queue)
    payload = {"op": "decide", "task_id": disputed}
    assert ask(board, "bob", payload)["error"] == "Only leads can decide disputed tasks."
    screen = ask(board, "lea", payload, may_lead=True)
    assert len(screen["opinions"]) == 2
    assert "ann" not in json.dumps(screen["task"]["cards"])
    decision = screen["task"]["ticket"]
    for task_id in (999, decision):
        with pytest.raises(InputError, match=f"nothing to decide about task {task_id}"):
            open_adjudication(queue, "lea", task_id)


def test_a_decision_wants_no_further_people(store, queue, disputed):
    decide(queue, "lea", disputed, ["1", "0"])
    set_overlap(store.connections, 5)
    assert store.counts()["open"] == 1
    for name in ("cat", "dan"):
        queue.add_annotator(name)
        assert queue.next_task(name).id == disputed


def test_a_decision_that_was_left_is_nobody_else_s_work(store, queue, disputed):
    open_adjudication(queue, "lea", disputed)
    assert num_open(store.connections) == 0
    queue.skip("lea", skip_id="k", task_id=queue.next_task("lea").id, reason="", note="")
    assert (store.counts()["open"], num_open(store.connections)) == (0, 0)
