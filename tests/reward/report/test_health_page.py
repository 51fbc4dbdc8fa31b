import shutil

import pytest

from reward.data.groups import Group, Pair
from reward.report.health import Verdict
from reward.report.health_page import draw_histogram, draw_reliability, write_page
from reward.training.save import write_report
from reward.training.train import train_reward
from rlhf.modeling.tokens import load_tokenizer
from rlhf.records.ranked import read_ranked
from rlhf.run.rundir import RunDir
from tests.reward.conftest import settings_for
from tests.reward.report.pages import ACCURACY, report


def test_the_page_escapes_what_models_and_people_wrote(tmp_path):
    pairs = (Pair(0, 1, 1.0, 0, "<b>ann</b>"), Pair(1, 0, 1.0, 0, "bob"))
    evil = "<script>alert(1)</script> ${x}"
    sample = {"prompt": evil, "preferred": evil, "other": "", "annotator": "<i>", "difference": -1}
    groups = [Group("a", (1,), ((2,), (3,)), pairs)]
    write_page(tmp_path / "r.html", report(groups, [[0.0, 1.0]], [sample]), [0.0, 1.0])
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; ${x}" in page
    assert "&lt;b&gt;ann&lt;/b&gt;" in page
    assert "75 %" in page
    assert '<th scope="row">prompts too long</th><td>1</td><td>0</td>' in page
    assert '<th scope="row">ties</th><td>0</td><td>2</td>' in page
    row = "<td>0.5</td><td>9</td><td>12.5 %</td>"
    assert "started from the reward model &lt;u&gt;rm (abc)" in page
    assert '<th scope="row">the reward model it started from</th><td>–</td>' in page
    assert f'<th scope="row">&lt;i&gt;eve</th>{row}' in page
    assert "Annotators agree with each other in 0 %" in page
    assert "script-src" not in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page


def test_a_page_of_few_prompts_claims_no_interval(tmp_path):
    few = {"accuracy": ACCURACY | {"low": None, "high": None, "prompts": 2}}
    write_page(tmp_path / "r.html", report([], [], []) | few, [0.0, 1.0])
    page = (tmp_path / "r.html").read_text()
    assert "(too few prompts for an interval)" in page
    assert "<td>75 %</td><td>too few prompts</td><td>8</td>" in page
    assert "95 % interval 50" not in page


@pytest.mark.parametrize(
    ("accuracy", "verdict"),
    [
        ({"value": 1.0, "low": None, "high": None, "pairs": 1, "prompts": 1}, "Too few to say."),
        ({"value": 1.0, "low": 1.0, "high": 1.0, "pairs": 29, "prompts": 29}, "A rough guide."),
        ({"value": 0.8, "low": 0.7, "high": 0.9, "prompts": 30}, "Better than chance."),
        ({"value": 0.6, "low": 0.5, "high": 0.7, "prompts": 90}, "Not proven better than chance."),
        ({"value": 0.2, "low": 0.1, "high": 0.3, "prompts": 90}, "Worse than chance."),
    ],
)
def test_the_verdict_comes_before_the_number(tmp_path, accuracy, verdict):
    content = report([], [], []) | {"accuracy": {"pairs": 60} | accuracy}
    write_page(tmp_path / "r.html", content, [0.0, 1.0])
    page = (tmp_path / "r.html").read_text()
    assert page.index(f"<strong>{verdict}</strong>") < page.index("ordered as judged")
    hint = "prompts prove nothing, whatever the share. Let people rank more prompts of the test"
    assert (hint in page) is (accuracy["prompts"] < 30)
    assert ('class="big">100 %' in page) is (verdict == "A rough guide.")  # one of one is not big
    assert ("of 1 held-out preference ordered" in page) is (verdict == "Too few to say.")


@pytest.mark.parametrize(
    ("head", "name"),
    [("random", "before training"), ("fitted", "after fitting the head only")],
)
def test_a_fitted_head_has_seen_the_labels(tmp_path, head, name):
    start = {"kind": "language model", "path": "m", "hash": "abc"}
    content = report([], [], []) | {"started_from": start, "head": head}
    content["accuracy_before_training"] = ACCURACY | {"value": 0.71}
    write_page(tmp_path / "r.html", content, [0.0, 1.0])
    page = (tmp_path / "r.html").read_text()
    assert f'<th scope="row">{name}</th><td>71 %</td>' in page


def test_a_page_without_judgments_or_disagreements_still_reads(tmp_path):
    empty = report([], [], []) | {"accuracy": None}
    write_page(tmp_path / "r.html", empty, [0.0, 1.0])
    page = (tmp_path / "r.html").read_text()
    assert "Every held-out judgment is a tie" in page
    assert "There is none" in page


def test_a_page_says_what_the_training_cost(tmp_path):
    cost = {"device_hours": 0.5, "price_per_hour": 3.0, "price": 1.5, "annotator_hours": 2.25}
    write_page(tmp_path / "r.html", report([], [], []) | {"cost": cost}, [0.0, 1.0])
    said = "Cost: 0.5 device-hours at 3 each: 1.5, and 2.25 annotator-hours."
    assert f'<p class="muted">{said}</p>' in (tmp_path / "r.html").read_text()
    write_page(tmp_path / "r.html", report([], [], []), [0.0, 1.0])
    assert "device-hours" not in (tmp_path / "r.html").read_text()


def test_the_worst_disagreements_show_what_was_asked(rankings, tiny_model, tmp_path):
    """Not what the chat template adds; where the export has gone since, that has to do."""
    moved = shutil.copytree(rankings, tmp_path / "rankings")
    run = RunDir(tmp_path / "out")
    report = train_reward(settings_for(moved, tiny_model, run.path, epochs=1, learning_rate=1e-9))
    worst = run.read_report()["worst"]
    asked = {record.prompt.text for record in read_ranked(rankings)}
    assert worst
    assert {one["prompt"] for one in worst} <= asked
    page = run.report_html.read_text()
    assert "ann preferred the first response; the model scores it " in page
    shutil.rmtree(moved)
    pair = Pair(0, 1, 1.0, 0, "ann")
    verdict = Verdict(Group("p", (5, 6), ((7,), (8,)), (pair,)), pair, -1.0)
    tokenizer = load_tokenizer(str(tiny_model))
    write_report(run, report, [verdict], [0.0, 1.0], tokenizer)
    [one] = run.read_report()["worst"]
    assert one["prompt"] == tokenizer.decode([5, 6])


def test_pictures_name_their_axes():
    bins = [{"confidence": 0.7, "right": 0.5, "n": 4}]
    for figure, x, y in (
        (draw_reliability(bins), "confidence in the order of a pair", "share of pairs ordered"),
        (draw_histogram([0.0, 1.0]), "reward", "number of responses"),
    ):
        [axes] = figure.axes
        assert axes.get_xlabel() == x
        assert axes.get_ylabel().startswith(y)
