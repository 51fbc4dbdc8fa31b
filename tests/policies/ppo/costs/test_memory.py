"""What `rlhf ppo --dry-run` says of memory follows the settings."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from policies.ppo.batches import choose_reference_rows
from policies.ppo.memory import (
    checkpoint_disk_bytes,
    plan_memory,
    require_memory,
    sequences_in_pass,
)
from policies.ppo.setting_groups import KLSettings
from policies.ppo.settings import PPOSettings
from policies.ppo.update import (
    Learner,
    ReferenceBatch,
    StepData,
    micro_batches,
    split_minibatches,
)
from rlhf.errors import ConfigError
from rlhf.modeling.log_probs import Sequences
from rlhf.parallel.sharding import Sharding
from rlhf.planning.plan import KL_ROWS
from rlhf.planning.planner import read_shape
from tests.policies.training import TrainingInputs, build_ensemble
from tests.servers.commands import REPOSITORY
from tests.settings import changed

SPLITS = [  # episodes of a step, samples of a prompt, minibatches, episodes of a pass
    *((64, 1, 1, 16), (64, 4, 1, 4), (16, 1, 1, 16), (12, 1, 2, 4)),
    *((24, 2, 3, 3), (8, 1, 1, 64), (20, 2, 1, 3)),
]
LARGE = REPOSITORY / "examples" / "six_billion" / "llama_6b"


def test_lengths_are_those_of_the_store(settings: PPOSettings) -> None:
    text = plan_memory(settings)
    prompt = int(re.search(r"prompts of (\d+) tokens", text)[1])
    assert f"16 × {prompt + 12} tokens" in text  # answers of at most 12 tokens
    assert f"24 × {prompt + 12} tokens" in text  # and a reference row for every other one
    counted = plan_memory(changed(settings, micro_tokens=3 * (prompt + 12) + 1))
    # what policy and critic keep, a layer of the critic, and one while a rollout is read
    assert counted.count(f" 3 × {prompt + 12} tokens") == 4


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("rows_per_prompt", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("episodes", "samples", "minibatches", "size"), SPLITS)
def test_a_pass_has_the_rows_that_the_update_gives_it(
    settings: PPOSettings, episodes, samples, minibatches, size, rows_per_prompt, processes
) -> None:
    given = changed(
        settings,
        episodes_per_step=episodes,
        samples_per_prompt=samples,
        minibatches=minibatches,
        micro_batch_size=size,
        processes=processes,
        kl=KLSettings(rows_per_prompt=rows_per_prompt),
    )
    own = episodes // processes
    prompts = [(None,)] * (own // samples)
    rows = len(choose_reference_rows(prompts, 1, given, torch.Generator()))
    lengths = torch.arange(own) + 1
    parts = split_minibatches(lengths, torch.arange(rows) + 1, minibatches, torch.Generator())
    experience = SimpleNamespace(sequences=stacked(own))
    data = StepData(experience, ReferenceBatch(stacked(rows), torch.empty(0)))
    learner = Learner(Accelerator(cpu=True), torch.nn.Linear(1, 1), None, given, 1.0, 0.0)
    passes = [one for part in parts for one in micro_batches(learner, data, part)]
    largest = max(len(one.episodes) for one in passes)
    beside = max(len(one.reference_rows) for one in passes)
    assert sequences_in_pass(given, own, 0) == (largest, beside)


def stacked(rows: int) -> Sequences:
    """Sequences of some lengths."""
    return Sequences.of([[1]] * rows, [[1] * (1 + row % 7) for row in range(rows)], 0)


def test_rlhf_plan_assumes_the_rows_that_come_without_flags() -> None:
    assert KLSettings().rows_per_prompt == KL_ROWS


def test_each_role_has_its_lines(settings: PPOSettings) -> None:
    def lines(**changes: object) -> str:
        return plan_memory(changed(settings, **changes))

    assert "critic" not in lines(advantages="rloo", samples_per_prompt=2)
    assert "critic: activations" not in lines(critic="head")
    assert "critic: trunk" in lines(critic_trains="head")
    assert "reward model" not in lines(reward=("signal:tests.pipeline.signals:count_vowels",))
    assert "2 of them" in lines(reward=settings.reward * 2)
    assert "20 × " in lines(advantages="rloo", samples_per_prompt=2)  # a row for every other prompt
    assert "reference model: weights" in lines(kl=KLSettings(source="resident"))
    assert "reference model: weights" not in lines()
    assert "loaded reference" in lines()
    assert "loaded reference" not in lines(lora_rank=4)
    assert "while auditing during training" in lines(kl=KLSettings(audit_every=10))
    assert "during training" not in lines(kl=KLSettings(source="resident", audit_every=10))
    assert "policy: frozen weights" in lines(lora_rank=4)
    assert "policy: stepped weights" in lines(sharding="zero2", processes=2)


def test_pretraining_texts_are_planned(settings: PPOSettings, tmp_path: Path) -> None:
    texts = changed(settings, ptx_data=tmp_path / "texts.txt", ptx_length=300)
    assert " 16 × 300 tokens" in plan_memory(texts)  # --micro-batch-size
    assert " 3 × 300 tokens" in plan_memory(changed(texts, micro_tokens=1000))
    few = changed(texts, episodes_per_step=8, ptx_per_episode=0.5)
    assert " 4 × 300 tokens" in plan_memory(few)  # as many as a step has


def test_models_held_together_are_planned_by_their_parts(settings: PPOSettings) -> None:
    large = replace(
        settings, model=str(LARGE), reward=("signal:tests.pipeline.signals:count_vowels",)
    )
    alone, together = (
        plan_memory(changed(large, processes=2, tensor_parallel=parts)) for parts in (1, 2)
    )
    weights = [
        float(re.search(r"^policy: weights +([\d.]+)", text, re.MULTILINE)[1])
        for text in (alone, together)
    ]
    assert weights[1] == pytest.approx(weights[0] / 2, rel=0.01)  # norms are whole


def test_room_is_that_of_what_is_trained(settings: PPOSettings) -> None:
    shape = read_shape(settings.model)
    whole = 2 * 12 * (shape.parameters + shape.reward_parameters) + 4 * shape.parameters
    assert checkpoint_disk_bytes(settings) == whole
    assert checkpoint_disk_bytes(changed(settings, lora_rank=4, critic="head")) == (
        2 * 12 * (4 * shape.lora_rows + shape.hidden) + 4 * shape.parameters
    )


def test_every_member_of_an_ensemble_is_counted(
    settings: PPOSettings, training: TrainingInputs, tmp_path: Path
) -> None:
    ensemble = str(build_ensemble(training, tmp_path / "ensemble"))
    assert "3 of them" in plan_memory(replace(settings, reward=(ensemble, *settings.reward)))


def peak_apart(shared: str) -> float:
    return float(re.search(r"Without --lora.share-base the peak is ([\d.]+) GiB", shared)[1])


def peak(plan: str) -> float:
    return float(re.search(r"peak +([\d.]+)", plan)[1])


def test_a_shared_base_is_compared_with_separate_models(settings: PPOSettings) -> None:
    shared = plan_memory(changed(settings, lora_rank=4, share_base=True))
    apart = plan_memory(changed(settings, lora_rank=4))
    assert "shared base: weights" in shared
    assert peak_apart(shared) == pytest.approx(peak(apart), rel=0.01)
    assert peak(shared) < peak(apart)


def test_four_bits_are_compared_with_whole_models(settings: PPOSettings) -> None:
    apart = changed(
        settings,
        model=str(LARGE),
        reward=("signal:tests.pipeline.signals:count_vowels",),
        advantages="rloo",
        samples_per_prompt=2,
        lora_rank=4,
        kl=KLSettings(source="adapter"),
    )
    shared = plan_memory(changed(apart, share_base=True, four_bit_base=True))
    assert peak_apart(shared) == pytest.approx(peak(plan_memory(apart)), rel=0.01)


def test_adapters_of_reward_models_have_the_rank_they_were_trained_with(
    settings: PPOSettings, tmp_path: Path
) -> None:
    shutil.copytree(settings.reward[0], tmp_path / "reward")
    kept = tmp_path / "reward" / "adapter"
    kept.mkdir()
    (kept / "adapter_config.json").write_text('{"r": 3}', encoding="utf-8")
    shape = read_shape(settings.model)
    shared = changed(settings, lora_rank=4, share_base=True, reward=(str(tmp_path / "reward"),))
    trained = 4 * shape.lora_rows + 3 * shape.lora_rows + shape.hidden
    assert checkpoint_disk_bytes(shared) == 2 * 12 * trained + 4 * shape.parameters


def test_zero_3_is_refused_where_policy_and_critic_do_not_fit_whole(settings: PPOSettings) -> None:
    policy, reward = (
        sum(value.numel() for value in load_file(Path(folder, "model.safetensors")).values())
        for folder in (settings.model, settings.reward[0])
    )
    whole = 4 * (policy + reward - 32)  # but for the reward model's head
    sharded = changed(settings, processes=2)
    require_memory(sharded, Sharding("zero3"), whole)
    require_memory(sharded, Sharding("fsdp"), whole - 1)
    with pytest.raises(ConfigError) as caught:
        require_memory(sharded, Sharding("zero3"), whole - 1)
    assert caught.value.problem.startswith(
        "--sharding zero3 first moves policy and critic whole to every device: "
    )
    assert caught.value.remedy.startswith("Use --sharding fsdp --sampling.engine vllm, ")
    assert "before, while loading" in plan_memory(changed(sharded, sharding="zero3"))
    assert "before, while loading" not in plan_memory(changed(sharded, sharding="fsdp"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there vLLM is planned to sleep")
def test_without_a_gpu_the_plan_also_says_what_gpus_need(
    settings: PPOSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the plan needs no vLLM, only the settings ask whether it is installed
    monkeypatch.setattr("policies.sampling.settings.find_spec", lambda name: True)
    large = changed(
        settings,
        model=str(LARGE),
        reward=("signal:tests.pipeline.signals:count_vowels",),
        precision="bf16",
        sharding="fsdp",
        processes=8,
        engine="vllm",
        sample_batch_size=1,
        episodes_per_step=512,
        micro_batch_size=64,
    )
    text = plan_memory(large)
    then = float(re.search(r"GPUs it sleeps between batches: the peak is then ([\d.]+)", text)[1])
    # vLLM: 6.08e9 bf16 weights and two requests of a page of 128 tokens in 28 layers, keys and
    # values of 4096 numbers each; a peak elsewhere than while sampling falls by all of it
    weights, pages = 2 * read_shape(str(LARGE)).parameters, 2 * 2 * 2 * 128 * 28 * 4096
    assert peak(text) - then == pytest.approx((weights + pages) / 2**30, abs=0.02)
    assert "no GPU" not in plan_memory(changed(large, engine="generate"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-weights"])
def test_fsdp_gathers_layers_and_matrices_in_turn_by_hand(
    settings: PPOSettings, precision: str
) -> None:
    large = changed(
        settings,
        model=str(LARGE),
        reward=("signal:tests.pipeline.signals:count_vowels",),
        precision=precision,
        episodes_per_step=16,
        micro_batch_size=1,
    )
    assert "gathered  " not in plan_memory(large)
    sharded = changed(large, sharding="fsdp", processes=8)
    shape = read_shape(str(LARGE))
    matrix, layer = shape.vocabulary * shape.hidden, shape.trunk_linear / shape.layers
    # twice what is read and the buffer before, a parameter of layers and of matrices in so many
    # bytes; two norms and a head; the output matrix that autocast casts
    layers, ends, copied = {"fp32": (4, 4, 0), "bf16": (2, 4, 2), "bf16-weights": (2, 2, 0)}[
        precision
    ]
    whole = 3 * max(layers * layer, ends * matrix) + 3 * ends * shape.hidden + copied * matrix
    reading = phase_gib(plan_memory(sharded), "reading the rollout")
    assert sum(reading.values()) == pytest.approx(whole / 2**30, rel=0.01)
    # a layer and the next, the gradients of one and those on their way; of the output matrix
    # itself, its buffer, its gradients, and those on their way in float32
    moved = 4 * layers * layer + (3 * ends + 4) * matrix + 3 * ends * shape.hidden
    learning = phase_gib(plan_memory(sharded), "computing gradients")
    critic = sum(size for name, size in learning.items() if name.startswith("critic: "))
    assert learning["gathered"] == pytest.approx(moved / 2**30 - critic, rel=0.01)


def test_tensor_parallelism_has_a_whole_gradient_of_embeddings_by_hand(
    settings: PPOSettings,
) -> None:
    large = changed(
        settings,
        model=str(LARGE),
        reward=("signal:tests.pipeline.signals:count_vowels",),
        processes=2,
        tensor_parallel=2,
        episodes_per_step=1,
        micro_batch_size=1,
        gradient_checkpointing=True,
    )
    shape = read_shape(str(LARGE))
    gib = 4 * shape.vocabulary * shape.hidden / 2**30
    learning = phase_gib(plan_memory(large), "computing gradients")
    assert learning["embeddings: gradient"] == pytest.approx(gib, abs=0.01)
    assert "policy: activations" not in learning  # gone by then
    many = changed(large, micro_batch_size=64, episodes_per_step=64, gradient_checkpointing=False)
    assert "embeddings: gradient" not in plan_memory(many)


def phase_gib(text: str, phase: str) -> dict[str, float]:
    """The lines of a phase in a plan."""
    lines = text.split(f"while {phase}\n")[1].splitlines()
    found = {}
    for line in lines:
        if not line.startswith("  "):
            break
        name, size = re.match(r"  (.+?)  +([\d.]+)  ", line).groups()
        found[name] = float(size)
    return found
