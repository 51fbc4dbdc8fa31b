"""What the Runs page says of settings, of the time that is left, and of a round without a gain."""

from dataclasses import replace

from labeling_app.web.runs.loop_file import names_on_page, settings_on_page
from labeling_app.web.runs.page import Status, before_promotion, left_of
from labeling_app.web.runs.progress import RoundView, StageView


def test_help_and_messages_name_settings_as_the_page_does() -> None:
    help = "With `--kl.source top_k`; needs `rlhf reference --store-top-k`. A pre--set-up stays."
    assert names_on_page(help, "stages.ppo") == (
        "With `stages.ppo.kl.source top_k`; needs `stages.reference.store_top_k`. "
        "A pre--set-up stays."
    )
    assert settings_on_page("stages.ppo: 2 --rewards.weights for 1 --reward", "Drop --reward.") == (
        "stages.ppo: 2 stages.ppo.rewards.weights for 1 stages.ppo.reward",
        "Drop stages.ppo.reward.",
    )
    assert settings_on_page("--new-rankings is none", "Set --start-at.") == (
        "new_rankings is none",
        "Set start_at.",
    )


def test_a_round_says_how_long_it_takes_only_while_it_runs() -> None:
    half = StageView(name="ppo", status="not started", left_seconds=120.0)
    open_round = RoundView(number=1, stages=[half])
    left = "About 2 min left, if every stage takes as long as in the round before."
    assert left_of(open_round, Status(name="running", sentence="")) == left
    for name in ("paused", "waiting", "running"):
        assert left_of(open_round, Status(name=name, sentence="", waits_for="Paused.")) == "Paused."
    for name in ("pausing", "failed", "killed", "done"):
        assert left_of(open_round, Status(name=name, sentence="")) == ""
    done = RoundView(number=0, stages=[replace(half, status="done")])
    assert left_of(done, Status(name="paused", sentence="", waits_for="Paused.")) == ""


def test_who_promotes_without_a_gain_is_told_so() -> None:
    rate = {"value": 0.44, "low": 0.3, "high": 0.58}
    found = {"outcome": "unproven", "win_rate": {"before": rate}}
    one = RoundView(number=0, stages=[], result=found)
    assert before_promotion(one) == (
        "Round 0 did not gain: its policy wins 44 % (95 % interval 30–58 %) against the original "
        "model."
    )
    worse = RoundView(number=2, stages=[], result={**found, "outcome": "worse"})
    assert before_promotion(worse) == (
        "Round 2 lost: its policy wins 44 % (95 % interval 30–58 %) against the policy of round 1."
    )
    assert before_promotion(RoundView(number=1, stages=[])) == (
        "The report of the loop does not say yet whether round 1 gained."
    )


def test_who_promotes_what_only_a_function_prefers_is_told_so() -> None:
    rate = {"value": 0.83, "low": 0.62, "high": 0.95}
    found = {"outcome": "better", "win_rate": {"before": rate}, "judge": "signal vader:score"}
    assert before_promotion(RoundView(number=0, stages=[], result=found)) == (
        "The function vader:score prefers this policy to the original model: it wins 83 % (95 % "
        "interval 62–95 %). No people have voted."
    )
    by_people = {**found, "judge": "people"}
    assert before_promotion(RoundView(number=0, stages=[], result=by_people)) == ""
