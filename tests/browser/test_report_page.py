"""report.html in a real browser: quiet, offline, searchable, and deaf to what models write."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from policies.evaluate.report import ReportSample, write_report
from reward.report.health_page import write_page
from rlhf.run.rundir import RunDir
from tests.browser.accessibility import require_accessible
from tests.policies.conftest import done, inputs
from tests.reward.report.pages import report as reward_report

__all__ = ["done", "inputs"]

pytestmark = pytest.mark.browser

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</div></details><img src='https://example.invalid/x.png' onerror='window.hacked = 1'>",
    "${window.hacked = 1} {{ 7 * 191 }} <iframe src='javascript:parent.hacked = 1'></iframe>",
    "<style>main { display: none }</style><base href='https://example.invalid/'>",
    "before \u202ereversed\u202d forced \u2067 unclosed",
    "x" * 100_000,
]
MODELS = ("policy", "reference")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with report.json and report.html of 16 samples, the hostile ones first."""
    rate = {"value": 0.78125, "low": 0.703, "high": 0.852, "n": 64}
    report = {
        "win_rate": {"reward": rate, "gold": {**rate, "value": 0.75}},
        "win_rate_by_source": {"gold": {text[:200]: rate for text in HOSTILE}},
        "kl": {
            name: {
                **{"nats": 4.5, "sqrt_nats": 2.12, "per_token": 0.1},
                **{"estimator": "k1", "standard_error": 0.2},
            }
            for name in ("forward", "reverse")
        },
        "length": dict.fromkeys(MODELS, 37.5),
        "eos_rate": dict.fromkeys(MODELS, 0.5),
        "distinct": {model: {"distinct_1": 0.4, "distinct_2": 0.8} for model in MODELS},
        "reward": {model: {"mean": 0.2, "std": 1.0} for model in MODELS},
        "seed": 0,
        "inputs": {"policy": {"path": "runs/demo/ppo", "hash": "abc"}},
    }
    texts = HOSTILE + [f"plain text {name}" for name in "abcdefghij"]
    samples = [
        ReportSample(
            turns=[
                {"role": "assistant", "content": f"Earlier {place}"},
                {"role": "user", "content": f"Prompt {place}"},
            ],
            answers={"reference": text, "policy": text},
            scores={"reward": {"reference": 0.0, "policy": 1.0 if place % 2 else -1.0}},
        )
        for place, text in enumerate(texts)
    ]
    metrics = [{"step": step, "reward/mean": step / 10} for step in range(5)]
    write_report(report, samples, metrics, tmp_path / "report.json", tmp_path / "report.html")
    return tmp_path


@pytest.fixture
def page(browser: Browser, folder: Path):
    """The opened report of hostile samples."""
    with opened_quietly(browser, folder / "report.html") as opened:
        yield opened


@contextmanager
def opened_quietly(browser: Browser, report: Path) -> Iterator[Page]:
    """An opened report; the test fails when the page complained or asked for anything."""
    opened = browser.new_page(viewport={"width": 1180, "height": 900})
    complaints: list[str] = []
    requests: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url[:100]))
    opened.goto(report.as_uri())
    yield opened
    opened.close()
    assert complaints == []
    outside = [url for url in requests if not url.startswith(("data:", "file:"))]
    assert outside == []
    assert sum(url.startswith("file:") for url in requests) == 1


def shown_samples(page: Page) -> int:
    return page.locator("details.sample:visible").count()


def test_the_report_opens_with_all_pictures_and_the_numbers_of_report_json(
    page: Page, folder: Path
) -> None:
    assert page.locator("h1").inner_text() == "The function prefers the new model"
    widths = page.locator("img").evaluate_all("images => images.map(image => image.naturalWidth)")
    assert len(widths) == 5
    assert min(widths) > 100
    content = json.loads((folder / "report.json").read_text())
    shown = page.locator("[data-path='/win_rate/gold/value']").first
    assert shown.inner_text() == "75\u00a0%"
    assert float(shown.get_attribute("value")) == content["win_rate"]["gold"]["value"]
    assert page.locator("details.sample[open]").count() == 10


def test_hostile_text_is_read_not_run(page: Page) -> None:
    assert page.evaluate("window.hacked") is None
    assert page.locator("main").is_visible()
    answers = page.locator(".answer.new .words")
    assert [answers.nth(n).text_content() for n in range(len(HOSTILE))] == HOSTILE
    assert page.locator("iframe, base, main script, main style").count() == 0
    isolation = "elements => elements.map(e => getComputedStyle(e).unicodeBidi)"
    assert set(page.locator(".verbatim").evaluate_all(isolation)) == {"isolate"}


def test_a_huge_answer_scrolls_inside_its_box(page: Page) -> None:
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 1180
    answer = page.locator(".answer.new .words").nth(5)
    assert answer.bounding_box()["height"] < 400
    assert answer.evaluate("e => e.scrollWidth <= e.clientWidth")


def test_search_and_filter_narrow_the_samples(page: Page) -> None:
    assert shown_samples(page) == 16
    page.get_by_label("Search prompts and responses").fill("TEXT J")
    assert shown_samples(page) == 1
    assert page.locator("details.sample:visible").get_attribute("open") is not None
    page.get_by_label("Show which samples").select_option("original")
    assert shown_samples(page) == 0
    assert page.get_by_text("Nothing found.").is_visible()
    page.get_by_label("Search prompts and responses").fill("")
    assert shown_samples(page) == 8
    page.get_by_label("Show which samples").select_option("")
    assert shown_samples(page) == 16
    assert page.locator("details.sample[open]").count() == 10


def test_the_last_turn_stands_out_and_earlier_ones_unfold(page: Page) -> None:
    sample = page.locator("details.sample").first
    assert sample.locator("> summary .words").inner_text() == "Prompt 0"
    earlier = sample.locator(".turn .words")
    assert not earlier.is_visible()
    sample.get_by_text("Earlier turns").click()
    assert earlier.inner_text() == "Earlier 0"


def test_a_real_evaluation_shows_the_numbers_of_its_report_json(
    browser: Browser, done: RunDir
) -> None:
    """With a rival, a judge model and best-of-n: every number on the page is at its place."""
    content = done.read_report()
    with opened_quietly(browser, done.report_html) as page:
        read = "elements => elements.map(e => [e.dataset.path, JSON.parse(e.value)])"
        shown = page.locator("data[data-path]").evaluate_all(read)
        widths = page.locator("img").evaluate_all("images => images.map(i => i.naturalWidth)")
        names = {path.split("/")[1] for path, _ in shown}
    assert {"win_rate", "rival", "kl", "best_of_n", "gold", "reward", "length"} <= names
    for path, value in shown:
        found: Any = content
        for key in path.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            found = found[int(key) if isinstance(found, list) else key]
        assert found == value, path
    assert min(widths) > 100


def test_the_report_of_a_reward_model_fits_a_phone(tmp_path: Path, browser: Browser) -> None:
    """Six and seven columns with long words scroll in their own boxes; the page does not."""
    accuracy = {"value": 1.0, "low": None, "high": None, "pairs": 1, "prompts": 1}
    reliability = {"value": 0.9, "low": 0.8, "high": 0.95, "shared": 12}
    weights = {"weight": 1, "judgements": 1234, "share": 0.5, "reliability": reliability}
    counts = {"train": {"all": 1, "good": 1}, "held_out": {"all": 1}, "weight": 1}
    kind = {**counts, "accuracy": {**accuracy, "commoner": 0.5}}
    content = reward_report([], [], []) | {
        "accuracy": accuracy,
        "annotators": {"a" * 40: weights, "signal:tests.pipeline.signals:count_vowels": weights},
        "judgements": {"pairs": kind, "all_bad": kind},
        "thresholds": {"ann": {**kind, "threshold": 0.1, "fitted": True}},
    }
    write_page(tmp_path / "report.html", content, [0.0, 1.0])
    with opened_quietly(browser, tmp_path / "report.html") as page:
        for width in (390, 320):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") == width
        require_accessible(page, "the report of a reward model")
