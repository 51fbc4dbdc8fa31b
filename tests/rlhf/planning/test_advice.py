"""What `rlhf plan` recommends, with the bytes that decide it worked by hand."""

from dataclasses import replace

from rlhf.planning.advice import advice, advice_for_all
from rlhf.planning.strategies import STRATEGIES, Load, stage_bytes, strategies_of
from tests.rlhf.planning.test_strategies import GIB, LOAD, SHAPE


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


def test_a_reward_model_for_ppo_on_a_shared_base_has_adapters() -> None:
    found = advice_for_all(SHAPE, LOAD, 8, 45 * GIB)
    assert found["ppo"].sentence.startswith("ppo: LoRA, up to ")
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
    # while PPO reads: 1.5 · 13.9e9 + .5 · 6.9e9 bytes, 22.6 GiB; whole models 51.8 with their
    # copies 77.0, in bf16 25.9
    found = advice("ppo", SHAPE, LOAD, 8, 72 * GIB)
    assert found.sentence.startswith("ppo: FSDP bf16-weights, up to ")
    assert found.flags is not None
    assert found.flags[:2] == ("--sharding fsdp", "--precision bf16-weights")
    assert advice("ppo", SHAPE, LOAD, 8, 110 * GIB).sentence.startswith("ppo: FSDP, up to ")
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
    needs = {one: stage_bytes("reward", one, SHAPE, LOAD, 1) for one in ("DDP", "FSDP")}
    assert needs["FSDP"] < 118 * GIB < needs["DDP"]
    assert strategies_of(1) == ("DDP", "DDP bf16-weights", "LoRA")
    assert strategies_of(2) == STRATEGIES
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
