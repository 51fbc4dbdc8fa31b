"""A complete report of made-up numbers, and what the page of a report shows."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from policies.evaluate.measures.statistics import judge_wins, spread
from policies.evaluate.report import ReportSample, build_content, render

VOID = {"meta", "img", "input", "br", "link"}


def measurements() -> dict:
    """What is measured of the answers, of the three models."""
    return {
        "kl": {
            "forward": {
                "nats": 2.914,
                "sqrt_nats": 1.707,
                "per_token": 0.07914,
                "estimator": "k3",
                "standard_error": 0.2149,
            },
            "reverse": {
                "nats": 16.42,
                "sqrt_nats": 4.052,
                "per_token": 0.1746,
                "estimator": "k1",
                "standard_error": 0.5513,
            },
        },
        "length": {"policy": 38.14, "reference": 36.85, "rival": 40.62},
        "eos_rate": {"policy": 0.4219, "reference": 0.5156, "rival": 0.3},
        "self_bleu": {"policy": 0.2213, "reference": 0.1107, "rival": 0.1},
        "template": {
            "policy": {"words": "i'm here to help", "share": 0.3217},
            "reference": {"words": "<b>one of the</b>", "share": 0.0213},
            "rival": {"words": "one of the best", "share": 0.0313},
        },
        "log_likelihood": {
            "policy": {"value": -1.214, "low": -1.318, "high": -1.107},
            "reference": {"value": -1.507, "low": -1.613, "high": -1.402},
            "rival": {"value": -2.031, "low": None, "high": None},
        },
        "retained": {
            "before": 3.127,
            "after": 3.184,
            "tokens": 987,
            "difference": {"value": 0.057, "low": 0.031, "high": 0.083},
        },
        "repeats": {"policy": 0.0721, "reference": 0.0611, "rival": 0.05},
        "distinct": {
            "policy": {"distinct_1": 0.3124, "distinct_2": 0.7113},
            "reference": {"distinct_1": 0.4021, "distinct_2": 0.8307},
            "rival": {"distinct_1": 0.4, "distinct_2": 0.8},
        },
    }


def example(seed: int = 0, wins: np.ndarray | None = None) -> dict:
    """A complete report of 12 prompts."""
    generator = np.random.default_rng(seed)
    wins = np.repeat([1.0, 0.5, 0.0], [9, 2, 1]) if wins is None else wins
    rate = judge_wins(wins, seed=seed)
    policy, reference = generator.normal(1, 1, 12), generator.normal(0, 1, 12)
    means = {
        "policy": spread(policy),
        "reference": spread(reference),
        "rival": {"mean": 0.421, "std": 0.934},
    }
    equal = {"value": 0.714, "low": 0.602, "high": 0.813, "n": 12, "level": 0.95}
    return {
        "win_rate": {
            "reward": judge_wins(np.full(12, 1.0), seed=seed),
            "gold": {**rate, "length_controlled": equal},
        },
        "judges": {
            "reward": {"kind": "reward model", "name": "runs/demo/reward", "is_objective": True},
            "gold": {"kind": "signal", "name": "examples.quickstart.sentiment:score"},
        },
        "win_rate_by_source": {"gold": {"travel": {**rate, "n": 7}, "food/~drink": rate}},
        "win_rate_by_length": {"gold": {"9–14 tokens": {**rate, "n": 5}}},
        "rival": {"name": "runs/6/ppo", "win_rate": {"gold": {**rate, "value": 0.611}}},
        "best_of_n": [
            {"n": 1, "nats": 0.0, "reward": 0.012, "gold": 0.021},
            {"n": 2, "nats": 0.1931, "reward": 0.563, "gold": 0.412},
        ],
        **measurements(),
        "reward": means,
        "gold": means,
        "seed": 17,
        "inputs": {"policy": {"path": "runs/7/ppo", "hash": "5c1f0e2ab93d7f10"}, "gold": "a.b:c9"},
    }


def samples(texts: list[str] | None = None) -> list[ReportSample]:
    """One sample for each text, the text in every turn and every answer."""
    texts = texts or [f"text number {n}" for n in range(12)]
    return [
        ReportSample(
            turns=[{"role": role, "content": text} for role in ("user", "assistant", "user")],
            answers={"reference": text, "policy": text, "rival": text},
            scores={
                "reward": {"reference": 0.25, "policy": 1.5 + n, "rival": 0.5},
                "gold": {"reference": 0.5, "policy": 0.5 - (n % 3 - 1) / 4, "rival": 0.5},
            },
        )
        for n, text in enumerate(texts)
    ]


METRICS = [
    {"step": 1, "reward/mean": 0.1, "length": 30.0, "loss/policy": 4.0},
    {"step": 2, "reward/mean": None, "length": 31.5, "loss/policy": 3.0},
]


class Page(HTMLParser):
    """What a page shows: its numbers, its other text, and the attributes of its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, str, str]] = []  # path, value, as shown
        self.words: list[str] = []
        self.verbatim: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data) -> None:
        tags = [tag for tag, _ in self._open]
        classes = " ".join(attributes.get("class") or "" for _, attributes in self._open).split()
        if "script" in tags or "style" in tags:
            return
        if "verbatim" in classes:
            self.verbatim.append(data)
        elif tags and tags[-1] == "data":
            attributes = self._open[-1][1]
            self.numbers.append((attributes["data-path"], attributes["value"], data))
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        """All words and numbers of the page, in a form for reading tests."""
        return " ".join(" ".join(self.words).split())


def look_up(content, pointer: str):
    for key in pointer.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        content = content[int(key)] if isinstance(content, list) else content[key]
    return content


def verdict(report: dict) -> str:
    page = render(build_content(report, samples(), METRICS))
    section = re.search(r'<section class="verdict.*?</section>', page, re.S).group()
    return " ".join(re.sub(r"<[^>]*>", "", section).replace("\u00a0", " ").split())


def require_numbers_of_report(folder: Path) -> None:
    """Require of a folder's report.html that each number on it is the one in its report.json."""
    content = json.loads((folder / "report.json").read_text())
    page = Page((folder / "report.html").read_text())
    assert page.numbers
    for pointer, value, shown in page.numbers:
        expected = look_up(content, pointer)
        assert json.loads(value) == expected, pointer
        if shown == "< 0.001":
            assert expected < 0.001
            continue
        plain = shown.replace("\u00a0%", "")
        in_nats = pointer.startswith(("/log_likelihood", "/retained"))
        percent = shown.endswith("%") or (pointer.endswith("/low") and not in_nats)
        decimals = len(plain.partition(".")[2])
        tolerance = 0.5001 * 10**-decimals / (100 if percent else 1)
        assert float(plain) / (100 if percent else 1) == pytest.approx(expected, abs=tolerance)
    assert not [words for words in page.words if re.search(r"\d", words)]
