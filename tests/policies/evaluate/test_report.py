"""Every number on the page is in report.json, the verdict is honest, hostile texts are inert."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from policies.evaluate.measures.statistics import judge_wins, spread
from policies.evaluate.report import (
    ReportSample,
    build_content,
    headline,
    is_hacking,
    outcome,
    render,
    write_report,
)
from rlhf.run.rundir import RunDir

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</div></details></script><img src=x onerror='window.hacked = 1'>",
    "${window.hacked = 1} {{ 7 * 191 }} {% raw %}",
    '"><svg onload=alert(1)>',
    "\u202egnp.exe \u2066\u2067 \x07\x1b[31m",
    "",
    "long " * 20_000,
]
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


def test_every_number_on_the_page_is_the_one_in_report_json(tmp_path) -> None:
    write_report(example(), samples(), METRICS, tmp_path / "report.json", tmp_path / "report.html")
    require_numbers_of_report(tmp_path)


def test_so_is_every_number_of_an_evaluation_with_a_rival_and_a_judge_model(done: RunDir) -> None:
    assert {"reward", "gold", "ai"} == set(done.read_report()["win_rate"])
    require_numbers_of_report(done.path)


def test_the_page_shows_all_the_numbers_that_the_contract_names() -> None:
    page = Page(render(build_content(example(), samples(), METRICS)))
    shown = {pointer for pointer, _, _ in page.numbers}
    wanted = {f"/win_rate/{j}/{k}" for j in ("reward", "gold") for k in ("value", "low", "high")}
    wanted |= {f"/kl/{d}/{k}" for d in ("forward", "reverse") for k in ("nats", "per_token")}
    wanted |= {f"/kl/{d}/standard_error" for d in ("forward", "reverse")}
    wanted |= {f"/kl/{d}/sqrt_nats" for d in ("forward", "reverse")}
    wanted |= {"/win_rate/gold/length_controlled/value", "/rival/win_rate/gold/value"}
    wanted |= {"/best_of_n/1/nats", "/best_of_n/1/gold", "/win_rate_by_length/gold/9–14 tokens/n"}
    for side in ("policy", "reference", "rival"):
        wanted |= {
            f"/self_bleu/{side}",
            f"/template/{side}/share",
            f"/repeats/{side}",
            f"/length/{side}",
            f"/eos_rate/{side}",
            f"/reward/{side}/mean",
        }
        wanted |= {f"/distinct/{side}/distinct_{n}" for n in (1, 2)} | {f"/reward/{side}/std"}
        wanted |= {f"/samples/11/scores/{judge}/{side}" for judge in ("reward", "gold")}
    wanted |= {"/seed", "/win_rate/gold/n", "/win_rate_by_source/gold/food~1~0drink/value"}
    assert wanted <= shown


def test_report_json_keeps_what_was_given_and_adds_verdict_curves_and_samples(tmp_path) -> None:
    given = {**example(), "extra": {"kept": True}, "seconds": 3.0}
    content = write_report(given, samples(), METRICS, tmp_path / "a.json", tmp_path / "a.html")
    assert json.loads((tmp_path / "a.json").read_text()) == content
    assert {name: content[name] for name in given} == given
    assert content["verdict"] == {"judge": "gold", "outcome": "better"}
    assert content["training"] == {
        "reward/mean": [[1, 0.1], [2, None]],
        "length": [[1, 30.0], [2, 31.5]],
    }
    assert content["samples"][1]["scores"]["reward"]["policy"] == 2.5
    brief = headline(content)
    assert set(brief) >= {"verdict", "win_rate", "kl", "length", "eos_rate", "seconds"}
    assert not set(brief) & {"samples", "training", "inputs"}


def test_the_reverse_kl_is_drawn_where_training_measured_it() -> None:
    measured, audited = "kl/reverse_k1_per_token", "kl_audit/reverse_k1_per_token"
    metrics = [{**METRICS[0], measured: 0.01, audited: 0.02}, {**METRICS[1], measured: 0.03}]
    content = build_content(example(), samples(), metrics)
    assert content["training"][measured] == [[1, 0.01], [2, 0.03]]
    assert content["training"][audited] == [[1, 0.02]]
    pictures = re.findall('base64,([^"]+)', render(content))
    drawn = "".join(base64.b64decode(one).decode() for one in pictures)
    for title in ("Reverse KL, nats per token", "Audited KL, nats per token"):
        assert f"<!-- {title} -->" in drawn


def test_the_same_numbers_give_the_same_bytes(tmp_path) -> None:
    first = render(build_content(example(), samples(), METRICS))
    assert render(build_content(example(), samples(), METRICS)) == first


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
        "The new model is better The new model wins 83 % of comparisons against the original "
        "(95 % interval "
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
    assert text.startswith("The new model is worse The new model wins 8 % of comparisons")


def test_verdict_without_gold_says_that_the_judge_is_the_one_trained_against() -> None:
    report = example()
    for place in (report["win_rate"], report["judges"], report):
        del place["gold"]
    report["split"] = "train"
    text = verdict(report)
    assert "judged by the reward model runs/demo/reward" in text
    assert "trained against this very judge" in text
    assert "on 12 training prompts." in text
    assert "the model that the policy was trained against" in render(build_content(report, [], []))
    del report["judges"]["reward"]["is_objective"]
    page = render(build_content(report, [], []))
    assert "trained against" not in page
    assert "a model of which answer people would prefer" in page


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


def test_a_report_of_the_bare_minimum_renders() -> None:
    report = example()
    for name in ("judges", "gold", "rival", "best_of_n", "self_bleu", "template", "repeats"):
        del report[name]
    del report["win_rate_by_source"], report["win_rate_by_length"]
    del report["kl"]["reverse"]
    bare = ("value", "low", "high", "n")
    report["win_rate"] = {
        judge: {key: rate[key] for key in bare} for judge, rate in report["win_rate"].items()
    }
    page = Page(render(build_content(report, [], [])))
    assert "judged by the signal" in page.text
    assert "No samples were kept." in page.text


def test_the_page_says_what_is_known_of_the_cost() -> None:
    known = {"device_hours": 1234.5, "price_per_hour": 2.0, "price": 2469.0, "annotator_hours": 4.5}
    report = {**example(), "cost": {**known, "price_per_point": 78.36}}
    page = Page(render(build_content(report, samples(), METRICS)))
    shown = {pointer: text for pointer, _, text in page.numbers if pointer.startswith("/cost/")}
    assert shown == {
        "/cost/device_hours": "1,234",
        "/cost/price_per_hour": "2",
        "/cost/price": "2,469",
        "/cost/annotator_hours": "4.5",
        "/cost/price_per_point": "78.4",
    }
    assert "of a hundredth above one half, judged by the signal" in page.text
    hours = {name: None for name in (*known, "price_per_point")} | {"device_hours": 0.25}
    page = Page(render(build_content({**report, "cost": hours}, samples(), METRICS)))
    assert [p for p, _, _ in page.numbers if p.startswith("/cost/")] == ["/cost/device_hours"]
    assert "What it cost" in page.text
    assert "annotators" not in page.text.lower()
    page = Page(render(build_content(example(), samples(), METRICS)))
    assert "What it cost" not in page.text


def test_the_page_says_what_the_reverse_kl_was_measured_with() -> None:
    page = Page(render(build_content(example(), samples(), METRICS)))
    assert (
        "The original model was loaded to measure it, which the default KL term does not need"
        in page.text
    )
    assert "measured with the original model loaded" in page.text


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_shown_and_nothing_else(text) -> None:
    report = example()
    for place in ("win_rate_by_source", "win_rate_by_length"):
        report[place] = {"gold": {text: report["win_rate"]["gold"]}}
    report["judges"]["gold"]["name"] = text
    report["inputs"] = {text: {"path": text, "hash": text}}
    harmless = Page(render(build_content(example(), samples(["x"]), METRICS)))
    page = Page(render(build_content(report, samples([text]), METRICS)))
    kinds = {(tag, name) for tag, attributes in page.elements for name in attributes}
    assert kinds <= {(tag, name) for tag, attributes in harmless.elements for name in attributes}
    assert sum(tag == "script" for tag, _ in page.elements) == 1
    if text:
        assert page.verbatim.count(text) >= 5
    else:
        assert "(empty)" in page.verbatim


def test_nothing_points_outside_and_the_policy_allows_the_one_script() -> None:
    text = render(build_content(example(), samples(HOSTILE), METRICS))
    page = Page(text)
    links = [a[n] for _, a in page.elements for n in ("src", "href", "action", "data") if n in a]
    assert len(links) == 6
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert "url(" not in text
    assert "@import" not in text
    script = re.search(r"<script>(.*?)</script>", text, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for _, a in page.elements if "http-equiv" in a)
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_first_ten_samples_are_open_and_each_knows_its_winner() -> None:
    page = Page(render(build_content(example(), samples(), METRICS)))
    details = [a for tag, a in page.elements if tag == "details" and a.get("class") == "sample"]
    assert ["open" in a for a in details] == [True] * 10 + [False] * 2
    assert [a["data-winner"] for a in details[:3]] == ["new", "tie", "original"]


def test_the_winner_is_by_the_first_judge_with_an_opinion() -> None:
    unclear = {"policy": None, "reference": None}
    ours, theirs = {"policy": 1.0, "reference": 0.0}, {"policy": 0.0, "reference": 1.0}
    scores = [
        {"ai": unclear, "gold": theirs, "reward": ours},
        {"ai": ours, "gold": theirs, "reward": theirs},
        {"ai": unclear},
    ]
    shown = [replace(samples()[0], scores=one) for one in scores]
    page = Page(render(build_content(example(), shown, METRICS)))
    details = [a for tag, a in page.elements if tag == "details" and a.get("class") == "sample"]
    assert [a["data-winner"] for a in details] == ["original", "new", "tie"]


def test_numbers_that_are_not_finite_and_broken_text_are_stored_as_json_can_hold_them(
    tmp_path,
) -> None:
    report = example()
    report["kl"]["reverse"]["nats"] = float("inf")
    given = [
        ReportSample(
            turns=[{"role": "user", "content": "\ud800"}],
            answers={"reference": "a", "policy": "b"},
            scores={"reward": {"reference": float("nan"), "policy": 0.0}},
        )
    ]
    write_report(report, given, METRICS, tmp_path / "a.json", tmp_path / "a.html")
    content = json.loads(
        (tmp_path / "a.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert content["kl"]["reverse"]["nats"] is None
    assert content["samples"][0]["turns"][0]["content"] == "?"
    assert '<b><span class="none">–</span> nats</b>' in (tmp_path / "a.html").read_text()


def test_a_report_that_lacks_a_number_leaves_no_file(tmp_path) -> None:
    report = example()
    del report["length"]["reference"]
    with pytest.raises(KeyError, match="reference"):
        write_report(report, samples(), METRICS, tmp_path / "a.json", tmp_path / "a.html")
    assert list(tmp_path.iterdir()) == []


def test_no_number_is_minus_nothing() -> None:
    content = example()
    content["reward"]["policy"]["mean"] = -0.001
    content["kl"]["forward"]["nats"] = -0.0001
    page = render(build_content(content, samples(), METRICS))
    assert ">+0.00<" in page
    assert ">-0.00" not in page
