"""Votes of live mode: on the page Quality, and a question is one new ranking whatever is said."""

import pytest

from labeling_app.db.answers.live import add_verdict, find_turn, save_turn
from labeling_app.db.queue import Submission
from labeling_app.db.rankings import num_rankings_since
from labeling_app.db.reports import num_made_since
from labeling_app.quality.live_votes import LiveVotes
from labeling_app.quality.report import measure_quality
from labeling_app.rankings.verdicts import EDITED, THUMBS, pick
from rlhf.records.schema import Response
from tests.labeling_app.conftest import build_prompt, build_ranking, quality_page


@pytest.fixture
def ask_live(store):
    """Somebody asks a question of live mode, and says something of its two answers."""

    def run(name: str, turn: str, question: str, *said: str | int) -> None:
        prompt = build_prompt(question)
        a, b = (
            Response(id=f"{turn}-{place}", prompt_id=prompt.id, text=f"{turn} {place}", model="m")
            for place in "ab"
        )
        edited = Response(id=f"{turn}-c", prompt_id=prompt.id, text="better", model="person")
        save_turn(store, turn, name, prompt, [a, b])
        tiers = {
            "up": (((a.id,),), (THUMBS[1],)),
            "down": (((b.id,),), (THUMBS[-1],)),
            "edit": (((edited.id,), (a.id,)), (EDITED,)),
        }
        for number, one in enumerate(said):
            if one == "edit":
                store.add_responses([edited], queue=False)
            ranked, flags = tiers.get(one) or pick([a.id, b.id], one)
            fields = {"id": f"{turn}-{number}", "annotator": name, "flags": flags}
            add_verdict(store, build_ranking(prompt.id, ranked, **fields), [a.id, b.id])

    return run


def test_votes_are_shown_and_a_question_counts_once(store, fill, queue, ask_live):
    ask_live("ann", "t1", "Hi?", 0, "up", "down", "edit")
    ask_live("ann", "t2", "Why?", "tie")
    ask_live("ann", "t3", "Hi?", "all-bad")  # again, with other answers
    ask_live("bob", "t4", "Hi?", 0, 1)  # changed: the second pick counts
    ask_live("bob", "t5", "Nothing said?")
    counts = {"ties": 0, "all_bad": 0, "thumbs_up": 0, "thumbs_down": 0, "edits": 0}
    ann = {"picks": 1, "ties": 1, "all_bad": 1, "thumbs_up": 1, "thumbs_down": 1, "edits": 1}
    assert measure_quality(store).live == [
        LiveVotes(name="ann", questions=3, **ann),
        LiveVotes(name="bob", questions=1, picks=1, **counts),
    ]
    assert len(find_turn(store, "ann", "t1").rankings) == 4
    [row] = [line for line in quality_page(store).splitlines() if "<td>3</td>" in line]
    assert '<th scope="row">ann</th><td>3</td><td>1</td><td>1</td><td>1</td><td>1</td>' in row
    # t1 to t4, and a task of the board
    fill(1, 2)
    queue.add_annotator("cem")
    task = queue.next_task("cem")
    queue.submit("cem", Submission(id="s", task_id=task.id, tiers=((0,), (1,))))
    assert num_rankings_since(store.connections, 0) == 5
    assert num_rankings_since(store.connections, 0, annotators=["bob", "cem"]) == 2
    assert num_made_since(store.connections, 0.0) == 5


def test_without_live_mode_the_page_does_not_speak_of_its_votes(store, fill):
    fill(1, 2)
    assert "<h2>Live mode</h2>" not in quality_page(store)
