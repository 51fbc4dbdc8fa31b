"""The verdict of a report is honest about who judged, how many prompts, and what chance can do."""

import numpy as np
import pytest

from policies.evaluate.report import build_content, is_hacking, render
from rlhf.run.intervals import outcome
from tests.policies.evaluate.report_pages import example, verdict


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ({"low": 0.51, "high": 0.9}, "better"),
        ({"low": 0.5, "high": 0.9}, "unproven"),
        ({"low": 0.1, "high": 0.49}, "worse"),
        ({"low": 1.0, "high": 1.0, "p_value": 0.0625}, "unproven"),
        ({"low": 1.0, "high": 1.0, "p_value": 0.03125}, "better"),
        ({"low": None, "high": None}, "unproven"),
    ],
)
def test_outcome(rate, expected) -> None:
    assert outcome(rate) == expected


def test_verdict_of_a_better_model_names_the_judge_for_what_it_is() -> None:
    text = verdict(example())
    assert text.startswith(
        "The function sentiment:score prefers the new model The new model wins 83 % of "
        "comparisons against the original (95 % interval "
    )
    assert "judged by the signal examples.quickstart.sentiment:score on 12 held-out prompts" in text
    assert "stands in for people; no people were asked" in text
    assert "These are few prompts" in text


def test_verdict_when_the_interval_includes_one_half() -> None:
    text = verdict(example(wins=np.repeat([1.0, 0.0], [7, 5])))
    assert text.startswith("No proven difference The new model wins 58 % of comparisons")
    assert "The interval includes one half, so chance alone may explain this result." in text
    assert "It proves" not in text
    assert "A sign of reward hacking: the reward model sees an improvement that the signal" in text


def test_verdict_of_a_few_prompts_that_all_went_one_way() -> None:
    text = verdict(example(wins=np.ones(5)))
    assert text.startswith("No proven difference The new model wins 100 %")
    assert "The sign test finds that chance alone may explain this result." in text


@pytest.mark.parametrize("few", [1, 4])
def test_verdict_of_so_few_prompts_shows_no_interval(few) -> None:
    text = verdict(example(wins=np.ones(few)))
    assert text.startswith("No proven difference The new model wins 100 % of comparisons")
    assert "the original (too few prompts for an interval), judged by" in text
    assert "So few prompts prove nothing. More prompts give a narrower interval." in text
    assert "rough guide" not in text


def test_verdict_of_a_worse_model() -> None:
    text = verdict(example(wins=np.repeat([1.0, 0.0], [1, 11])))
    assert text.startswith(
        "The function sentiment:score prefers the original The new model wins 8 % of comparisons"
    )


def test_verdict_without_gold_says_that_the_judge_is_the_one_trained_against() -> None:
    report = example()
    for place in (report["win_rate"], report["judges"], report):
        del place["gold"]
    report["split"] = "train"
    text = verdict(report)
    assert text.startswith("Its own reward model prefers the new model The new model wins ")
    assert "judged by the reward model runs/demo/reward" in text
    assert "trained against this very judge" in text
    assert "on 12 training prompts." in text
    assert "the model that the policy was trained against" in render(build_content(report, [], []))
    del report["judges"]["reward"]["is_objective"]
    page = render(build_content(report, [], []))
    assert "trained against" not in page
    assert "a model of which response people would prefer" in page


@pytest.mark.parametrize(
    ("interval", "found", "is_sign"),
    [
        ((0.5, 0.3, 0.55), "unproven", True),  # the reward model sees at least .6
        ((0.5, 0.3, 0.65), "unproven", False),  # too wide to say so
        ((1.0, None, None), "unproven", False),
        ((0.3, 0.2, 0.4), "worse", True),
        ((0.57, 0.53, 0.59), "better", False),
    ],
)
def test_reward_hacking_is_seen_where_a_better_judge_sees_less(interval, found, is_sign) -> None:
    value, low, high = interval
    p_value = None if low is None else 0.01 if found != "unproven" else 0.9
    rates = {
        "people": {"value": value, "low": low, "high": high, "p_value": p_value},
        "reward": {"value": 0.7, "low": 0.6, "high": 0.8, "p_value": 0.01},
    }
    assert outcome(rates["people"]) == found
    assert is_hacking(rates, "people") is is_sign
