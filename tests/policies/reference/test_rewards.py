"""Rewards for reference outputs: in place, whole or not at all, and never another's by mistake."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from policies.reference.rewards import is_scored_by
from policies.reference.shards import read_table, reward_of, write_table
from policies.reference.store import ReferenceStore, open_store
from policies.rewards import Reward
from rlhf.cli import main
from rlhf.run.rundir import RunDir
from tests.pipeline.signals import count_vowels
from tests.policies.training import TrainingInputs
from tests.servers.commands import RLHF, run_group, run_process, run_program

VOWELS = "signal:tests.pipeline.signals:count_vowels"
LETTERS = "signal:tests.pipeline.signals:count_letters"
DEADLY = "signal:tests.pipeline.signals:count_or_die"
SCALED = "signal:tests.pipeline.signals:count_scaled"
BROKEN = "signal:tests.pipeline.signals:not_a_number"


@pytest.fixture
def out(training: TrainingInputs, tmp_path: Path) -> Path:
    """Outputs of two shards that no reward model has seen."""
    folder = tmp_path / "reference"
    prompts = training.reference.parent / "prompts.jsonl"
    command = ["reference", "--prompts", str(prompts), "--model", str(training.model)]
    short = ["--max-new-tokens", "4", "--precision", "fp32", "--samples", "2"]
    assert main([*command, *short, "--out", str(folder)]) == 0
    return folder


def arguments(out: Path, reward: str, *more: str) -> list[str]:
    return ["reference", "--out", str(out), "--reward", reward, "--precision", "fp32", *more]


def add(out: Path, reward: str, *more: str) -> int:
    return main(arguments(out, reward, *more))


def add_in_bf16(out: Path, reward: str, *more: str) -> int:
    """In a process of its own, since a process keeps its first precision."""
    return run_process(*arguments(out, reward)[:-1], "bf16", *more).returncode


def rewards_in(out: Path) -> list[float | None]:
    return [row.reward for row in open_store(out / "outputs").rows]


def test_a_function_scores_what_is_stored_and_nothing_else_changes(out: Path) -> None:
    before = open_store(out / "outputs")
    rows = list(before.rows)
    assert {row.reward for row in rows} == {None}
    assert add(out, VOWELS) == 0
    after = open_store(out / "outputs")
    assert [row.text for row in after.rows] == [row.text for row in rows]
    assert rewards_in(out) == [count_vowels("", row.text) for row in rows]
    assert after.content_hash == before.content_hash
    scored = {"path": VOWELS, "hash": VOWELS, "precision": "fp32"}
    assert after.manifest["reward"] == scored
    run = RunDir(out)
    assert run.is_done
    assert run.read_stage()["inputs"]["reward"] == {"path": VOWELS, "hash": VOWELS}
    assert run.read_report()["reward"] == {"path": VOWELS, "hash": VOWELS}


def test_the_same_reward_model_by_another_path_is_not_another(
    out: Path, training: TrainingInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert add(out, str(training.reward)) == 0
    before = (out / "outputs" / "manifest.json").read_bytes()
    monkeypatch.chdir(training.reward.parent)
    assert add(out, training.reward.name) == 0
    assert (out / "outputs" / "manifest.json").read_bytes() == before


def test_scoring_adds_to_what_the_store_has_cost(out: Path) -> None:
    run = RunDir(out)
    run.stage_file.write_text(json.dumps({**run.read_stage(), "device_seconds": 3600}))
    assert add(out, VOWELS, "--price-per-hour", "2") == 0
    first = run.read_report()["cost"]
    assert 1 < first["device_hours"] < 1.1  # an hour of sampling, and seconds of scoring
    assert first["price"] == pytest.approx(2 * first["device_hours"], abs=1e-5)
    assert add(out, LETTERS, "--replace-reward") == 0
    second = run.read_report()["cost"]
    assert first["device_hours"] < second["device_hours"] < 1.1
    assert second["price_per_hour"] == 2  # as before, where none is given


def test_a_reward_model_gives_what_it_gives_when_the_store_is_made(
    training: TrainingInputs, tmp_path: Path
) -> None:
    out = tmp_path / "reference"
    shutil.copytree(training.reference, out)
    expected = rewards_in(out)
    assert add(out, VOWELS, "--replace-reward") == 0
    assert rewards_in(out) != expected
    assert add(out, str(training.reward), "--replace-reward") == 0
    assert rewards_in(out) == pytest.approx(expected, abs=1e-5)
    training_reward = open_store(training.reference / "outputs").manifest["reward"]
    assert open_store(out / "outputs").manifest["reward"] == training_reward


def test_what_says_how_to_sample_has_no_meaning_for_stored_outputs(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(out, VOWELS, "--samples", "4") == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "--sampling.samples is 4 for outputs that --out already holds" in words
    assert "to sample new outputs" in words
    assert main(["reference", "--inspect", "--out", str(out), "--samples", "4"]) == 0
    assert add(out, VOWELS, "--batch-size", "1") == 0
    assert rewards_in(out) == [
        count_vowels("", row.text) for row in open_store(out / "outputs").rows
    ]


def test_a_reward_that_hangs_is_told_and_leaves_a_store(out: Path) -> None:
    (out / "slow_signals.py").write_text(
        "import time\n\ndef sleep(prompt, response):\n    time.sleep(300)\n"
    )
    words = [*RLHF, *arguments(out, "signal:slow_signals:sleep"), "--stall-timeout", "3"]
    ended = run_program(*words, folder=out)
    assert ended.returncode == 75
    assert "No progress for 3 seconds: rank 0" in ended.stderr
    assert RunDir(out).is_done
    assert set(rewards_in(out)) == {None}
    assert add(out, VOWELS) == 0


def test_another_reward_is_refused_unless_it_is_asked_for(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(out, VOWELS) == 0
    before = {path.name: path.read_bytes() for path in (out / "outputs").iterdir()}
    assert add(out, LETTERS) == 2
    error = capsys.readouterr().err
    assert f"The outputs in {out} have the rewards of {VOWELS} ({VOWELS}), not of {LETTERS}" in (
        error
    )
    assert "Add --replace-reward" in error
    assert add(out, VOWELS) == 0
    assert {path.name: path.read_bytes() for path in (out / "outputs").iterdir()} == before


def test_a_reward_that_breaks_off_leaves_a_store_without_rewards(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(out, VOWELS) == 0
    assert add(out, BROKEN, "--replace-reward") == 2
    assert "nan" in capsys.readouterr().err
    assert set(rewards_in(out)) == {None}
    assert add(out, VOWELS) == 0  # nothing is left to replace
    assert None not in rewards_in(out)


def test_a_killed_run_leaves_no_mixture_and_goes_on(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert add(out, LETTERS) == 0
    first, second = (out / "outputs" / f"{split}-00000.parquet" for split in ("train", "test"))
    monkeypatch.setenv("KILL_AT", "How was")  # the test prompts, which come second
    done = run_process(*arguments(out, DEADLY, "--replace-reward"))
    assert done.returncode == -signal.SIGKILL
    assert (reward_of(first), reward_of(second)) == (f"{DEADLY} #1", LETTERS)
    assert set(rewards_in(out)) == {None}
    kept = first.stat().st_mtime_ns
    monkeypatch.delenv("KILL_AT")
    assert add(out, DEADLY) == 0
    assert first.stat().st_mtime_ns == kept
    assert rewards_in(out) == [count_vowels("", r.text) for r in open_store(out / "outputs").rows]


def test_a_function_that_has_changed_replaces_its_own_rewards(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert add(out, SCALED) == 0
    first = rewards_in(out)
    monkeypatch.setenv("SCALE", "2")
    assert add(out, SCALED) == 0  # by name they are the same
    assert rewards_in(out) == first
    for scale in (2, 3):
        monkeypatch.setenv("SCALE", str(scale))
        assert add(out, SCALED, "--replace-reward", "--shard", "1/2") == 0
        assert set(rewards_in(out)) == {None}
        assert add(out, SCALED, "--shard", "0/2") == 0
        assert rewards_in(out) == [scale * reward for reward in first]
    monkeypatch.setenv("SCALE", "4")
    assert add(out, VOWELS, "--replace-reward", "--shard", "1/2") == 0  # which is not finished
    assert add(out, SCALED, "--shard", "1/2") == 0
    monkeypatch.setenv("SCALE", "5")
    assert add(out, SCALED, "--replace-reward") == 0  # also what it scored before its change
    assert rewards_in(out) == [5 * reward for reward in first]


def test_a_model_scores_a_store_in_one_precision(
    out: Path, training: TrainingInputs, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = str(training.reward)
    assert add_in_bf16(out, reward, "--shard", "1/2") == 0
    assert set(rewards_in(out)) == {None}
    assert add(out, reward, "--shard", "0/2") == 2
    words = " ".join(capsys.readouterr().err.split())
    assert f"1 of 2 files in {out}/outputs have the rewards of {reward} in bf16" in words
    assert "this job computes in fp32" in words
    assert "Add --precision bf16, or score all of them again: --replace-reward." in words
    assert set(rewards_in(out)) == {None}

    both = shutil.copytree(out, out.with_name("both"))  # as of two jobs that began together
    mine, other = (both / "outputs" / f"{split}-00000.parquet" for split in ("train", "test"))
    write_table(mine, read_table(mine), reward_of(other).replace("bf16", "fp32"))
    assert add(both, reward, "--shard", "0/2") == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "fp32 Score all of them again: --replace-reward." in words

    assert add_in_bf16(out, reward) == 0  # the file of job 0
    stored = open_store(out / "outputs").manifest["reward"]
    assert stored["precision"] == "bf16"
    rough = rewards_in(out)

    assert add(out, reward) == 2
    named = f"{reward} ({stored['hash']})"
    words = " ".join(capsys.readouterr().err.split())
    assert f"have the rewards of {named} in bf16, not of {named} in fp32" in words
    assert add(out, reward, "--replace-reward") == 0
    assert open_store(out / "outputs").manifest["reward"]["precision"] == "fp32"
    assert rewards_in(out) != rough
    assert rewards_in(out) == pytest.approx(rough, abs=0.05)


def test_jobs_score_one_store_together(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert add(out, VOWELS, "--shard", "1/2", "--json") == 0
    assert '{"shards": {"scored": 1, "of": 2}}' in capsys.readouterr().out
    assert set(rewards_in(out)) == {None}
    assert add(out, VOWELS, "--shard", "0/2") == 0
    assert None not in rewards_in(out)
    assert set(read_table(out / "outputs" / "test-00000.parquet")["reward"].to_pylist()) != {None}


def test_a_reward_model_of_another_tokenizer_is_refused(
    out: Path, training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(training.reward, other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "bot"))
    assert add(out, str(other)) == 2
    assert "different tokenizers" in capsys.readouterr().err
    assert set(rewards_in(out)) == {None}


SPLIT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from policies.reference.rewards import rewards_by_prompt
from policies.reference.store import open_store
from policies.rewards import load_reward
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start
from rlhf.parallel.sharding import Sharding
from rlhf.ranks import exit_process, rank

reference, model, *names = sys.argv[1:-1]
accelerator, found = start("fp32", 0), {}
store, tokenizer = open_store(Path(reference, "outputs")), load_tokenizer(model)
for name in names:
    for kind in ("ddp", "fsdp") if accelerator.num_processes > 1 else ("ddp",):
        reward = load_reward([name], accelerator, sharding=Sharding(kind))
        [source], sizes = reward.sources, []

        def counting(prompts, *rest):
            sizes.append(len(prompts))
            return source(prompts, *rest)

        rewards = rewards_by_prompt(store, replace(reward, sources=(counting,)), tokenizer,
                                    accelerator, Sharding(kind))
        found[f"{name} {kind}"] = rewards, sizes
Path(sys.argv[-1] + str(rank())).write_text(json.dumps(found))
exit_process(0)
"""


def test_processes_share_the_scoring_of_a_store_without_rewards(
    training: TrainingInputs, tmp_path: Path
) -> None:
    prompts, out = training.reference.parent / "prompts.jsonl", tmp_path / "reference"
    command = ["reference", "--prompts", str(prompts), "--model", str(training.model)]
    short = ["--max-new-tokens", "4", "--precision", "fp32", "--samples", "6"]
    assert main([*command, *short, "--out", str(out)]) == 0
    program, names = tmp_path / "program.py", (VOWELS, str(training.reward))
    program.write_text(SPLIT, encoding="utf-8")
    for processes in (1, 2):
        words = (out, training.model, *names, tmp_path / f"{processes}.")
        done = run_group(processes, program, *words)
        assert done.returncode == 0, done.stderr[-4000:]
    alone, main_one, other = (
        json.loads((tmp_path / name).read_text()) for name in ("1.0", "2.0", "2.1")
    )
    for name in names:
        expected, sizes = alone[f"{name} ddp"]
        assert sizes == [32, 32, 8]  # 72 outputs
        for rank, scored in ((main_one, [32, 8]), (other, [32])):
            assert rank[f"{name} ddp"] == [expected, scored]  # bit for bit
            sharded, scored_in_step = rank[f"{name} fsdp"]
            assert scored_in_step == (scored if rank is main_one else scored * 2)
            for prompt, values in expected.items():
                assert sharded[prompt] == pytest.approx(values, rel=1e-5, abs=1e-6)


def test_stored_rewards_count_only_for_the_same_model_in_the_same_precision() -> None:
    def is_scored(stored: dict[str, str] | None, path: str = "runs/reward") -> bool:
        store = ReferenceStore(Path("outputs"), {"reward": stored}, "original")
        return is_scored_by(store, Reward((), (), "sum", {"path": path, "hash": "a"}, list), "bf16")

    same = {"path": "another/name", "hash": "a", "precision": "bf16"}
    assert is_scored(same)
    assert not is_scored(None)
    assert not is_scored({**same, "hash": "b"})
    assert not is_scored({**same, "precision": "fp32"})
    assert not is_scored({"path": "runs/reward", "hash": "a"})  # of an earlier version
    assert not is_scored(same, VOWELS)  # the function may have changed
