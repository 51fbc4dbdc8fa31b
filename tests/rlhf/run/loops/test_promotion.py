"""Which policy of a loop is promoted: what is refused, and what a rollback returns to."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf.cli import main
from rlhf.errors import InputError
from rlhf.modeling.models import policy_folder
from rlhf.records.jsonl import write_json
from rlhf.run.loops.promotion import (
    evaluated_rounds,
    promote,
    promoted_policy,
    promoted_round,
    read_promotions,
    roll_back,
)
from tests.pipeline.loop import read_json
from tests.rlhf.run.loops.folders import make_loop, make_round


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A loop with the rounds 0 and 1, and a round 2 that is not evaluated."""
    folder = make_loop(tmp_path / "loop", model="models/first")
    for number in range(2):
        make_round(folder, number)
    make_round(folder, 2, evaluate="running")
    return folder


def rounds(out: Path) -> list[int | None]:
    return [one.round for one in read_promotions(out)]


def test_a_rollback_returns_to_the_policy_before_and_at_last_to_the_first_model(out: Path) -> None:
    assert promoted_policy(out) == policy_folder(str(out)) == "models/first"
    promote(out, 0, "lea")
    assert policy_folder(str(out)) == f"{out}/round-0/ppo/policy"
    promote(out, 1, "lea")
    promote(out, 0, "ann")  # again, as a newer promotion
    assert roll_back(out, "lea").round == 1
    assert policy_folder(str(out)) == f"{out}/round-1/ppo/policy"
    assert roll_back(out, "lea").round == 0
    assert roll_back(out, "lea").round is None
    assert promoted_policy(out) == "models/first"
    assert rounds(out) == [0, 1, 0, 1, 0, None]
    with pytest.raises(InputError) as caught:
        roll_back(out, "lea")
    assert str(caught.value) == (
        f"No policy of {out} is promoted\n  Promote one: rlhf runs promote OUT --round N"
    )
    promote(out, 1, "lea")
    assert roll_back(out, "lea").round is None  # what was rolled back is not returned to


def test_the_file_names_the_policy_and_the_history(out: Path) -> None:
    promote(out, 0, "ann")
    promote(out, None, "lea")  # the newest one that is evaluated
    content = read_json(out / "promoted.json")
    assert (content["round"], content["policy"]) == (1, "round-1/ppo/policy")
    assert [(one["round"], one["by"], one["rolled_back"]) for one in content["history"]] == [
        (0, "ann", False),
        (1, "lea", False),
    ]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (2, "The policy of round 2 cannot be promoted: {out}/round-2/evaluate is not done\n"
            "  Evaluated are: 0, 1. Let the loop finish the round first."),
        (7, "The policy of round 7 cannot be promoted: {out}/round-7/ppo is not done\n"
            "  Evaluated are: 0, 1. Let the loop finish the round first."),
        (1, "The policy of round 1 is promoted already\n  Choose another --round."),
    ],
)  # fmt: skip
def test_what_cannot_be_promoted(out: Path, number: int, message: str) -> None:
    promote(out, 1, "lea")
    with pytest.raises(InputError) as caught:
        promote(out, number, "lea")
    assert str(caught.value) == message.format(out=out)
    assert rounds(out) == [1]


def test_a_loop_without_an_evaluated_round_and_another_folder(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "loop", model="m")
    make_round(loop, 0, ppo="running")
    assert evaluated_rounds(loop) == []
    with pytest.raises(InputError, match=r"No round of .*loop is evaluated yet"):
        promote(loop, None, "lea")
    with pytest.raises(InputError, match=r"is not the folder of a loop\n  Give the --out of"):
        promote(tmp_path, None, "lea")
    assert promoted_policy(tmp_path, "models/first") == "models/first"


def test_all_promotions_at_once_are_kept(out: Path) -> None:
    for number in range(3, 11):
        make_round(out, number)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: promote(out, n, "lea"), range(3, 11)))
    assert sorted(map(int, rounds(out))) == list(range(3, 11))
    assert promoted_round(read_promotions(out)) == rounds(out)[-1]


def test_a_broken_history_is_named(out: Path) -> None:
    write_json(out / "promoted.json", {"history": [{"round": "1", "by": "lea"}]})
    with pytest.raises(InputError, match=r"promoted.json has 'round' as '1', not as int \| None"):
        promoted_policy(out)


def test_the_commands(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str, code: int = 0) -> str:
        assert main(["runs", words[0], str(out), *words[1:]]) == code
        found = capsys.readouterr()
        return found.err if code else found.out

    assert said("promote", "--round", "0") == f"Promoted: round 0, {out}/round-0/ppo/policy\n"
    assert said("promote") == f"Promoted: round 1, {out}/round-1/ppo/policy\n"
    assert said("rollback") == f"Promoted: round 0, {out}/round-0/ppo/policy\n"
    assert said("rollback") == "No policy is promoted: the model, models/first\n"
    lines = [line.split(" ", 3)[3] for line in said("history").splitlines()[:-1]]
    assert lines == [
        "promoted round 0",
        "promoted round 1",
        "rolled back to round 0",
        "rolled back to the original model",
    ]
    assert "cannot be promoted" in said("promote", "--round", "2", code=2)
    idle = f"No loop runs in {out}; the next one waits until it is resumed.\n"
    assert said("pause", "--now") == idle
    assert read_json(out / "pause.json")["stops_stage"] is True
    assert said("resume") == f"No loop runs in {out}. Next: rlhf loop --config {out}/config.yaml\n"
    assert not (out / "pause.json").exists()
    assert said("resume").startswith("It was not paused. No loop runs in ")
    assert said("pause", "--round", "1", code=2) == (
        "error --round has no effect with pause\n  Leave it out.\n"
    )
