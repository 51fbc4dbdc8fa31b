"""Wrong input: one message that says what is wrong and what to type; nothing is half-written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from labeling_app.db.store import Store
from rlhf.records.jsonl import write_json, write_jsonl
from tests.conftest import build_tiny_model
from tests.pipeline.loop import SHORT, Loop, write_prompts

Run = Callable[..., tuple[int, str, str]]
Change = Callable[[Path, Path], Path]


def assert_refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert code == 2, err
    assert err.startswith("error ")
    assert "Traceback" not in err
    assert out == ""
    for word in words:
        assert word in err, err


def other_tokenizer(source: Path, target: Path) -> Path:
    """A copy of a model that reads chats through another template."""
    shutil.copytree(source, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "bot")
    tokenizer.save_pretrained(target)
    return target


def test_missing_file(run_rlhf: Run, tmp_path: Path) -> None:
    database = tmp_path / "labels.db"
    result = run_rlhf("import", str(tmp_path / "none.jsonl"), "--db", str(database))
    assert_refused(result, "none.jsonl", "Check the path")
    assert not database.exists()


def test_malformed_line(run_rlhf: Run, tmp_path: Path) -> None:
    file, database = tmp_path / "bad.jsonl", tmp_path / "labels.db"
    file.write_text('{"prompt": "Hello there"}\n{"prompt": \n')
    assert_refused(run_rlhf("import", str(file), "--db", str(database)), "bad.jsonl:2", "JSON")
    assert not database.exists()


@pytest.mark.parametrize("command", ["annotate", "export", "generate"])
def test_empty_database(run_rlhf: Run, tmp_path: Path, command: str) -> None:
    database, out = tmp_path / "labels.db", tmp_path / "out"
    with Store(database):
        pass
    options = {
        "annotate": ["--annotator", "signal:tests.pipeline.signals:count_vowels"],
        "generate": ["--model", "no-model"],
    }
    arguments = options.get(command, ["--out", str(out)])
    assert_refused(run_rlhf(command, "--db", str(database), *arguments), "rlhf")
    assert not out.exists()


def test_database_that_does_not_exist(run_rlhf: Run, tmp_path: Path) -> None:
    database = tmp_path / "none.db"
    result = run_rlhf("export", "--db", str(database), "--out", str(tmp_path / "out"))
    assert_refused(result, "none.db", "rlhf import")
    assert not database.exists()


def test_empty_response(run_rlhf: Run, tmp_path: Path) -> None:
    file, database = tmp_path / "empty.jsonl", tmp_path / "labels.db"
    write_jsonl(file, [{"prompt": "Hello there", "responses": ["fine", ""]}])
    assert_refused(run_rlhf("import", str(file), "--db", str(database)), "empty.jsonl:1")
    assert not database.exists()


@pytest.mark.parametrize(
    "text",
    ["x" * 100_000, "<script>alert(1)</script>", "${1 + 1} {{ 7 * 7 }} \\u12"],
    ids=["100 kB", "script", "template"],
)
def test_hostile_responses_come_back_as_they_were(run_rlhf: Run, tmp_path: Path, text: str) -> None:
    file, database, out = tmp_path / "p.jsonl", tmp_path / "labels.db", tmp_path / "out"
    row = {"prompt": "Hello there", "responses": [text, "plain"], "tiers": [[0], [1]]}
    write_jsonl(file, [row])
    assert run_rlhf("import", str(file), "--db", str(database))[0] == 0
    assert run_rlhf("export", "--db", str(database), "--out", str(out))[0] == 0
    record = json.loads((out / "train.jsonl").read_text())
    assert text in [response["text"] for response in record["responses"]]


def test_unknown_setting(run_rlhf: Run, tmp_path: Path, loop: Loop) -> None:
    settings = tmp_path / "ppo.yaml"
    settings.write_text("learning_rat: 1e-5\n")
    out = tmp_path / "out"
    result = run_rlhf(*loop.ppo_arguments(out, "--config", str(settings)))
    assert_refused(result, "learning_rat", "Did you mean learning_rate?")
    assert not out.exists()


def test_model_that_does_not_exist(run_rlhf: Run, tmp_path: Path, loop: Loop) -> None:
    missing = str(tmp_path / "no-model")
    for command in (
        ["generate", "--db", loop.path("labels.db"), "-k", "9"],
        ["train-reward", "--rankings", loop.path("rankings"), "--out", str(tmp_path / "out")],
        ["reference", "--prompts", loop.path("rankings"), "--out", str(tmp_path / "out")],
    ):
        assert_refused(
            run_rlhf(*command, "--model", missing, "--precision", "fp32"), "no-model is not a model"
        )
        assert not (tmp_path / "out").exists()


def test_reward_model_of_another_tokenizer(run_rlhf: Run, tmp_path: Path, loop: Loop) -> None:
    reward = other_tokenizer(loop.folder / "reward" / "model", tmp_path / "other")
    arguments = [
        str(reward) if a == loop.path("reward") else a for a in loop.ppo_arguments(tmp_path / "out")
    ]
    assert_refused(run_rlhf(*arguments), "different tokenizers", "rlhf train-reward --model")
    assert not (tmp_path / "out").exists()


def test_reference_store_of_another_model(run_rlhf: Run, tmp_path: Path, loop: Loop) -> None:
    other = build_tiny_model(tmp_path / "other", seed=5)
    arguments = [
        str(other) if a == str(loop.model) else a for a in loop.ppo_arguments(tmp_path / "out")
    ]
    assert_refused(run_rlhf(*arguments), "whose weights differ", f"rlhf reference --model {other}")
    assert not (tmp_path / "out").exists()


def more_tokens(source: Path, target: Path) -> Path:
    """A copy of a model whose tokenizer knows another token."""
    shutil.copytree(source, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(target)
    return target


def no_template(source: Path, target: Path) -> Path:
    """A copy of a model that cannot chat."""
    shutil.copytree(source, target)
    (target / "chat_template.jinja").unlink()
    return target


@pytest.mark.parametrize("change", [other_tokenizer, more_tokens, no_template])
def test_reference_store_of_another_tokenizer_or_template(
    run_rlhf: Run, tmp_path: Path, loop: Loop, change: Change
) -> None:
    changed = change(loop.model, tmp_path / "changed")
    out = tmp_path / "out"
    arguments = [str(changed) if a == str(loop.model) else a for a in loop.ppo_arguments(out)]
    words = ("whose tokenizer or chat template differ", f"rlhf reference --model {changed}")
    assert_refused(run_rlhf(*arguments), *words)
    assert not out.exists()


def test_reference_store_of_truncated_sampling(run_rlhf: Run, tmp_path: Path, loop: Loop) -> None:
    made = tmp_path / "reference"
    shutil.copytree(loop.path("reference"), made)
    manifest = made / "outputs" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["sampling"]["top_p"] = 0.9
    write_json(manifest, content)
    arguments = [
        str(made) if a == loop.path("reference") else a
        for a in loop.ppo_arguments(tmp_path / "out")
    ]
    assert_refused(run_rlhf(*arguments), "sampled with top_p or top_k: they give no KL")
    assert not (tmp_path / "out").exists()


def test_reference_store_that_was_changed(run_rlhf: Run, tmp_path: Path, loop: Loop) -> None:
    broken = tmp_path / "reference"
    shutil.copytree(loop.path("reference"), broken)
    shard = broken / "outputs" / "train-00000.parquet"
    shard.write_bytes(shard.read_bytes() + b" ")
    arguments = [
        str(broken) if a == loop.path("reference") else a
        for a in loop.ppo_arguments(tmp_path / "out")
    ]
    assert_refused(run_rlhf(*arguments), "train-00000.parquet", "changed")


def test_model_without_chat_template(run_rlhf: Run, tmp_path: Path, loop: Loop) -> None:
    bare = no_template(loop.model, tmp_path / "bare")
    result = run_rlhf(
        *("reference", "--prompts", loop.path("rankings"), "--model", str(bare)),
        *("--out", str(tmp_path / "out"), *SHORT),
    )
    assert_refused(result, "no chat template", "instruction-tuned")


def test_prompt_longer_than_the_context(run_rlhf: Run, tmp_path: Path, loop: Loop) -> None:
    file = tmp_path / "long.jsonl"
    write_jsonl(file, [{"prompt": "the weather was lovely " * 200}])
    result = run_rlhf(
        *("reference", "--prompts", str(file), "--model", str(loop.model)),
        *("--out", str(tmp_path / "out"), *SHORT),
    )
    assert_refused(result, "exceeds the model's context of 512", "--max-new-tokens")


@pytest.mark.parametrize("stage", ["reward", "reference", "ppo", "evaluate"])
def test_existing_out(run_rlhf: Run, loop: Loop, stage: str) -> None:
    config = (loop.folder / stage / "config.yaml").read_bytes()
    arguments = {
        "reward": ["train-reward", "--rankings", loop.path("rankings"), "--model", str(loop.model)],
        "reference": ["reference", "--prompts", loop.path("rankings"), "--model", str(loop.model)],
        "ppo": [
            "ppo",
            "--model",
            str(loop.model),
            "--reward",
            loop.path("reward"),
            "--reference",
            loop.path("reference"),
        ],
        "evaluate": [
            *("evaluate", "--policy", loop.path("ppo"), "--reward", loop.path("reward")),
            *("--reference", loop.path("reference")),
        ],
    }[stage]
    result = run_rlhf(*arguments, "--precision", "fp32", "--out", str(loop.folder / stage))
    assert_refused(result, "already exists (done)", "--resume", "another --out")
    assert (loop.folder / stage / "config.yaml").read_bytes() == config


def test_stage_that_has_not_run(run_rlhf: Run, tmp_path: Path, loop: Loop) -> None:
    result = run_rlhf(
        *("ppo", "--model", str(loop.model), "--reward", loop.path("reward")),
        *("--reference", str(tmp_path / "none"), "--out", str(tmp_path / "out")),
    )
    assert_refused(result, "does not hold a finished reference stage", "rlhf reference --out")


def test_signal_that_returns_no_number(run_rlhf: Run, tmp_path: Path) -> None:
    file, database = tmp_path / "p.jsonl", tmp_path / "labels.db"
    write_jsonl(file, [{"prompt": "Hello there", "responses": ["a", "b"]}])
    assert run_rlhf("import", str(file), "--db", str(database))[0] == 0
    signal = "signal:tests.pipeline.signals:not_a_number"
    result = run_rlhf("annotate", "--db", str(database), "--annotator", signal)
    assert_refused(result, "returned nan", "finite number")


def test_prompts_of_one_split_only(run_rlhf: Run, tmp_path: Path, loop: Loop) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    write_jsonl(prompts, [row for row in rows if row["split"] == "train"])
    reference = tmp_path / "reference"
    made = run_rlhf(
        *("reference", "--prompts", str(prompts), "--model", str(loop.model)),
        *("--out", str(reference), *SHORT),
    )
    assert made[0] == 0, made[2]
    result = run_rlhf(
        *("evaluate", "--policy", loop.path("ppo"), "--reward", loop.path("reward")),
        *("--reference", str(reference), "--out", str(tmp_path / "out"), "--precision", "fp32"),
    )
    assert_refused(result, "no prompts of the split 'test'", "--split train")
