"""The section of the page Quality on two served policies."""

import re

import pytest

from labeling_app.data_io.served import store_served_feedback
from labeling_app.db.answers.served import insert_served
from tests.labeling_app.served import TITLE, build_served, serve_and_judge


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
    # The interval is that of tests/policies/serving/thumbs/test_sequential.py, by another formula.
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


def test_thumbs_of_a_policy_that_is_served_alone_are_shown(store, page):
    assert "Thumbs from apps" not in page()
    for number in range(6):
        conversation = "c-0" if number == 1 else f"c-{number}"
        served = build_served(f"c-{number}", conversation=conversation)
        insert_served(store.connections.db, served)
    assert "|runs/a||6||0||0| |–|" in page("admin")
    for number, said in enumerate(("up", "down", "up", "up", "down")):  # c-1 is c-0's conversation
        store_served_feedback(store, "shop", {"id": f"c-{number}", "thumbs": said})
    store_served_feedback(store, "shop", {"id": "c-0", "thumbs": "down"})  # the first one counts
    # p = 3/4, n = 4, z = 1.96: (0.75 + 0.480 ± 1.96 √(0.0469 + 0.0600)) / 1.960
    assert "|runs/a||6||3||1| |75 % (30–95)|" in page("admin")
    assert TITLE not in page("admin")
