"""What `rlhf plan` recommends, with the bytes that decide it worked by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.ppo.settings import PPOSettings
from policies.ppo.setup import require_even_split
from policies.reference.settings import ReferenceSettings
from reward.settings import RewardSettings
from rlhf.config.paths import with_changes
from rlhf.planning.advice import Advice, advice, advice_for_all, gpus_per_machine
from rlhf.planning.strategies import (
    DDP,
    DDP_BF16_WEIGHTS,
    FSDP,
    FSDP_BF16_WEIGHTS,
    LORA,
    OPTIONS,
    ZERO1,
    ZERO3,
    Load,
    options_for,
    phase_bytes,
    stage_bytes,
)
from tests.rlhf.planning.seven_billion import GIB, LOAD, SHAPE


def test_advice_names_the_flags_of_adapters() -> None:
    found = advice("reward", SHAPE, LOAD, 1, 30 * GIB)
    assert found.sentence.startswith("reward: LoRA, up to ")
    assert found.flags is not None
    assert found.flags[:2] == ("--adapter lora", "--lora.rank 16")
    found = advice("ppo", SHAPE, LOAD, 1, 40 * GIB)
    assert found.sentence.startswith("ppo: LoRA with --batch.gradient-checkpointing, up to ")
    assert found.flags is not None
    adapters, rank, again, batch, sampled = found.flags
    assert (adapters, rank) == ("--lora.share-base", "--lora.rank 16")
    assert again == "--batch.gradient-checkpointing"
    assert batch.startswith("--batch.micro-batch-size ")
    assert sampled.startswith("--sampling.batch-size ")


def test_gradients_are_sent_in_bf16_where_that_was_asked_for() -> None:
    rounded, flag = replace(LOAD, reduce_dtype="bf16"), "--parallel.reduce-dtype bf16"
    for option in (DDP, FSDP, FSDP_BF16_WEIGHTS, LORA):
        found = advice("reward", SHAPE, rounded, 8, 400 * GIB, ((option,),))
        assert flag in (found.flags or ())
    for option in (DDP_BF16_WEIGHTS, ZERO1, ZERO3):  # which refuse it
        found = advice("reward", SHAPE, rounded, 8, 400 * GIB, ((option,),))
        assert flag not in (found.flags or ())


def test_a_reward_model_for_ppo_on_a_shared_base_has_adapters() -> None:
    found = advice_for_all(SHAPE, LOAD, 8, 32 * GIB)
    assert found["ppo"].sentence.startswith("ppo: LoRA with --batch.gradient-checkpointing, up to ")
    assert found["reward"].flags is not None
    assert found["reward"].flags[:2] == ("--adapter lora", "--lora.rank 16")
    assert found["reward"].sentence.startswith("reward: LoRA, up to ")
    assert found["reward"].sentence.endswith(
        " in a forward pass; ppo --lora.share-base needs adapters."
    )
    whole = advice_for_all(SHAPE, LOAD, 8, 400 * GIB)
    assert [one.sentence.split(",")[0] for one in whole.values()] == [
        *("reward: DDP", "reference: DDP", "ppo: DDP")
    ]


def test_bf16_weights_are_advised_where_all_weights_fit_no_other_way() -> None:
    # while PPO samples: 1.5 · 13.9e9 + .5 · 6.9e9 bytes, 22.6 GiB; the whole policy 26.1, with its
    # copies 38.8, in bf16 13.0; responses 1.6. Gradients of 4 sequences and 2 rows need 65.8 GiB
    found = advice("ppo", SHAPE, LOAD, 8, 60 * GIB)
    assert found.sentence.startswith("ppo: FSDP bf16-weights, up to ")
    assert found.flags is not None
    assert found.flags[:2] == ("--sharding fsdp", "--precision bf16-weights")
    assert advice("ppo", SHAPE, LOAD, 8, 66 * GIB).sentence.startswith("ppo: FSDP, up to ")
    # a reward model in one process: 115.7 GiB of state, 3.6 for each sequence
    found = advice("reward", SHAPE, replace(LOAD, batch=1, length=64), 1, 105 * GIB)
    assert found.sentence.startswith("reward: DDP bf16-weights, up to ")
    assert found.flags is not None
    assert found.flags[0] == "--precision bf16-weights"


def test_adapters_are_not_advised_where_checkpointing_is_enough() -> None:
    # 102.8 GiB of state and 12.5 of copies; activations 14.3, checkpointed 1.4
    found = advice("reward", SHAPE, LOAD, 1, 120 * GIB)
    assert found.sentence.startswith("reward: DDP with --batch.gradient-checkpointing, up to ")


def test_one_process_shards_nothing() -> None:
    # of all ways FSDP alone, which keeps no copies, would fit
    needs = {one: stage_bytes("reward", one, SHAPE, LOAD, 1) for one in (DDP, FSDP)}
    assert needs[FSDP] < 118 * GIB < needs[DDP]
    assert options_for(1) == (DDP, DDP_BF16_WEIGHTS, LORA)
    assert options_for(2) == OPTIONS
    for gib in (10, 20, 40, 80, 105, 118, 130):
        found = advice("reward", SHAPE, LOAD, 1, gib * GIB)
        assert found.flags is None or not any("sharding" in flag for flag in found.flags)


def test_advice_is_the_best_that_fits_and_its_largest_batch() -> None:
    # 141 GiB of state for DDP, FSDP's eighth 12.9; gathered 1.6; 3.58 for each sequence: 16 fit
    assert advice("reward", SHAPE, LOAD, 8, 72 * GIB).sentence == (
        "reward: FSDP, up to 16 sequences in a forward pass."
    )
    assert advice("reward", SHAPE, LOAD, 8, 180 * GIB).sentence.startswith("reward: DDP, up to ")


def test_advice_goes_from_the_cheap_to_the_dear() -> None:
    heavy = Load(length=2048, batch=4, checkpointing=False, lora_rank=16)
    # activations 57 GiB, checkpointed 7.5
    assert advice("reward", SHAPE, heavy, 8, 40 * GIB).sentence == (
        "reward: FSDP with --batch.gradient-checkpointing, up to 8 sequences in a forward pass."
    )
    # 16 bytes for each of 6.9e9 parameters on 16 devices: 6.4 GiB; gathered 2.1, two layers 0.4
    assert advice("reward", SHAPE, LOAD, 1, 9.5 * GIB).sentence == (
        "reward: FSDP fits on 16 such GPUs with --batch.gradient-checkpointing "
        "--batch.micro-tokens 512."
    )
    assert advice("ppo", SHAPE, LOAD, 1, 0.1 * GIB).sentence == (
        "ppo: nothing fits; use a smaller model, a shorter --sequence-length or larger GPUs."
    )


def test_reference_outputs_need_no_flags_but_a_smaller_batch() -> None:
    heavy = replace(LOAD, batch=256)
    # 26.1 GiB of weights, 12.7 of bf16 copies, and 0.4 for each sequence
    assert advice("reference", SHAPE, heavy, 8, 42 * GIB).sentence == (
        "reference: DDP, up to 8 sequences in a forward pass."
    )
    assert advice("reference", SHAPE, heavy, 8, 20 * GIB).sentence == (
        "reference: each model in 2 processes, 1 sequence in a forward pass."
    )
    assert advice("reference", SHAPE, LOAD, 1, 14 * GIB).sentence.startswith(
        "reference: nothing fits"
    )


def test_a_reference_model_that_no_device_holds_is_held_together() -> None:
    # 6 bytes for each of 7e9 parameters: 39 GiB, of four devices 9.8; 1.6 for what is computed
    assert advice("reference", SHAPE, LOAD, 8, 12 * GIB).sentence == (
        "reference: each model in 4 processes, 4 sequences in a forward pass."
    )


def changes(flags: Sequence[str]) -> dict[str, Any]:
    """The settings that flags such as `--batch.prompts 8` change."""
    changed: dict[str, Any] = {}
    for flag, *values in (one.split() for one in flags):
        value = values[0] if values else ""
        name = flag.removeprefix("--").replace("-", "_")
        changed[name] = int(value) if value.isdigit() else value or True
    return changed


def ppo_settings_of(found: Advice) -> PPOSettings:
    """The settings of the printed command; torchrun starts as many processes."""
    assert found.flags is not None
    made = PPOSettings(model="m", reward=("r",), reference=Path("f"), out=Path("o"))
    return with_changes(made, {**changes(found.flags), "processes": found.processes})


def test_rlhf_ppo_takes_its_command_on_any_number_of_gpus() -> None:
    for gpus in range(1, 513):
        settings = ppo_settings_of(advice("ppo", SHAPE, LOAD, gpus, 400 * GIB))
        require_even_split(settings, gpus)  # raises where it is refused
        episodes = settings.batch.episodes_per_step
        assert 64 <= episodes < 64 + gpus
        assert episodes % gpus == 0


@pytest.mark.parametrize(
    ("gpus", "episodes"), [(8, None), (12, 72), (24, 72), (64, None), (128, 128)]
)
def test_episodes_that_gpus_cannot_share_are_changed(gpus: int, episodes: int | None) -> None:
    flags = advice("ppo", SHAPE, LOAD, gpus, 400 * GIB).flags
    assert flags is not None
    assert changes(flags).get("batch.episodes_per_step") == episodes


@pytest.mark.parametrize("length", [64, 512, 513, 2048, 4096])
@pytest.mark.parametrize("usable", [30, 400])
def test_the_commands_have_the_lengths_that_are_planned(length: int, usable: int) -> None:
    load = replace(LOAD, length=length, batch=1)
    found = advice_for_all(SHAPE, load, 8, usable * GIB)
    given = {stage: changes(one.flags or ()) for stage, one in found.items()}
    usual = RewardSettings(rankings=Path("k"), model="m", out=Path("o"))
    named = {k: v for k, v in given["reward"].items() if k.startswith("data.")}
    assert with_changes(usual, named).data.max_length == length
    assert bool(named) is (length != 2048)
    outputs = ReferenceSettings(prompts=Path("k"), model="m", out=Path("o"))
    named = {k: v for k, v in given["reference"].items() if k == "sampling.max_new_tokens"}
    # the other half of the tokens is the prompt's, rounded down
    assert with_changes(outputs, named).sampling.max_new_tokens == (length + 1) // 2
    assert bool(named) is (length not in (512, 511))


def test_ppo_that_fits_without_vllm_nowhere_is_advised_to_use_it() -> None:
    load = replace(LOAD, checkpointing=True)
    # adapters need the base, 14e9 bytes; whole policy and critic in bf16 take 27.8e9
    assert min(stage_bytes("ppo", one, SHAPE, load, 64) for one in OPTIONS) > 13 * GIB
    # sampling with vLLM in N parts: 14e9/N of its weights, (12·13.9e9 + 4·6.9e9)/64 of state,
    # pages of (4·N + 1)·512 tokens, 2·2·32·4096/N bytes each, and a bf16 matrix of 2·4096·32000:
    # 17.4 GiB for N = 1, 10.8 for 2, 7.5 for 4; 8.9 while gradients are computed
    for usable, parts in ((11, 2), (9, 4)):
        found = advice("ppo", SHAPE, load, 64, usable * GIB)
        engine = f"--sampling.engine vllm --sampling.engine-tensor-parallel {parts}"
        assert found.sentence.startswith(f"ppo: FSDP with {engine}, up to ")
        assert found.flags is not None
        assert " ".join(found.flags).startswith(f"--sharding fsdp {engine} --batch.gradient")
    asked = advice("ppo", SHAPE, replace(load, vllm=2), 64, 11 * GIB)
    assert asked.sentence.startswith("ppo: FSDP, up to ")
    # the GPUs of a machine share one; 65, 130 and 260 are machines of 5, 520 of 8
    assert [gpus_per_machine(count) for count in (65, 130, 260, 520)] == [5, 5, 5, 8]
    assert advice("ppo", SHAPE, load, 65, 11 * GIB).sentence == (
        "ppo: FSDP fits on 520 such GPUs with --batch.gradient-checkpointing "
        "--sampling.engine vllm --sampling.engine-tensor-parallel 2 --batch.episodes-per-step 520 "
        "--batch.micro-batch-size 1 --sampling.batch-size 1."
    )
    # and more of them where these are too few
    found = advice("ppo", SHAPE, load, 8, 11 * GIB)
    assert found.sentence == (
        "ppo: FSDP fits on 64 such GPUs with --batch.gradient-checkpointing --sampling.engine vllm "
        "--sampling.engine-tensor-parallel 2 --batch.micro-batch-size 1 --sampling.batch-size 1."
    )


def test_the_phases_of_an_advice_are_those_of_its_batch() -> None:
    found = advice("ppo", SHAPE, replace(LOAD, batch=1), 8, 60 * GIB)
    assert found.flags is not None
    batch = changes([one for one in found.flags if "micro-batch" in one])["batch.micro_batch_size"]
    assert batch > 1
    load = replace(LOAD, batch=batch)
    assert found.phases == phase_bytes("ppo", FSDP_BF16_WEIGHTS, SHAPE, load, 8)
    assert max(found.phases.values()) <= 60 * GIB
