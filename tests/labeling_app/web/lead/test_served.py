"""The section of the page Quality on two served policies."""

import re

import pytest

from tests.labeling_app.served import TITLE, serve_and_judge


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
