"""What the Runs page says when a loop has stopped: is it better, why it stopped, what to do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from labeling_app.web.runs.loop_process import LoopProcess
from labeling_app.web.runs.page import status_of
from labeling_app.web.runs.stopped import more_of_verdict, verdict, why_it_stopped
from rlhf.commands.loop.opened import read_loop_file
from rlhf.commands.loop.report import Stop, build_report, reason_to_stop
from rlhf.records.jsonl import write_json
from rlhf.run.loops.asking import write_asked
from rlhf.run.loops.promotion import promote
from rlhf.run.rundir import RunDir
from tests.rlhf.run.loops.folders import make_loop, make_round

GAIN = {"value": 0.62, "low": 0.55, "high": 0.69, "level": 0.95, "n": 60, "p_value": 0.004}
EVEN = {**GAIN, "value": 0.54, "low": 0.47, "high": 0.61, "p_value": 0.3}
LOSS = {**GAIN, "value": 0.31, "low": 0.2, "high": 0.42}
OWN = "reward model r, which it was trained against"


def rounds(*rates: dict[str, Any], judge: str = "signal my.vader:score") -> list[dict[str, Any]]:
    """Rounds that win so against the policy before each, and all against the original."""
    names = {0.62: "better", 0.54: "unproven", 0.31: "worse"}
    return [
        {
            "round": number,
            "outcome": names[rate["value"]],
            "judge": judge,
            "win_rate": {"before": rate, "original": GAIN if number else rate},
        }
        for number, rate in enumerate(rates)
    ]


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (
            GAIN,
            "The function vader:score prefers the policy of round 0 to the original model in 62 % "
            "of the comparisons. No people have voted.",
        ),
        (
            LOSS,
            "The function vader:score prefers the original model: the policy of round 0 wins only "
            "31 % of the comparisons.",
        ),
        (
            EVEN,
            "The policy of round 0 is not proven better than the original model: it wins 54 % of "
            "the comparisons, which can be chance.",
        ),
    ],
)
def test_first_it_says_whether_the_policy_is_better(rate: dict[str, Any], said: str) -> None:
    assert verdict(rounds(rate)) == said
    assert more_of_verdict(rounds(rate)) == "Judged by signal my.vader:score."


def test_only_people_find_a_policy_better() -> None:
    assert verdict(rounds(GAIN, judge="people")) == (
        "The policy of round 0 is better than the original model: it wins 62 % of the comparisons."
    )
    assert verdict(rounds(LOSS, judge="people")) == (
        "The policy of round 0 is worse than the original model: it wins only 31 % of the "
        "comparisons."
    )
    assert verdict(rounds(GAIN, judge="AI judge m")).startswith("The AI judge m prefers the policy")
    assert verdict(rounds(GAIN, judge=OWN)).startswith("Its own reward model prefers the policy")


def test_a_later_round_is_compared_with_both() -> None:
    done = rounds(GAIN, EVEN, judge=OWN)
    assert verdict(done) == (
        "The policy of round 1 is not proven better than that of round 0: it wins 54 % of the "
        "comparisons, which can be chance."
    )
    assert more_of_verdict(done) == (
        "Its own reward model prefers it to the original model in 62 % of the comparisons. The "
        "judge is the reward model that trained it, which alone proves little."
    )


def test_then_it_says_why_it_stopped(tmp_path: Path) -> None:
    def why(done: list[dict[str, Any]], stop: Stop | None) -> tuple[str, str]:
        return why_it_stopped(build_report(done, tmp_path, stop))

    limit = reason_to_stop(rounds(GAIN, GAIN), 2, without_gain=True)
    assert why(rounds(GAIN, GAIN), limit) == (
        "The loop has stopped because 2 of 2 rounds are done.",
        "",
    )
    no_gain = reason_to_stop(rounds(GAIN, EVEN), 3, without_gain=True)
    assert no_gain is not None
    assert why(rounds(GAIN, EVEN), no_gain) == (
        "The loop has stopped because this round is not a proven gain (stop_without_gain).",
        no_gain.sentence,
    )
    votes = "Round 1: wins … Another round can start."
    assert why(rounds(GAIN, GAIN), Stop(votes, None)) == (
        "The loop had stopped, but people's votes show a gain now.",
        votes,
    )


def test_of_a_report_without_the_reason_it_shows_the_sentence() -> None:
    """As earlier versions wrote them."""
    earlier = {"rounds": rounds(GAIN), "stopped": "1 of 1 round is done."}
    assert why_it_stopped(earlier) == ("The loop has stopped. 1 of 1 round is done.", "")


@pytest.fixture
def process(tmp_path: Path) -> LoopProcess:
    """A loop that has stopped after two rounds, the second without a gain."""
    (tmp_path / "prompts.jsonl").touch()
    file = tmp_path / "loop.yaml"
    file.write_text(f"out: {tmp_path / 'out'}\nmodel: m\nlead_may: [rounds, stop_without_gain]\n")
    found = LoopProcess(read_loop_file(file)[1])
    out = make_loop(found.file.out, "m")
    make_round(out, 0)
    make_round(out, 1)
    stop(found, rounds(GAIN, EVEN))
    return found


def stop(process: LoopProcess, done: list[dict[str, Any]]) -> None:
    reason = reason_to_stop(done, 3, without_gain=True) or Stop("Another round can start.", None)
    out = process.file.out
    write_json(out / "report.json", build_report(done, out, reason))


BLOCKED = (
    "Another round cannot start while stop_without_gain is yes. Set stop_without_gain to no under "
    "Settings; then Start appears here."
)


def test_last_it_says_what_a_lead_can_do(process: LoopProcess) -> None:
    out = process.file.out
    status = status_of(process)
    assert (status.name, status.may_start) == ("done", "")
    assert status.figures.startswith("Round 1: wins 54 % (95 % interval 47–61 %), sign test p")
    assert status.options == [
        "Promote the policy of round 0, the newest that gained.",
        "Ask people about round 1: they are the best judge, and were not asked.",
        BLOCKED,
    ]
    promote(out, 0, "lea")
    write_asked(RunDir(out / "round-1" / "evaluate"), out / "labels.db", [3, 4])
    assert status_of(process).options == [
        "Count votes on round 1 once people have voted: then they are the judge.",
        BLOCKED,
    ]
    promote(out, 1, "lea")  # which has not gained
    assert status_of(process).options[0].startswith("Count votes on round 1")
    stop(process, rounds(EVEN, judge="people"))
    assert status_of(process).options == [
        "Keep the original model: no round is a proven gain.",
        BLOCKED,
    ]
    stop(process, rounds(GAIN, judge="people"))
    status = status_of(process)  # by people's votes, counted since
    assert (status.may_start, status.figures) == ("Start", "Another round can start.")
    assert status.options == ["Start begins another round."]


def blocked(process: LoopProcess) -> str:
    return status_of(process).options[-1]


def test_start_is_offered_only_where_another_round_can_start(process: LoopProcess) -> None:
    stop(process, rounds(GAIN, GAIN, EVEN))
    assert status_of(process).may_start == ""
    assert blocked(process) == (
        "Another round cannot start while rounds is 3 and stop_without_gain is yes. Set rounds to "
        "4 or more under Settings and stop_without_gain to no under Settings; then Start appears "
        "here."
    )
    process.change({"rounds": 4})
    assert blocked(process) == BLOCKED
    file = process.file.path
    text = f"stop_without_gain: false\n{file.read_text('utf-8')}"
    file.write_text(text, encoding="utf-8")
    status = status_of(process)  # the file as it is now
    assert (status.may_start, status.options[-1]) == ("Start", "Start begins another round.")
    hyphens = text.replace("stop_without_gain: false", "stop-without-gain: true")
    file.write_text(hyphens, encoding="utf-8")
    assert "while stop_without_gain is yes" in blocked(process)
    file.write_text("rounds: [", encoding="utf-8")
    assert "loop.yaml is not valid YAML" in blocked(process)
    file.write_text(text, encoding="utf-8")
    closed = LoopProcess(replace(process.file, open=(), stop_without_gain=False))
    assert blocked(closed) == (
        "Another round cannot start while rounds is 3. Set rounds to 4 or more in loop.yaml "
        "(ask whoever started the app); then Start appears here."
    )
