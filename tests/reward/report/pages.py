"""What report.json of a reward model holds, as far as its page reads it."""

from reward.report.health import collect_verdicts, measure_health

ACCURACY = {"value": 0.75, "low": 0.5, "high": 0.9, "pairs": 8, "prompts": 4}


def report(groups, rewards, worst):
    return {
        "accuracy": ACCURACY,
        "accuracy_before_training": None,
        "likelier_wins": None,
        "started_from": {"kind": "reward model", "path": "<u>rm", "hash": "abc"},
        "best": None,
        "held_out": {"prompts": 4, "from": "test prompts"},
        "counts": {
            "train": {"prompts": 7, "prompts_too_long": 1},
            "test": {"prompts": 4, "ties": 2},
        },
        "annotators": {"<i>eve": {"weight": 0.5, "judgements": 9, "share": 0.125}},
        "normalisation": {"fitted_on": "held-out ranked responses"},
        "health": measure_health(collect_verdicts(groups, rewards)),
        "worst": worst,
    }
