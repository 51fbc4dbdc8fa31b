"""What people read at the end of a stage of a policy: every sentence of a literal report."""

from pathlib import Path

import pytest

from policies.evaluate.settings import EvaluateSettings
from policies.ppo.settings import PPOSettings
from policies.reference.settings import ReferenceSettings
from policies.sampling.settings import GenerateSettings
from rlhf.commands.models import generate, ppo, reference
from rlhf.commands.models.evaluate import describe_report

RUN = Path("runs/a")


def test_a_second_generate_says_why_there_is_nothing() -> None:
    settings = GenerateSettings(db=Path("l.db"), model="models/m", k=4)
    assert generate.describe(settings, {"responses": 0, "prompts": 0}) == (
        "Nothing to do: all prompts in l.db have 4 responses of models/m already. "
        "A larger -k samples more."
    )
    assert generate.describe(settings, {"responses": 8, "prompts": 2}) == (
        "Sampled 8 responses to 2 prompts.\nNext: rlhf label --db l.db"
    )


MANIFEST = {
    "rows": 24,
    "prompts": 12,
    "mean_length": 10.6,
    "finished": 18,
    "model": {"path": "models/m"},
}


def test_stored_answers_with_rewards_lead_to_ppo() -> None:
    settings = ReferenceSettings(
        prompts=Path("rankings"), model="models/m", reward="runs/a/reward", out=RUN / "reference"
    )
    assert reference.describe(settings, MANIFEST).splitlines() == [
        "Stored 24 responses to 12 prompts with log-probs in runs/a/reference: 11 tokens on "
        "average, 75 % ended by themselves.",
        "They have the rewards of runs/a/reward.",
        "Next: rlhf ppo --model models/m --reward runs/a/reward --reference runs/a/reference "
        "--out runs/a/ppo",
    ]


def test_stored_answers_without_rewards_lead_to_them() -> None:
    settings = ReferenceSettings(prompts=Path("r"), model="models/m", out=RUN / "reference")
    last = reference.describe(settings, MANIFEST).splitlines()[-1]
    assert last == "Next: rlhf reference --reward RM --out runs/a/reference"


@pytest.mark.parametrize("done", ["stored", "scored"])
def test_a_part_of_the_shards(done: str) -> None:
    settings = ReferenceSettings(prompts=Path("r"), model="m", out=RUN, shard="0/4")
    said = reference.describe(settings, {"shards": {done: 3, "of": 8}})
    assert said == f"3 of 8 shards are {done}; other jobs do the rest."


@pytest.mark.parametrize(
    ("nats", "error", "said"),
    [
        (6.125, 0.42, "6.12 nats per response ± 0.42 (standard error, 64 responses)"),
        (
            -0.01,
            0.014,
            "-0.01 nats per response ± 0.01 (standard error, 64 responses), which cannot be told "
            "from 0",
        ),
        (0.3, None, "0.30 nats per response, of 64 responses"),
    ],
)
def test_how_far_a_policy_moved(nats: float, error: float | None, said: str) -> None:
    settings = PPOSettings(
        model="m", reward=("rm", "other"), reference=RUN / "reference", out=RUN / "ppo"
    )
    report = {
        "steps": 40,
        "reward": {"first": -0.104, "last": 0.52},
        "kl": {"reverse": {"nats": nats, "standard_error": error, "sequences": 64}},
    }
    assert ppo.describe(settings, report).splitlines() == [
        "Mean reward on training prompts: -0.10 in the first of 40 steps, 0.52 in the last, each "
        "of 64 responses.",
        f"Reverse KL from the original model: {said}.",
        "Next: rlhf evaluate --policy runs/a/ppo --reward rm "
        "--reference runs/a/reference --out runs/a/evaluate",
    ]


def rate(value: float, low: float | None = None, high: float | None = None) -> dict:
    return {"value": value, "low": low, "high": high, "n": 64, "level": 0.9}


def test_verdicts_that_nobody_can_read_are_told() -> None:
    settings = EvaluateSettings(policy="p", reference=Path("r"), reward="rm", out=RUN / "evaluate")
    report = {
        "verdict": {"judge": "reward", "outcome": "unproven"},
        "win_rate": {"reward": rate(0.5)},
        "judges": {"reward": {"kind": "reward model", "name": ""}},
        "verdicts": {"asked": 128, "unclear": 97},
        "length": {"reference": 19.4, "policy": 22.6},
        "kl": {"reverse": {"nats": 6.1, "standard_error": 0.4, "sequences": 128}},
    }
    assert describe_report(settings, report).splitlines()[2] == (
        "97 of 128 verdicts of the AI judge could not be read and are not counted; its replies are "
        "in judge.jsonl."
    )


@pytest.mark.parametrize(
    ("original", "new", "warns"), [(0.02, 0.06, True), (0.02, 0.05, False), (0.04, 0.08, False)]
)
def test_a_template_is_warned_of(original: float, new: float, warns: bool) -> None:
    settings = EvaluateSettings(policy="p", reference=Path("r"), reward="rm", out=RUN / "evaluate")
    report = {
        "verdict": {"judge": "reward", "outcome": "better"},
        "win_rate": {"reward": rate(0.9)},
        "judges": {"reward": {"kind": "reward model", "name": ""}},
        "length": {"reference": 19.4, "policy": 22.6},
        "kl": {"reverse": {"nats": 6.1, "standard_error": 0.4, "sequences": 128}},
        "template": {
            "reference": {"words": "one of the most", "share": original},
            "policy": {"words": "i'm here to help", "share": new},
        },
    }
    warning = (
        "A template: 6 % of the new responses say “i'm here to help” (the original's most frequent "
        "4-gram is in 2 %). Read the samples before you trust the win rate."
    )
    assert (warning in describe_report(settings, report).splitlines()) == warns


def test_a_verdict_with_all_judges_and_a_rival() -> None:
    settings = EvaluateSettings(policy="p", reference=Path("r"), reward="rm", out=RUN / "evaluate")
    report = {
        "verdict": {"judge": "gold", "outcome": "better"},
        "win_rate": {"gold": rate(0.85, 0.81, 0.9), "reward": rate(0.5)},
        "judges": {
            "gold": {"kind": "signal", "name": "my:score"},
            "reward": {"kind": "reward model", "name": ""},
        },
        "rival": {"name": "models/other", "win_rate": {"gold": rate(0.4)}},
        "length": {"reference": 19.4, "policy": 22.6},
        "kl": {"reverse": {"nats": 6.1, "standard_error": 0.4, "sequences": 128}},
        "log_likelihood": {"reference": {"value": -1.504}, "policy": {"value": -1.216}},
        "retained": {
            "before": 3.1271,
            "after": 3.1842,
            "difference": {"value": 0.0571, "low": 0.0312, "high": 0.0833},
        },
    }
    expected = [
        "The function my:score prefers the new model. No people have voted.",
        "The policy wins 85 % (90 % interval 81–90 %) against the original on 64 "
        "prompts, judged by signal my:score.",
        "The policy wins 50 % (too few prompts for an interval) against the original on 64 "
        "prompts, judged by reward model.",
        "The policy wins 40 % (too few prompts for an interval) against models/other on 64 "
        "prompts, judged by signal my:score.",
        "Length 19 → 23 tokens.",
        "Reverse KL from the original model: 6.10 nats per response ± 0.40 (standard error, 128 "
        "responses).",
        "Log-likelihood of the responses under the original model: -1.50 → -1.22 nats per token.",
        "Negative log-likelihood of neutral text: 3.127 → 3.184 nats per token "
        "(+0.057, +0.031 to +0.083).",
        "Report: runs/a/evaluate/report.html",
        "To ask people, with DB the database of their board: "
        "rlhf evaluate --out runs/a/evaluate --to-db DB",
    ]
    assert describe_report(settings, report).splitlines() == expected
    assert describe_report(settings, report, Path("v.db")).splitlines()[-2:] == [
        "Let people vote: rlhf label --db v.db",
        "Then: rlhf evaluate --out runs/a/evaluate --from-db v.db",
    ]
    asked = {**report, "win_rate": {"people": rate(0.5)}, "judges": {"people": {
        "kind": "people", "name": ""}}, "votes": {"still_needed": 7}}  # fmt: skip
    asked["verdict"] = {"judge": "people", "outcome": "better"}
    del asked["rival"]
    assert describe_report(settings, asked).splitlines() == [
        "The new model is better.",
        "The policy wins 50 % (too few prompts for an interval) against the original on 64 "
        "prompts, judged by people.",
        "About 7 more votes, on other prompts, would prove a difference of this size.",
        *expected[4:9],
    ]
