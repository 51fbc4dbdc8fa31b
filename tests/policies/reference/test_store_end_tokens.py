"""The end tokens and template values that a reference store names, and those of an early one."""

import json
from pathlib import Path
from typing import Any

import pytest

from policies.reference.store import open_store
from rlhf.cli import main
from rlhf.errors import InputError
from rlhf.modeling.tokens import load_tokenizer
from tests.families import FAMILIES, build_family_model
from tests.pipeline.loop import SHORT, read_json
from tests.policies.stores import build_store


def change(manifest: Path, **values: Any) -> None:
    manifest.write_text(json.dumps({**read_json(manifest), **values}), encoding="utf-8")


@pytest.mark.parametrize("wrong", [None, [], "7", [True], [-1], [2.0], ["2"], {}])
def test_end_tokens_that_are_none_are_refused(
    tmp_path: Path, wrong: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = build_store(tmp_path / "store") / "manifest.json"
    change(manifest, end_token_ids=wrong)
    assert main(["reference", "--out", str(tmp_path / "store"), "--inspect"]) == 2
    problem = " ".join(capsys.readouterr().err.split())
    assert "manifest.json has 'end_token_ids' as" in problem


def test_end_tokens_that_the_model_lacks_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    manifest = build_store(tmp_path / "store") / "manifest.json"
    change(manifest, end_token_ids=[1, 10**6])
    store = open_store(manifest.parent)
    problem = r"manifest.json has 'end_token_ids' as \[1, 1000000\], not as token ids of its model"
    with pytest.raises(InputError, match=problem):
        store.load_tokenizer(str(tiny_model))


@pytest.mark.parametrize("wrong", ["{", "[1]", "", 7, None, "[" * 10_000, '{"tokenize": true}'])
def test_template_values_that_are_none_are_refused(
    tmp_path: Path, wrong: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = build_store(tmp_path / "store") / "manifest.json"
    model = read_json(manifest)["model"]
    change(manifest, model={**model, "chat_template_kwargs": wrong})
    assert main(["reference", "--out", str(tmp_path / "store"), "--inspect"]) == 2
    problem = " ".join(capsys.readouterr().err.split())
    assert "manifest.json (model) has 'chat_template_kwargs' as" in problem
    assert "not as a JSON object of values for a chat template" in problem


@pytest.mark.parametrize("is_early", [True, False])
def test_a_run_that_goes_on_ends_where_it_began_to(tmp_path: Path, *, is_early: bool) -> None:
    """Of an early version's run the finished shards end at `tokenizer.eos_token` alone."""
    model, out = build_family_model(tmp_path / "model", FAMILIES["llama3"]), tmp_path / "out"
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"How was trip {n}?"}) + "\n" for n in range(8))
    )
    tokenizer = load_tokenizer(str(model))
    whole = [tokenizer.convert_tokens_to_ids("<|eot_id|>"), tokenizer.eos_token_id]
    whole.append(tokenizer.convert_tokens_to_ids("<|eom_id|>"))
    arguments = ["reference", "--model", str(model), "--prompts", str(tmp_path / "prompts.jsonl")]
    arguments += ["--out", str(out), "--prompts-per-shard", "4", *SHORT]
    assert main([*arguments, "--shard", "0/2"]) == 0
    if is_early:
        (out / "end_tokens.json").unlink(missing_ok=True)
    else:  # its weights are the same
        (model / "generation_config.json").write_text('{"eos_token_id": 9}', encoding="utf-8")
    assert main([*arguments, "--shard", "1/2"]) == 0
    store = open_store(out / "outputs")
    ends = [tokenizer.eos_token_id] if is_early else whole
    assert store.manifest["end_token_ids"] == ends
    rows = store.rows[4:]
    for row in rows:
        assert row.finished is (row.response_ids[-1] in ends)
    others = {one for row in rows for one in row.response_ids} & set(whole) - set(ends)
    assert bool(others) is is_early  # they do not end anything in such a store
