"""The section of the page Quality on two served policies."""

import re

import pytest

from labeling_app.data_io.served import store_served_feedback
from labeling_app.db.answers.served import insert_served, start_comparison
from labeling_app.db.store import Store
from tests.labeling_app.data_io.test_served import build_served

TITLE = "What people like better in use"


def serve_and_judge(store: Store, other: str, **thumbs: tuple[int, int]) -> None:
    """A comparison at a share of 10 %, with thumbs up and down of both policies."""
    sides = {"policy": "runs/<new>", "against": other}
    number = start_comparison(store.connections, sides, 0.1)
    for variant, (up, down) in thumbs.items():
        for place in range(up + down):
            name = f"{number}-{variant}-{place}"
            served = build_served(name, variant=variant, comparison=number)
            insert_served(store.connections.db, served)
            said = "up" if place < up else "down"
            store_served_feedback(store, "shop", {"id": name, "thumbs": said})


@pytest.fixture
def page(ask):
    def shown(sender: str = "lead") -> str:
        [answer] = ask([("GET", "/lead/quality", None)], sender=sender)
        text = re.sub(r"</?(td|th)[^>]*>", "|", answer.text)
        return re.sub(r"\s+", " ", re.sub(r"</?(b|tr|tbody)>", " ", text))

    return shown


def test_thumbs_of_two_policies_are_compared(store, page):
    assert TITLE not in page()
    serve_and_judge(store, "base", policy=(0, 0), against=(0, 0))
    assert TITLE not in page()  # nobody has judged anything
    serve_and_judge(store, "base", policy=(60, 40), against=(30, 70))
    text = page("admin")
    assert "|runs/&lt;new&gt;||100||60 %|" in text
    assert "|base||100||30 %|" in text
    # The interval is that of tests/policies/serving/test_sequential.py's independent formula.
    assert "Difference +30 points (+8 to +51). People like runs/&lt;new&gt; better." in text


def test_the_newest_come_first_and_one_without_a_verdict_says_so(store, page):
    serve_and_judge(store, "base", policy=(1, 0), against=(0, 0))
    assert "No comparison yet: one of them has no thumbs." in page()
    for place in range(3):
        serve_and_judge(store, f"other-{place}", policy=(1, 1), against=(2, 1))
    text = page("admin")
    assert "Which one people like better is not known yet." in text
    assert [text.find(f"|other-{place}|") > 0 for place in range(3)] == [True] * 3
    assert text.find("|other-2|") < text.find("|other-1|") < text.find("|other-0|")
    assert "|base|" not in text  # the fourth
