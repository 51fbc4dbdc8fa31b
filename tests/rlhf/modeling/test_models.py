import json
import math
import shutil
import time
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    GPT2Config,
    PreTrainedModel,
)

from rlhf.errors import InputError
from rlhf.modeling.heads import reward_head
from rlhf.modeling.models import (
    describe_model,
    load_causal_lm,
    load_config,
    load_reward_model,
    model_fingerprint,
    model_folder,
    new_reward_model,
    policy_folder,
    require_same_tokenizer,
    save_model,
)
from rlhf.modeling.tokens import load_tokenizer
from rlhf.run.rundir import open_stage, stage_status


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")


def test_a_fresh_head_is_normal_with_the_right_spread(tiny_model: Path) -> None:
    head = torch.cat([
        reward_head(new_reward_model(str(tiny_model), 0, seed)).weight.detach().flatten()
        for seed in range(60)
    ])  # fmt: skip
    expected = 1 / math.sqrt(
        32 + 1
    )  # hidden size 32; the typo 1/(d + 1) would be .03 instead of .17
    # the standard error of a standard deviation is σ/√(2n), with n = 60 · 32
    assert head.std().item() == pytest.approx(expected, abs=4 * expected / math.sqrt(2 * 1920))
    assert head.mean().item() == pytest.approx(0, abs=4 * expected / math.sqrt(1920))


def test_a_fresh_head_depends_on_the_seed_alone(tiny_model: Path) -> None:
    first, other = (reward_head(new_reward_model(str(tiny_model), 0, s)).weight for s in (1, 2))
    torch.manual_seed(99)
    again = reward_head(new_reward_model(str(tiny_model), 0, 1)).weight
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_trunk_of_a_new_reward_model_is_the_language_model(tiny_model: Path) -> None:
    trunk = new_reward_model(str(tiny_model), 0, 0).base_model.state_dict()
    expected = AutoModelForCausalLM.from_pretrained(tiny_model).base_model.state_dict()
    assert trunk.keys() == expected.keys()
    assert all(torch.equal(trunk[name], expected[name]) for name in expected)


def save_reward_model(tiny_model: Path, folder: Path) -> PreTrainedModel:
    model = new_reward_model(str(tiny_model), 0, seed=4)
    model.config.reward_bias = -0.75
    save_model(model, load_tokenizer(str(tiny_model)), folder)
    return model


def test_a_saved_reward_model_loads_here_and_in_plain_transformers(
    tiny_model: Path, tmp_path: Path
) -> None:
    saved = save_reward_model(tiny_model, tmp_path / "model")
    loaded = load_reward_model(str(tmp_path / "model"))
    assert loaded.config.reward_bias == -0.75
    for name, value in saved.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert plain.config.num_labels == 1
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    saved.set_attn_implementation(plain.config._attn_implementation)  # kernels differ in rounding
    with torch.no_grad():
        assert torch.equal(plain.eval()(ids).logits, saved.eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").pad_token_id == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_goes_on_from_a_trained_head(
    tiny_model: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    saved = save_reward_model(tiny_model, tmp_path / "model")
    model = new_reward_model(str(tmp_path / "model"), 0, seed=9, dtype=dtype)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.reward_bias == -0.75
    assert model.base_model.dtype == dtype
    head = reward_head(model).weight
    assert head.dtype == torch.float32  # beside a trunk in bf16 as well, and not rounded
    assert torch.equal(head, reward_head(saved).weight)


def test_a_training_goes_on_from_a_head_that_is_not_ours(tiny_model: Path, tmp_path: Path) -> None:
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tiny_model, num_labels=1, dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path)
    model = new_reward_model(str(tmp_path), 0, seed=9)
    assert torch.equal(reward_head(model).weight, theirs.score.weight.float())


@pytest.mark.parametrize(
    ("architecture", "labels"),
    [("LlamaForSequenceClassification", 2), ("LlamaForTokenClassification", 1)],
)
def test_a_classifier_that_gives_no_reward_is_refused(
    tiny_model: Path, copy: Path, architecture: str, labels: int
) -> None:
    kind = getattr(transformers, architecture)
    kind.from_pretrained(tiny_model, num_labels=labels).save_pretrained(copy)
    with pytest.raises(InputError) as caught:
        new_reward_model(str(copy), 0, seed=0)
    assert caught.value.problem == f"{copy} is not a reward model ({architecture}, {labels} labels)"
    assert caught.value.remedy == "Give a language model, or a classifier with one label."


def test_a_saved_policy_loads_in_plain_transformers(tiny_model: Path, tmp_path: Path) -> None:
    model = load_causal_lm(str(tiny_model))
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    save_model(model, load_tokenizer(str(tiny_model)), tmp_path / "policy")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    ids = torch.tensor([[5, 6, 7]])
    model.set_attn_implementation(plain.config._attn_implementation)  # kernels differ in rounding
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, model.eval()(ids).logits)
    assert [path.suffix for path in (tmp_path / "policy").glob("model*")] == [".safetensors"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_model).chat_template


def test_saving_can_take_a_gathered_state(tiny_model: Path, tmp_path: Path) -> None:
    model = load_causal_lm(str(tiny_model))
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    save_model(model, load_tokenizer(str(tiny_model)), tmp_path / "policy", state)
    assert not load_causal_lm(str(tmp_path / "policy")).get_input_embeddings().weight.any()


@pytest.mark.parametrize("name", ["no/such/folder", "./nothing", "nothing", "/nothing", "."])
def test_not_a_model(name: str) -> None:
    with pytest.raises(InputError) as caught:
        load_config(name)
    found = "no config.json in it" if name == "." else "no such folder"
    assert caught.value.problem == f"{name} is not a model ({found})"
    assert "Give the --out of a training, a Hugging Face model folder" in caught.value.remedy
    assert "signal:" not in caught.value.remedy
    with pytest.raises(InputError) as caught:
        model_folder(name, "reward", "model")
    assert caught.value.remedy.endswith(" Also: signal:package.module:function.")


def test_a_name_in_a_folder_that_is_there_is_not_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"models/mine is not a model \(no such folder\)"):
        load_config("models/mine")


def test_a_hub_name_that_cannot_be_reached() -> None:
    with pytest.raises(InputError, match="Cannot read the model nobody/nothing"):
        load_config("nobody/nothing")


def test_a_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    for load in (load_causal_lm, lambda name: new_reward_model(name, 0, 0)):
        with pytest.raises(InputError, match=f"Cannot load the weights of {copy}"):
            load(str(copy))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForSequenceClassification"])
def test_models_that_are_no_reward_models(copy: Path, architecture: str) -> None:
    edit_config(copy, architectures=[architecture])
    with pytest.raises(InputError) as caught:
        load_reward_model(str(copy))
    assert caught.value.problem == f"{copy} is not a reward model ({architecture}, 2 labels)"
    assert "rlhf train-reward" in caught.value.remedy


@pytest.mark.parametrize(
    ("stage", "result"),
    [("ppo", "policy"), ("dpo", "policy"), ("sft", "model"), ("reward", "model")],
)
def test_a_stage_stands_for_its_model(
    tmp_path: Path, tiny_model: Path, stage: str, result: str
) -> None:
    def find(name: Path) -> str:
        return (
            model_folder(str(name), stage, result)
            if stage == "reward"
            else policy_folder(str(name))
        )

    assert find(tiny_model) == str(tiny_model)
    run = open_stage(tmp_path / stage, stage, load_config(str(tiny_model)).to_dict(), {},
                     resume=False)  # fmt: skip
    with pytest.raises(InputError, match=rf"The {stage} stage in .* is running, not done"):
        find(run.path)
    with stage_status(run):
        (run.path / result).mkdir()
    assert find(run.path) == str(run.path / result)
    if stage == "reward":
        with pytest.raises(InputError) as caught:
            policy_folder(str(run.path), "--policy")
        assert str(caught.value) == (
            f"--policy {run.path} is a run of rlhf train-reward, not of a policy\n  Give the --out "
            "folder of rlhf sft, ppo, dpo, distill, quantize or loop, or a model folder."
        )


@pytest.mark.parametrize("stage", ["distill", "quantize"])
def test_a_smaller_reward_model_is_not_a_policy(tmp_path: Path, stage: str) -> None:
    run = open_stage(tmp_path / stage, stage, {}, {}, resume=False)
    with stage_status(run):
        run.model.mkdir()
    with pytest.raises(InputError) as caught:
        policy_folder(str(run.path))
    expected = f"{run.path} is a run of rlhf {stage} of a reward model, not of a policy"
    assert caught.value.problem == expected
    with stage_status(run):
        run.model.rename(run.policy)
    assert policy_folder(str(run.path)) == str(run.policy)


def test_a_reward_model_is_not_a_language_model(tiny_model: Path, tmp_path: Path) -> None:
    save_reward_model(tiny_model, tmp_path / "model")
    with pytest.raises(InputError, match=r"is a classifier \(LlamaForSequenceClassification\)"):
        load_causal_lm(str(tmp_path / "model"))


def test_dropout_is_off(tmp_path: Path) -> None:
    GPT2Config(resid_pdrop=0.3, embd_pdrop=0.2, attn_pdrop=0.1).save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.0, 0.0, 0.0)


def test_dropout_of_encoders_is_off(tmp_path: Path) -> None:
    BertConfig(hidden_dropout_prob=0.3, classifier_dropout=0.2).save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.0, 0.0)
    assert config.classifier_dropout == 0.0


def test_the_fingerprint_follows_the_weights_alone(copy: Path, tiny_model: Path) -> None:
    edit_config(copy, note="another")
    assert model_fingerprint(str(copy)) == model_fingerprint(str(tiny_model))
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(data))
    assert model_fingerprint(str(copy)) != model_fingerprint(str(tiny_model))


def test_the_fingerprint_sees_weights_in_the_old_format(tmp_path: Path) -> None:
    prints = set()
    for weights in (b"one", b"two"):
        (tmp_path / "pytorch_model.bin").write_bytes(weights)
        prints.add(model_fingerprint(str(tmp_path)))
    assert len(prints) == 2


def test_models_that_read_text_differently_are_refused(tiny_model: Path, copy: Path) -> None:
    same = describe_model(str(tiny_model))
    require_same_tokenizer(same, describe_model(str(copy)))
    (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    other = describe_model(str(copy))
    assert other["hash"] == same["hash"]
    with pytest.raises(InputError) as caught:
        require_same_tokenizer(same, other)
    assert caught.value.problem == (
        f"{tiny_model} and {copy} have different tokenizers or chat templates "
        f"({same['tokenizer']}, {other['tokenizer']})"
    )


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if the network were there, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def test_a_hub_that_does_not_answer_is_asked_once(online, monkeypatch, capfd) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(InputError) as refused:
        load_config("somebody/model")
    assert time.monotonic() - began < 2  # its library would take 23 s
    assert str(refused.value) == (
        "somebody/model is not a local folder, and the hub does not answer (http://127.0.0.1:9)\n"
        "  Check the name and the connection, or download the model and give its folder."
    )
    assert capfd.readouterr() == ("", "")


def test_what_is_in_the_cache_needs_no_hub(online, monkeypatch, tmp_path, tiny_model) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    kept = tmp_path / "cache" / "models--somebody--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    shutil.copytree(tiny_model, kept / "snapshots" / "abc")
    assert load_config("somebody/model").model_type == "llama"
