"""What the pages and an export count in one database: each says what its number is of."""

import json
import re
from pathlib import Path

import httpx
import pytest

from labeling_app.db.board.checks import CheckRates
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.rankings import RankingCounts, ranking_counts
from labeling_app.quality.adjudication import open_adjudication
from rlhf.cli import main

PROMPTS = "No prompts yet: import a file or paste lines."
NOTHING = "Nothing to rank yet, because no prompt has two responses."
RANK = [("/lead/people", "invite people"), ("/", "rank yourself")]


@pytest.fixture
def labeled(store, import_lines) -> TaskQueue:
    """Five tasks for two people and a gold one.

    | task | rankings |
    | --- | --- |
    | decided | ann and bob differ, lea and then max have decided |
    | flagged | ann flags a response as unsafe, bob says that all are bad |
    | twice | ann, who then ranks it the other way round: one counts |
    | open | ann |
    | nobody | |
    | gold | ann |
    """
    gold = {"prompt": "gold", "responses": ["a", "b"], "tiers": [[0], [1]], "purpose": "gold"}
    names = ("decided", "flagged", "twice", "open", "nobody")
    import_lines(gold, *({"prompt": name, "responses": ["a", "b"]} for name in names))
    set_overlap(store.connections, 2)
    queue = TaskQueue(store)
    for name in ("ann", "bob", "lea", "max"):
        queue.add_annotator(name)

    def rank(name: str, task, best: str, number: int = 0, **more) -> None:
        first = task.texts.index(best)
        tiers = ((first,), (1 - first,))
        sent = Submission(id=f"{name}-{task.id}-{number}", task_id=task.id, tiers=tiers, **more)
        queue.submit(name, sent)

    decided = queue.next_task("ann")
    rank("ann", decided, "a")
    rank("ann", queue.next_task("ann"), "a", response_flags=((0, "unsafe"),))
    twice = queue.next_task("ann")
    rank("ann", twice, "a")
    rank("ann", twice, "b", number=1)
    rank("ann", queue.next_task("ann"), "a")
    with_gold = TaskQueue(store, checks=CheckRates(gold_every=1))
    rank("ann", with_gold.next_task("ann"), "a")
    rank("bob", queue.next_task("bob"), "b")
    flagged = queue.next_task("bob")
    all_bad = Submission(id="bad", task_id=flagged.id, tiers=((0, 1),), flags=("all-bad",))
    queue.submit("bob", all_bad)
    for lead in ("lea", "max"):
        open_adjudication(queue, lead, decided.id)
        rank(lead, queue.next_task(lead), "a")
    return queue


def test_every_count_says_what_it_is_of(store, labeled, ask, tmp_path: Path, capsys):
    # ann 5, bob 2, lea and max 1 each; max's decision replaces ann's, bob's and lea's
    counts = ranking_counts(store.connections.db)
    assert counts == RankingCounts(stored=9, replaced=3, tests=1)
    assert counts.exported == 5
    data, quality = (
        re.sub(r"\s+", " ", re.sub(r"</?d[dt]>", "|", answer.text))
        for answer in ask([("GET", "/lead/data", None), ("GET", "/lead/quality", None)])
    )
    assert "|rankings||9|" in data
    assert "|tasks||5|" in data
    assert (
        "An export holds 5 rankings of 9. A lead's decision stands in place of 3. 1 answer gold"
    ) in data
    assert "|tasks still open||3 of 5|" in quality
    assert "Measured on the latest 6 rankings. Leads' decisions, gold tasks," in quality
    assert main(["export", "--db", str(store.connections.path), "--out", str(tmp_path / "a")]) == 0
    assert "Exported 5 rankings (5 human)" in (said := capsys.readouterr().out)
    assert "Left out: 3 rankings of tasks that a lead has decided." in said
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert (manifest["rankings"], manifest["replaced_by_decisions"]) == (5, 3)


BY_MACHINES = {
    ("ann", "ann"): "",
    ("ann", "fn"): "1 ranking of 2 is by functions or AI judges, not by people.",
    ("ann", "fn", "judge"): "2 rankings of 3 are by functions or AI judges, not by people.",
    ("fn", "fn"): "All rankings are by functions or AI judges, not by people.",
}
KINDS = {"ann": "human", "fn": "signal", "judge": "ai"}


@pytest.mark.parametrize("by", BY_MACHINES)
def test_data_says_how_many_rankings_are_not_by_people(store, import_lines, ask, by):
    lines = [
        {"prompt": f"{n}?", "responses": ["a", "b"], "tiers": [[0], [1]], "annotator": name}
        | {"kind": KINDS[name]}
        for n, name in enumerate(by)
    ]
    import_lines(*lines)
    [data] = ask([("GET", "/lead/data", None)])
    said = re.findall(r"[^<>]*by functions or AI judges[^<>]*", data.text)
    assert " ".join(said).strip() == BY_MACHINES[by]


def test_rankings_of_an_unfinished_import_are_not_counted(store, import_lines):
    line = {"prompt": "?", "responses": ["a", "b"], "tiers": [[0], [1]], "annotator": "fn"}
    import_lines(line | {"kind": "signal"})
    with store.connections.db.atomic():
        store.connections.db.execute("UPDATE imports SET finished_at = NULL")
    assert ranking_counts(store.connections.db).by_machines == 0


def next_steps(answer: httpx.Response) -> tuple[str, list[tuple[str, str]]]:
    """What a page says comes next, and the (address, words) of the links in it."""
    steps = " ".join(re.findall(r'<p class="next">(.*?)</p>', answer.text, re.DOTALL))
    links = re.findall(r'<a href="([^"]*)">([^<]*)</a>', steps)
    return " ".join(re.sub(r"<[^>]*>", "", steps).split()), links


@pytest.mark.parametrize(
    ("num_prompts", "has_loop", "words", "links"),
    [
        (0, False, PROMPTS, [("/lead/data#import-title", "import a file or paste lines")]),
        (0, True, PROMPTS, [("/lead/data#import-title", "import a file or paste lines")]),
        (
            1,
            False,
            f"{NOTHING} Import lines with responses, or sample them on the server with rlhf "
            "generate.",
            [("/lead/data#import-title", "Import lines with responses")],
        ),
        (
            1,
            True,
            f"{NOTHING} The loop samples responses as soon as it has been started.",
            [("/lead/runs", "started")],
        ),
    ],
)
def test_every_page_names_the_same_first_step(fill, ask, num_prompts, has_loop, words, links):
    fill(num_prompts, 1)
    addresses = [("GET", f"/lead/{page}", None) for page in ("data", "people", "quality")]
    shown = [next_steps(page) for page in ask(addresses, sender="admin", has_loop=has_loop)]
    assert shown == [(words, links)] * 3


def test_once_there_are_tasks_the_next_step_is_to_rank(fill, ask):
    fill(1, 2)
    addresses = [("GET", f"/lead/{page}", None) for page in ("data", "people", "quality")]
    data, people, quality = [next_steps(page)[1] for page in ask(addresses, sender="admin")]
    assert (data, people, quality) == (RANK, [], RANK)


def test_without_decisions_and_checks_there_is_one_count(store, fill, queue, ask):
    fill(2, 2)
    queue.add_annotator("ann")
    task = queue.next_task("ann")
    queue.submit("ann", Submission(id="s", task_id=task.id, tiers=((0,), (1,))))
    assert ranking_counts(store.connections.db) == RankingCounts(stored=1, replaced=0, tests=0)
    [data] = ask([("GET", "/lead/data", None)])
    assert "An export holds" not in data.text
