"""When the loop stops, on reports made by hand, and what it says then."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.commands.loop.report import (
    Stop,
    build_report,
    describe_round,
    read_rounds,
    reason_to_stop,
    summary,
)
from rlhf.commands.runs import loop
from rlhf.records.jsonl import write_json

WINS = {"value": 0.62, "low": 0.55, "high": 0.69, "level": 0.95, "n": 60, "p_value": 0.004}
NO_GAIN = (
    "Round 1: wins 54 % (95 % interval 47–61 %), sign test p = 0.3 against the policy of round 0 "
    "on 60 prompts, judged by signal vader: no gain. (A gain needs an interval above 50 % and a "
    "sign test with p below 0.05.)"
)
EVEN = {**WINS, "value": 0.54, "low": 0.47, "high": 0.61, "p_value": 0.3}


def evaluation(original: dict[str, Any], before: dict[str, Any] | None = None) -> dict[str, Any]:
    """What `rlhf evaluate` writes, as far as the loop reads it."""
    judges = {"gold": {"kind": "signal", "name": "vader"}, "reward": {"kind": "reward model"}}
    return {
        "win_rate": {"reward": {**WINS, "value": 1.0}, "gold": original},
        "judges": {name: {"name": "", **judge} for name, judge in judges.items()},
        "kl": {"forward": {"nats": 2.0}, "reverse": {"nats": 3.456}},
        **({"rival": {"win_rate": {"reward": WINS, "gold": before}}} if before else {}),
    }


def rounds(*rates: dict[str, Any]) -> list[dict[str, Any]]:
    """Rounds that win so against the policy before each of them."""
    found = [summary(n, evaluation(WINS if n else one, one if n else None))
             for n, one in enumerate(rates)]  # fmt: skip
    more = {"rankings": 1200, "new_rankings": 200, "accuracy": None}
    return [{**one, **more} for one in found]


def test_the_first_round_is_compared_with_the_original_and_later_ones_with_the_policy_before() -> (
    None
):
    first, second = rounds(WINS, EVEN)
    assert (first["judge"], first["outcome"]) == ("signal vader", "better")
    assert first["win_rate"] == {"original": WINS, "before": WINS}
    assert second["outcome"] == "unproven"
    assert second["win_rate"] == {"original": WINS, "before": EVEN}
    assert second["kl"] == {"forward": 2.0, "reverse": 3.456}
    assert describe_round(first) == (
        "Round 0: wins 62 % (95 % interval 55–69 %), sign test p = 0.004 against the original "
        "model on 60 prompts, judged by signal vader: a gain."
    )


def test_it_says_where_the_judge_is_the_reward_model_itself() -> None:
    report = evaluation(WINS)
    report["judges"]["reward"] |= {"name": "r/model", "is_objective": True}
    del report["win_rate"]["gold"]
    assert describe_round(summary(0, report)).endswith(
        "judged by reward model r/model, which it was trained against: a gain."
    )


@pytest.mark.parametrize(
    ("change", "gains"),
    [
        ({}, True),
        ({"low": 0.5001}, True),
        ({"low": 0.5}, False),  # does not lie above one half
        ({"p_value": 0.05}, False),
        ({"low": None, "high": None}, False),  # too few prompts for an interval
        ({"value": 0.3, "low": 0.2, "high": 0.4}, False),
    ],
)
def test_a_gain_is_an_interval_above_one_half_and_a_sign_test(
    change: dict[str, Any], gains: bool
) -> None:
    done = rounds(WINS, {**WINS, **change})
    assert (reason_to_stop(done, 3, without_gain=True) is None) is gains
    assert reason_to_stop(done, 3, without_gain=False) is None


def test_the_loop_says_with_figures_why_it_stops_and_which_setting_stops_it() -> None:
    done, no_gain = Stop("2 of 2 rounds are done.", "rounds"), Stop(NO_GAIN, "stop_without_gain")
    one_done = Stop("1 of 1 round is done.", "rounds")
    assert reason_to_stop([], 1, without_gain=True) is None
    assert reason_to_stop(rounds(WINS), 2, without_gain=True) is None
    assert reason_to_stop(rounds(WINS), 1, without_gain=True) == one_done
    assert reason_to_stop(rounds(WINS, WINS), 2, without_gain=True) == done
    assert reason_to_stop(rounds(WINS, EVEN), 2, without_gain=True) == no_gain
    assert reason_to_stop(rounds(WINS, EVEN), 2, without_gain=False) == done
    few = reason_to_stop(rounds({**EVEN, "low": None, "high": None}), 3, without_gain=True)
    assert few is not None
    assert "wins 54 % (too few prompts for an interval), sign" in few.sentence


def test_the_table_at_the_end() -> None:
    done = rounds(WINS, EVEN)
    done[1]["accuracy"] = {"value": 0.7, "low": 0.6, "high": 0.8}
    done[0]["new_rankings"] = None
    report = build_report(done, Path("runs/a"), Stop(NO_GAIN, "stop_without_gain"))
    assert (report["stopped"], report["stopped_by"]) == (NO_GAIN, "stop_without_gain")
    assert report["policy"] == "runs/a/round-0/ppo/policy"
    settings = SimpleNamespace(round_folder=lambda number: Path(f"runs/a/round-{number}"))
    header, first, second, *rest = loop.describe(settings, report).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()]
             for line in (header, first, second)]  # fmt: skip
    original, even = "62 % (95 % interval 55–69 %)", "54 % (95 % interval 47–61 %)"
    assert cells == [
        ["round", "rankings", "accuracy", "wins against the original",
         "wins against the policy before", "reverse KL, nats"],
        ["0", "1,200", "-", original, "-", "3.46"],
        ["1", "1,200 (200 new)", "70 % (95 % interval 60–80 %)", original, even, "3.46"],
    ]  # fmt: skip
    assert rest == [
        f"Stopped: {NO_GAIN}",
        "The newest policy that gained: runs/a/round-0/ppo/policy",
        "Report of the last round: runs/a/round-1/evaluate/report.html",
    ]
    nothing = build_report(rounds(EVEN), Path("runs/a"), None)
    assert (nothing["policy"], nothing["stopped"], nothing["stopped_by"]) == (None, None, None)
    assert "No policy gained." in loop.describe(settings, nothing)


def test_a_loop_has_the_price_of_a_point_of_the_policy_that_it_returns(tmp_path: Path) -> None:
    """Two stages of an hour at 3: 6 for the 12 points by which round 0 beats the original."""
    for number in (0, 1):
        stage = {"stage": "ppo", "status": "done", "device_seconds": 3600, "processes": 1}
        write_json(tmp_path / f"round-{number}" / "ppo" / "stage.json", stage)
    cost = build_report(rounds(WINS, EVEN), tmp_path, None, 3.0)["cost"]
    assert (cost["device_hours"], cost["price"], cost["price_per_point"]) == (2.0, 6.0, 0.5)
    # on 60 prompts; on 60 more both models gave the same response
    with_equal = {**rounds(WINS)[0], **summary(0, evaluation({**WINS, "same_answers": 60}))}
    again = build_report([with_equal], tmp_path, None, 3.0)["cost"]
    assert again["price_per_point"] == 1.0
    for done, price in ((rounds(EVEN), 3.0), (rounds(WINS), None), ([], 3.0)):  # no gain, no price
        assert build_report(done, tmp_path, None, price)["cost"]["price_per_point"] is None


def test_rounds_are_read_from_the_files_of_their_stages(tmp_path: Path) -> None:
    assert read_rounds(tmp_path) == []
    accuracy = {"value": 0.7, "low": 0.6, "high": 0.8, "pairs": 9}
    for number, rate in enumerate((WINS, EVEN)):
        folder = tmp_path / f"round-{number}"
        write_json(folder / "reward" / "report.json", {"accuracy": accuracy})
        write_json(folder / "rankings" / "manifest.json", {"rankings": 50 * (number + 1)})
        report = evaluation(WINS, rate if number else None)
        write_json(folder / "evaluate" / "report.json", report)
        write_json(folder / "evaluate" / "stage.json", {"stage": "evaluate", "status": "done"})
    entries = [{"stage": "export", "round": 1, "new_rankings": 60}]
    write_json(tmp_path / "commands.json", {"commands": entries})
    first, second = read_rounds(tmp_path)
    assert (first["rankings"], first["new_rankings"]) == (50, None)  # exported by hand
    assert (second["rankings"], second["new_rankings"]) == (100, 60)  # ten were replaced
    assert second["accuracy"] == {"value": 0.7, "low": 0.6, "high": 0.8}
    assert second["win_rate"]["before"] == EVEN
    stage = {"stage": "evaluate", "status": "running"}
    write_json(tmp_path / "round-1" / "evaluate" / "stage.json", stage)
    assert [one["round"] for one in read_rounds(tmp_path)] == [0]
