"""A model that is not whole is refused by every loader, and what is wrong with it is named."""

import ast
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.errors import InputError
from rlhf.modeling.adapters import add_adapters, load_reward_model_on, save_adapters
from rlhf.modeling.models import (
    describe_model,
    load_causal_lm,
    load_config,
    load_reward_model,
    new_reward_model,
    save_model,
)
from rlhf.modeling.tokens import encode_prompt, load_tokenizer
from rlhf.planning.planner import read_shape
from rlhf.records.schema import Message, Prompt
from tests.servers.commands import REPOSITORY

PROMPT = Prompt.create((Message(role="user", content="How was the trip?"),), "train", "test")
QUERY = "model.layers.1.self_attn.q_proj.weight"
NEW_HEAD: Callable[[str], Any] = lambda name: new_reward_model(name, 0, 0)  # noqa: E731


@pytest.fixture
def policy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "policy"))


@pytest.fixture
def reward(tiny_model: Path, tmp_path: Path) -> Path:
    model = new_reward_model(str(tiny_model), 0, seed=4)
    save_model(model, load_tokenizer(str(tiny_model)), tmp_path / "reward")
    return tmp_path / "reward"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def set_json(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps({**content, **values}), encoding="utf-8")


def refusal(load: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(InputError) as caught:
        load(*arguments)
    assert caught.value.exit_code == 2
    return caught.value.problem


def test_a_reward_model_without_its_head_is_refused(reward: Path) -> None:
    edit(reward, lambda weights: weights.pop("score.weight"))
    assert refusal(load_reward_model, str(reward)) == (
        f"The weights of {reward} are not those that its config.json describes "
        "(missing: score.weight)"
    )


def test_a_policy_without_a_layer_is_refused_whoever_loads_it(policy: Path) -> None:
    edit(policy, lambda weights: [weights.pop(n) for n in list(weights) if ".layers.1." in n])
    for load in (load_causal_lm, NEW_HEAD):
        problem = refusal(load, str(policy))
        assert "missing: model.layers.1.input_layernorm.weight, " in problem
        assert problem.endswith(", … 9 in all)")


def test_a_weight_too_many_is_refused(policy: Path, reward: Path) -> None:
    for folder, load in ((policy, load_causal_lm), (policy, NEW_HEAD), (reward, load_reward_model)):
        for name in ("model.layers.7.x", "value_head.weight"):
            edit(folder, lambda weights, name=name: weights.update({name: torch.zeros(2)}))
            assert f"(unexpected: {name})" in refusal(load, str(folder))
            edit(folder, lambda weights, name=name: weights.pop(name))


def test_a_weight_of_another_shape_is_refused(policy: Path, reward: Path) -> None:
    for folder, load in ((policy, load_causal_lm), (policy, NEW_HEAD), (reward, load_reward_model)):
        edit(folder, lambda weights: weights.update({QUERY: torch.zeros(7, 32)}))
        assert f"(of another shape: {QUERY} (7, 32) for (32, 32))" in refusal(load, str(folder))


def test_fewer_layers_than_the_weights_have_are_refused(policy: Path) -> None:
    set_json(policy / "config.json", num_hidden_layers=1)
    assert "unexpected: model.layers.1.input_layernorm" in refusal(load_causal_lm, str(policy))


def test_a_new_head_is_said_and_takes_the_place_of_an_untied_output_matrix(
    tmp_path: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = LlamaConfig.from_pretrained(tiny_model, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    NEW_HEAD(str(tmp_path))
    assert f"{tmp_path} has no reward head: score.weight is new.\n" in capfd.readouterr().err


def test_tied_weights_are_whole(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "lm_head.weight" not in load_file(tiny_model / "model.safetensors")
    load_causal_lm(str(tiny_model))
    assert "is new" not in capfd.readouterr().err


def in_shards(policy: Path) -> Path:
    LlamaForCausalLM.from_pretrained(policy).save_pretrained(policy, max_shard_size="20KB")
    (policy / "model.safetensors").unlink()
    assert len(list(policy.glob("model-*.safetensors"))) > 2
    return policy


def test_shards_are_read_and_a_missing_one_is_refused(policy: Path) -> None:
    shards = in_shards(policy)
    load_causal_lm(str(shards))
    lost = sorted(shards.glob("model-*.safetensors"))[1]
    lost.unlink()
    problem = refusal(load_causal_lm, str(shards))
    assert problem.startswith(f"Cannot load the weights of {shards} (")
    assert lost.name in problem


def test_a_shard_of_another_saving_is_refused(policy: Path) -> None:
    shards = in_shards(policy)
    first = max(shards.glob("model-*.safetensors"))
    weights = load_file(first)
    name = max(weights)
    weights.pop(name)
    save_file(weights, first, metadata={"format": "pt"})
    assert f"missing: {name}" in refusal(load_causal_lm, str(shards))


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', "\x00", "{" * 5000])
def test_a_broken_index_of_shards_is_refused(policy: Path, index: str) -> None:
    shards = in_shards(policy)
    (shards / "model.safetensors.index.json").write_text(index)
    assert "Cannot load the weights of" in refusal(load_causal_lm, str(shards))


def test_weights_in_the_old_format_run_no_code_and_may_not_be_broken(policy: Path) -> None:
    weights = load_file(policy / "model.safetensors")
    (policy / "model.safetensors").unlink()
    file = policy / "pytorch_model.bin"
    torch.save(weights, file)
    load_causal_lm(str(policy))
    file.write_bytes(file.read_bytes()[:3000])
    assert "Cannot load the weights of" in refusal(load_causal_lm, str(policy))
    torch.save({**weights, QUERY: Forged(policy / "ran")}, file)
    assert "Cannot load the weights of" in refusal(load_causal_lm, str(policy))
    assert not (policy / "ran").exists()


class Forged:
    """Unpickled, it touches a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": -1, "vocab_size": None},
        {"hidden_act": "no_such_function"},
        {"rope_parameters": 7},
    ],
)
def test_a_config_that_describes_no_model_is_refused(policy: Path, changes: dict[str, Any]) -> None:
    set_json(policy / "config.json", **changes)
    for load in (load_causal_lm, NEW_HEAD, read_shape):
        assert str(policy) in refusal(load, str(policy))


@pytest.mark.parametrize("text", ["", "[]", "null", "{" * 5000, '{"model_type": 3}', "\xff"])
def test_a_config_that_cannot_be_read_is_refused(policy: Path, text: str) -> None:
    (policy / "config.json").write_text(text, encoding="latin-1")
    assert f"Cannot read the model {policy}" in refusal(load_config, str(policy))


def test_weights_of_another_folder_are_not_taken(policy: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(policy, tmp_path / "other"))
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(other)}
    set_json(policy / "adapter_config.json", **adapter)
    assert refusal(load_causal_lm, str(policy)) == (
        f"{policy} holds an adapter (adapter_config.json), which needs the weights of another "
        "folder"
    )


@pytest.mark.parametrize("text", ["", "{}", "[]", "not JSON", '{"model": {}}', "{" * 5000])
def test_a_bad_tokenizer_is_refused(policy: Path, text: str) -> None:
    (policy / "tokenizer.json").write_text(text)
    for load in (load_tokenizer, describe_model):
        assert f"Cannot load a tokenizer from {policy}" in refusal(load, str(policy))


@pytest.mark.parametrize("changes", [{"eos_token": 7}, {"tokenizer_class": 3}, {"eos_token": {}}])
def test_bad_settings_of_a_tokenizer_are_refused(policy: Path, changes: dict[str, Any]) -> None:
    set_json(policy / "tokenizer_config.json", **changes)
    assert f"okenizer from {policy}" in refusal(load_tokenizer, str(policy))


def test_a_tokenizer_of_a_larger_model_is_refused(policy: Path) -> None:
    set_json(policy / "config.json", vocab_size=300)
    assert refusal(describe_model, str(policy)) == (
        f"The tokenizer of {policy} knows 377 tokens, its model only 300"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ messages[99].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ raise_exception('never') }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_failing_chat_template_is_refused(policy: Path, template: str) -> None:
    (policy / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(policy))
    problem = refusal(encode_prompt, tokenizer, PROMPT)
    assert problem.startswith(f"The chat template of {policy} refuses prompt {PROMPT.id} (")


def test_a_chat_template_that_says_nothing_is_refused(policy: Path) -> None:
    (policy / "chat_template.jinja").write_text("{# nothing #}")
    tokenizer = load_tokenizer(str(policy))
    assert refusal(encode_prompt, tokenizer, PROMPT) == (
        f"The chat template of {policy} makes no tokens of prompt {PROMPT.id}"
    )


ADAPTER = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
HEAD = "base_model.model.score.weight"


@pytest.fixture
def adapted(policy: Path, reward: Path) -> Path:
    """A reward model that keeps its adapter."""
    model = load_reward_model(str(reward))
    add_adapters(model, rank=2, alpha=4, seed=0)
    save_adapters(reward, model, model.state_dict(), describe_model(str(policy)))
    return reward


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop(HEAD), "missing: score.weight"),
        (lambda w: w.pop(ADAPTER), "missing: model.layers.0.mlp.up_proj.lora_A.weight"),
        (lambda w: w.update(x=torch.zeros(1)), "unexpected: x"),
        (lambda w: w.update({HEAD: torch.zeros(2, 32)}), "score.weight (2, 32) for (1, 32)"),
        (
            lambda w: w.update({ADAPTER: torch.zeros(2, 9)}),
            "model.layers.0.mlp.up_proj.lora_A.weight (2, 9) for (2, 32)",
        ),
    ],
)
def test_an_adapter_that_is_not_whole_is_refused(
    policy: Path, adapted: Path, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    base = load_causal_lm(str(policy))
    load_reward_model_on(base, str(adapted))
    file = adapted / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    problem = refusal(load_reward_model_on, base, str(adapted))
    assert problem.startswith(f"The weights of {adapted}/adapter are not those that its adapter_")
    assert words in problem


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_cannot_be_read_is_refused(policy: Path, adapted: Path, name: str) -> None:
    (adapted / "adapter" / name).write_text("{")
    base = load_causal_lm(str(policy))
    assert f"Cannot read the adapter {adapted}/adapter (" in refusal(
        load_reward_model_on, base, str(adapted)
    )


CODE = "from pathlib import Path\nPath({!r}).touch()\nclass {}: pass\n"


def test_code_in_a_model_folder_never_runs(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    for name in ("Config", "Model", "Tokenizer"):
        (policy / f"{name.lower()}.py").write_text(CODE.format(str(ran), name))
    code = {
        "AutoConfig": "config.Config",
        "AutoModelForCausalLM": "model.Model",
        "AutoModelForSequenceClassification": "model.Model",
    }
    set_json(policy / "config.json", auto_map=code, model_type="a_new_kind")
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenizer.Tokenizer", None]}}
    set_json(policy / "tokenizer_config.json", tokenizer_class="Tokenizer", **tokenizer)
    for load in (load_config, load_causal_lm, NEW_HEAD, read_shape, load_reward_model):
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
        assert refusal(load, str(policy)) == (
            f"Cannot read the model {policy} (it needs its own code, which is never run)"
        )
    for load in (load_tokenizer, describe_model):
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
        refusal(load, str(policy))
    assert not ran.exists()


def test_every_automatic_class_gets_trust_remote_code_false() -> None:
    folders = ("rlhf", "reward", "policies", "labeling_app", "examples")
    files = [one for folder in folders for one in (REPOSITORY / folder).rglob("*.py")]
    calls = [
        (file, call)
        for file in files
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(call.func.value) in ("kind", *(f"Auto{x}" for x in AUTO))
    ]
    assert len(calls) >= 8
    for file, call in calls:
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("trust_remote_code") == "False", f"{file}:{call.lineno}"


AUTO = ("Config", "Tokenizer", "ModelForCausalLM", "ModelForSequenceClassification")
