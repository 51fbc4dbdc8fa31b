"""A reward model orders the queue; people get its first choice first, and the lead sees why."""

import json
from math import exp, log

import numpy as np
import pytest

from labeling_app.annotators.comparisons import queue_pairs
from labeling_app.annotators.prioritizing import prioritize
from labeling_app.annotators.rounds import queue_round
from labeling_app.db.queue import Submission, TaskQueue
from reward.scoring.texts import load_features
from rlhf.cli import main
from rlhf.errors import InputError
from rlhf.modeling.models import new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start_alone
from tests.labeling_app.conftest import quality_page


def read(answers):
    """Rewards that differ by the prompt's number; features on one axis for even prompts."""
    found = []
    for prompt, responses in answers:
        number = int(prompt.text.split()[-1])
        axis = np.eye(2)[number % 2]
        features = np.outer(np.arange(len(responses)) * (number + 1.0), axis)
        found.append((features, np.arange(len(responses)) * float(number)))
    return found


def queue_order(store) -> list[tuple[str, str]]:
    """(prompt, reason) in the order in which tasks are given out."""
    query = """SELECT p.messages, t.reason FROM tasks t JOIN prompts p ON p.id = t.prompt_id
               ORDER BY t.priority DESC, t.id"""
    rows = store.connections.db.execute(query)
    return [(json.loads(messages)[0]["content"], reason) for messages, reason in rows]


def run(store, by, **changes):
    settings = {"random_share": 0.2, "most": 100, "seed": 1, **changes}
    return prioritize(store, read, by, **settings)


def test_entropy_puts_even_pairs_first_and_a_fifth_is_random(store, fill):
    fill(10, 2)
    assert run(store, "entropy") == {
        "by": "entropy",
        "tasks": 10,
        "random": 2,
        "pairs_ranked_before": 0,
    }
    order = queue_order(store)
    assert [reason for _, reason in order].count("random") == 2
    assert (order[0][1], order[5][1]) == ("random", "random")
    by_entropy = [int(prompt.split()[-1]) for prompt, reason in order if reason != "random"]
    assert by_entropy == sorted(by_entropy)
    assert dict(order).get("prompt 0") in ("entropy 0.693", "random")
    queue = TaskQueue(store)
    queue.add_annotator("ann")
    assert queue.next_task("ann").messages[0]["content"] == order[0][0]
    assert "entropy 0." in quality_page(store)


def test_fisher_looks_elsewhere_once_an_axis_is_known(store, queue, fill):
    fill(4, 2)  # prompts 0 and 2 lie on one axis, 1 and 3 on the other
    run(store, "fisher")
    before = scores(store)
    queue.add_annotator("ann")
    task = queue.next_task("ann")
    while task.messages[0]["content"] != "prompt 3":
        queue.skip("ann", skip_id=str(task.id), task_id=task.id, reason="", note="")
        task = queue.next_task("ann")
    queue.submit("ann", Submission(id="r", task_id=task.id, tiers=((0,), (1,))))
    assert run(store, "fisher")["pairs_ranked_before"] == 1
    after = scores(store)
    # φ = 2 and p(1-p) at gap 1 is 0.197; Σ begins as 1/3: log(1 + 0.786 / 3), and after a pair
    # with φ = 4 and p(1-p) at gap 3 of 0.0452 it is 1 / (3 + 0.723).
    assert before["prompt 1"] == pytest.approx(0.233, abs=1e-3)
    assert after["prompt 1"] == pytest.approx(0.192, abs=1e-3)


def scores(store) -> dict[str, float]:
    return {p: float(why.split()[1]) for p, why in queue_order(store) if " " in why}


def test_what_was_not_looked_at_comes_later(store, fill):
    fill(5, 2)
    assert run(store, "delta-ucb", most=2)["tasks"] == 2
    assert [bool(reason) for _, reason in queue_order(store)] == [True, True, False, False, False]
    assert run(store, "delta-ucb")["tasks"] == 5


def test_nothing_open_is_said(store):
    with pytest.raises(InputError, match=r"No task is open.*\n.*rlhf generate"):
        run(store, "entropy")


@pytest.mark.parametrize("by", ["fisher", "entropy", "delta-ucb"])
def test_the_command_with_a_real_reward_model(store, fill, tiny_model, tmp_path, capsys, by):
    fill(6, 3)
    model = new_reward_model(str(tiny_model), 0, seed=3)
    save_model(model, load_tokenizer(str(tiny_model)), tmp_path / "model")
    arguments = ["prioritize", "--db", str(store.connections.path), "--json"]
    arguments += ["--precision", "fp32"]
    assert main([*arguments, "--reward", str(tmp_path / "model"), "--by", by]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == 6
    reasons = [reason for _, reason in queue_order(store)]
    assert reasons.count("random") == 2
    assert sum(reason.startswith(f"{by} ") for reason in reasons) == 4


def test_the_reward_is_read_as_the_log_odds_that_were_trained(
    store, fill, tiny_model, tmp_path
) -> None:
    """The saved model's rewards have standard deviation 1; the loss was on those over the gain."""
    fill(6, 2)
    model, gain = new_reward_model(str(tiny_model), 0, seed=3), 0.02
    save_model(model, load_tokenizer(str(tiny_model)), tmp_path / "reward" / "model")
    report = {"normalisation": {"gain": gain}}
    (tmp_path / "reward" / "report.json").write_text(json.dumps(report))
    name = str(tmp_path / "reward" / "model")
    arguments = ["prioritize", "--db", str(store.connections.path), "--precision", "fp32"]
    assert main([*arguments, "--reward", name, "--by", "entropy"]) == 0
    records = list(store.ranked_prompts())
    features = load_features(name, start_alone("fp32", 0), 4096)
    rewards = [found for _, found in features([(one.prompt, one.responses) for one in records])]
    expected = {}
    for record, (first, second) in zip(records, rewards, strict=True):
        p = 1 / (1 + exp(-float(first - second) / gain))
        expected[record.prompt.text] = -p * log(p) - (1 - p) * log(1 - p)
    found = scores(store)
    assert len(found) == 4
    assert found == pytest.approx({prompt: expected[prompt] for prompt in found}, rel=0.01)
    assert min(found.values()) < 0.6  # ln 2 is .693


def test_settings_that_do_not_fit(store, refused):
    arguments = ["prioritize", "--db", str(store.connections.path)]
    assert "--reward is missing" in refused(*arguments)
    assert "--random-share is 0.1" in refused(*arguments, "--reward", "x", "--random-share", "0.1")


def test_an_evaluation_and_a_round_keep_their_order(
    store, fill, make_prompt, make_responses
) -> None:
    """Which pairs are voted on must not depend on what a judged reward model thinks."""
    fill(4, 2)
    prompts = [make_prompt(f"pair {n}") for n in range(3)]
    pairs = [(one, *make_responses(one, ["old", "new"])) for one in prompts]
    queue_pairs(store, pairs, overlap=1, mix=True, seed=0)
    chosen = make_prompt("round")
    responses = make_responses(chosen, ["one", "two"])
    queue_round(store, {"policy": {"path": "p", "hash": "h"}}, [(chosen, responses, "why")], {})
    query = (
        "SELECT id, priority, reason FROM tasks WHERE purpose = 'compare' OR reason LIKE 'round%'"
    )
    before = store.connections.db.execute(query).fetchall()
    assert run(store, "entropy")["tasks"] == 4
    assert store.connections.db.execute(query).fetchall() == before
