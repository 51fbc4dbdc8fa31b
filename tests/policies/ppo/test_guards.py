"""Guards: what is a sign, that it is warned of once, and that it stops a run when it stays."""

from pathlib import Path

import pytest

from policies.ppo.checks import ReferenceMeans, check_guards, find_problems
from policies.ppo.rollout_metrics import distinct_2
from policies.ppo.setting_groups import GuardSettings
from rlhf.errors import GuardError
from tests.policies.training import TrainingInputs, metrics_of

NORMAL = ReferenceMeans(length=20.0, eos_rate=0.9, distinct_2=0.8, entropy=2.0)
GOOD = {
    "step": 7.0,
    "entropy": 1.8,
    "reward/centered": 1.0,
    "length": 30.0,
    "eos_rate": 0.8,
    "distinct_2": 0.7,
}
GUARDS = GuardSettings(patience=2, max_kl=0.5)


def test_distinct_pairs_of_one_answer() -> None:
    assert distinct_2([1, 2, 1, 2, 1]) == pytest.approx(2 / 4)
    assert distinct_2([1, 2, 3]) == 1.0
    assert distinct_2([1]) == 1.0


@pytest.mark.parametrize(
    ("changes", "kl", "expected"),
    [
        ({}, 0.4, set()),
        ({}, 0.6, {"kl"}),
        ({"entropy": 0.19}, None, {"entropy"}),
        ({"length": 61.0}, None, {"length"}),
        ({"length": 6.0}, None, {"length"}),
        ({"eos_rate": 0.39}, None, {"eos"}),
        ({"distinct_2": 0.39}, None, {"distinct"}),
        ({"distinct_2": 0.39, "reward/centered": -1.0}, None, set()),
    ],
)
def test_problems(changes: dict[str, float], kl: float | None, expected: set[str]) -> None:
    assert set(find_problems(GOOD | changes, kl, NORMAL, GUARDS)) == expected


def test_a_sign_is_warned_of_once_and_stops_the_run_when_it_stays() -> None:
    warnings: list[str] = []

    def step(row: dict[str, float], counts: dict[str, int]) -> dict[str, int]:
        place = Path("checkpoints/step-000005")
        return check_guards(row, None, NORMAL, GUARDS, counts, place, warnings.append)

    bad = GOOD | {"length": 70.0}
    assert step(GOOD, step(bad, {})) == {}  # a good step in between starts the count again
    assert warnings == [
        "Step 7.0: the length is 70.00 (reference outputs: 20.00) while rewards are above the "
        "reference outputs'."
    ]
    with pytest.raises(
        GuardError,
        match=r"it has lasted 2 steps \(--guards.patience 2\)\n.*step-000005 is the last good",
    ):
        step(bad, step(bad, {}))


def test_a_run_ends_with_3_at_the_kl_ceiling(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--guards.max-kl", "1e-9", "--guards.patience", "1", "--learning-rate", "1e-2")
    assert training.ppo(tmp_path / "ppo", *options, "--save-every", "1", steps=4) == 3
    words = " ".join(capsys.readouterr().err.split())
    assert "above --guards.max-kl 1e-09; it has lasted 1 step (--guards.patience 1)" in words
    assert "step-000001 is the last good checkpoint" in words


def test_an_audit_counts_until_the_next_one_and_no_doubtful_step_is_saved(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ppo"
    options = ("--guards.max-kl", "1e-9", "--guards.patience", "2", "--learning-rate", "1e-2")
    unbraked = ("--kl.source", "none", "--kl.audit-every", "2", "--save-every", "1")
    assert training.ppo(out, *options, *unbraked, steps=5) == 3
    words = " ".join(capsys.readouterr().err.split())
    assert "Step 3: the KL is" in words
    assert "it has lasted 2 steps" in words
    assert f"{out / 'checkpoints' / 'step-000001'} is the last good checkpoint" in words
    assert [row["step"] for row in metrics_of(out)] == [1, 2, 3]
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-000001"]
    before = metrics_of(out)
    assert training.ppo(out, *options, *unbraked, "--resume", steps=5) == 3
    assert metrics_of(out) == before
