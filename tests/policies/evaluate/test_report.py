"""Every number on the page is in report.json, and hostile texts are inert."""

import base64
import hashlib
import json
import re
from dataclasses import replace

import pytest

from policies.evaluate.report import ReportSample, build_content, headline, render, write_report
from rlhf.run.rundir import RunDir
from tests.policies.evaluate.report_pages import (
    METRICS,
    Page,
    example,
    require_numbers_of_report,
    samples,
)

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</div></details></script><img src=x onerror='window.hacked = 1'>",
    "${window.hacked = 1} {{ 7 * 191 }} {% raw %}",
    '"><svg onload=alert(1)>',
    "\u202egnp.exe \u2066\u2067 \x07\x1b[31m",
    "",
    "long " * 20_000,
]


@pytest.fixture(scope="module")
def usual() -> str:
    """The page of the example: drawing its pictures takes a second."""
    return render(build_content(example(), samples(), METRICS))


@pytest.fixture(scope="module")
def harmless() -> Page:
    """The page of one harmless sample."""
    return Page(render(build_content(example(), samples(["x"]), METRICS)))


def test_every_number_on_the_page_is_the_one_in_report_json(tmp_path) -> None:
    write_report(example(), samples(), METRICS, tmp_path / "report.json", tmp_path / "report.html")
    require_numbers_of_report(tmp_path)


def test_so_is_every_number_of_an_evaluation_with_a_rival_and_a_judge_model(done: RunDir) -> None:
    assert {"reward", "gold", "ai"} == set(done.read_report()["win_rate"])
    require_numbers_of_report(done.path)


def test_the_page_shows_all_the_numbers_that_the_contract_names(usual: str) -> None:
    page = Page(usual)
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


def test_the_same_numbers_give_the_same_bytes(usual: str) -> None:
    assert render(build_content(example(), samples(), METRICS)) == usual


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


def test_the_page_says_what_is_known_of_the_cost(usual: str) -> None:
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
    page = Page(usual)
    assert "What it cost" not in page.text


def test_the_page_says_what_the_reverse_kl_was_measured_with(usual: str) -> None:
    page = Page(usual)
    assert (
        "The original model was loaded to measure it, which the default KL term does not need"
        in page.text
    )
    assert "measured with the original model loaded" in page.text


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_shown_and_nothing_else(harmless: Page, text: str) -> None:
    report = example()
    for place in ("win_rate_by_source", "win_rate_by_length"):
        report[place] = {"gold": {text: report["win_rate"]["gold"]}}
    report["judges"]["gold"]["name"] = text
    report["inputs"] = {text: {"path": text, "hash": text}}
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


def test_the_first_ten_samples_are_open_and_each_knows_its_winner(usual: str) -> None:
    page = Page(usual)
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
