import re
from itertools import combinations
from pathlib import Path

import pytest
import torch
from transformers import GPTJConfig, LlamaConfig

from reward.memory import (
    checkpoint_disk_bytes,
    plan_memory,
    plan_sharded,
    require_memory,
)
from rlhf.commands.models.train_reward import memory_plan
from rlhf.errors import ConfigError
from rlhf.parallel.distributed import device_bytes
from rlhf.parallel.sharding import Sharding
from rlhf.planning.plan import GIB, MemoryPhase, ShardLayout, shard_plan
from rlhf.planning.planner import read_shape
from tests.settings import changed, reward_settings


def settings_for(model, **changes):
    values = {"precision": "bf16", "max_length": 2048, **changes}
    return reward_settings(rankings=Path("r"), model=str(model), out=Path("o"), **values)


@pytest.fixture(scope="module")
def six_billion(tmp_path_factory):
    """The config of a GPT-J: 6.05e9 parameters, of which 5.85e9 below the output matrix."""
    folder = tmp_path_factory.mktemp("gptj")
    GPTJConfig().save_pretrained(folder)
    return folder


def test_full_training_counts_weights_moments_gradients_and_copies(six_billion):
    shape = read_shape(str(six_billion))
    plan = plan_memory(settings_for(six_billion, gradient_checkpointing=True), shape)
    always = {item.what: item.size for item in plan.always}
    parameters = shape.trunk + 4096
    assert always == {
        "reward model: weights": 4 * parameters,
        "reward model: Adam": 8 * parameters,
    }
    assert plan.peak > 18 * shape.trunk_linear


def test_of_a_model_held_by_four_processes_one_has_its_part(six_billion):
    shape = read_shape(str(six_billion))
    divided = 28 * (4 * 4096**2 + 2 * 4096 * 16384) + 50400 * 4096  # matrices and embeddings
    held = shape.trunk - divided * 3 // 4 + 4096
    settings = settings_for(six_billion, processes=4, tensor_parallel=4)
    always = {item.what: item.size for item in plan_memory(settings, shape).always}
    assert always == {"reward model: weights": 4 * held, "reward model: Adam": 8 * held}
    small = changed(settings, max_length=128, **{"batch.micro_tokens": 128})
    gradients = plan_memory(small, shape).phases[MemoryPhase.GRADIENTS]
    whole = next(item.size for item in gradients if item.what == "embeddings: gradient")
    assert whole == 4 * 50400 * 4096


def test_adapters_freeze_the_trunk_in_bf16_or_4_bits(six_billion):
    shape = read_shape(str(six_billion))
    # GPT-J: 28 layers with four matrices of 4096 x 4096 and two of 4096 x 16384
    trained = 16 * 28 * (4 * 2 * 4096 + 2 * (4096 + 16384)) + 4096
    linear = 28 * (4 * 4096**2 + 2 * 4096 * 16384)
    assert shape.trunk_linear == linear
    for adapter, frozen in (
        ("lora", 2 * shape.trunk),
        ("qlora", 0.516 * linear + 2 * (shape.trunk - linear)),
    ):
        plan = plan_memory(settings_for(six_billion, adapter=adapter), shape)
        always = {item.what: item.size for item in plan.always}
        assert always == {
            "reward model: weights": pytest.approx(frozen),
            "adapters and head: weights": 4 * trained,
            "adapters and head: Adam": 8 * trained,
        }


def test_tokens_of_the_longest_sequence_count_where_a_batch_is_smaller(six_billion):
    shape = read_shape(str(six_billion))
    small = plan_memory(settings_for(six_billion, tokens_per_batch=1), shape)
    assert small.peak == plan_memory(settings_for(six_billion, tokens_per_batch=2048), shape).peak


def test_what_does_not_fit_is_refused_with_the_arithmetic_and_three_ways_out(six_billion):
    with pytest.raises(ConfigError) as caught:
        require_memory(settings_for(six_billion, tokens_per_batch=4096), 20 * GIB)
    assert "needs 119.3 GiB in each process; 20.0 GiB are available" in caught.value.problem
    assert "float32, 4 bytes per parameter" in caught.value.problem
    ways = caught.value.remedy.splitlines()
    assert ways[0] == "Try one of:"
    assert ways[1].startswith("  1. --adapter lora --batch.gradient-checkpointing")
    assert [way[:5] for way in ways[1:]] == ["  1. ", "  2. ", "  3. "]


def test_every_way_out_that_names_flags_fits(six_billion):
    with pytest.raises(ConfigError) as caught:
        require_memory(settings_for(six_billion, tokens_per_batch=4096), 110 * GIB)
    ways = caught.value.remedy.splitlines()[1:]
    assert ways[0].startswith("  1. --batch.gradient-checkpointing: ")
    assert ways[1].startswith("  2. --adapter lora: ")
    for way in ways[:2]:
        assert float(way.rsplit(": ")[1].removesuffix(" GiB")) <= 110


def test_divided_weights_need_less_on_each_device(six_billion):
    settings = settings_for(six_billion, tokens_per_batch=4096)
    plan = plan_memory(settings, read_shape(str(six_billion)))
    _, copies, activations = (item.size for item in plan.phases["computing gradients"])
    held = plan.peak - copies - activations  # FSDP and ZeRO-3 gather layers: no copies
    for whole in ("auto", "ddp"):
        assert shard_plan(plan, ShardLayout(whole, 4)).peak == plan.peak
    for strategy in ("fsdp", "zero3"):
        found = shard_plan(plan, ShardLayout(strategy, 4)).peak
        assert found == pytest.approx(activations + held / 4)
    assert shard_plan(plan, ShardLayout("fsdp", 4, offload=True)).peak == pytest.approx(activations)
    require_memory(settings, 80 * GIB, Sharding("fsdp"), 4)
    with pytest.raises(ConfigError) as caught:
        require_memory(settings, 80 * GIB)
    assert "--sharding fsdp --processes 2: 65.3 GiB on each of 2" in caught.value.remedy


def test_the_first_stages_of_zero_divide_no_weights(six_billion):
    plan = plan_memory(settings_for(six_billion), read_shape(str(six_billion)))
    always = {item.what: item.size for item in plan.always}
    weights, adam = always["reward model: weights"], always["reward model: Adam"]
    gradients, copies, activations = (item.size for item in plan.phases["computing gradients"])
    first = shard_plan(plan, ShardLayout("zero1", 8)).peak
    assert first == pytest.approx(weights + adam / 8 + gradients + copies + activations)
    second = shard_plan(plan, ShardLayout("zero2", 8)).peak
    assert second == pytest.approx(weights + adam / 8 + gradients / 8 + copies + activations)
    offloaded = shard_plan(plan, ShardLayout("zero1", 8, offload=True)).peak
    assert offloaded == pytest.approx(weights + gradients + copies + activations)


def test_zero_3_is_refused_where_no_whole_copy_fits_and_fsdp_is_named(six_billion):
    settings = settings_for(six_billion, gradient_checkpointing=True, tokens_per_batch=2048)
    whole = 4 * (read_shape(str(six_billion)).trunk + 4096)  # 21.8 GiB
    plan = plan_memory(settings, read_shape(str(six_billion)), "zero3")
    found = shard_plan(plan, ShardLayout("zero3", 64))
    assert found.peak == whole
    assert found.text.splitlines()[-3].rstrip() == "before, while loading"
    assert "21.77" in found.text.splitlines()[-2]
    require_memory(settings, whole, Sharding("zero3"), 64)
    for offload in (False, True):
        with pytest.raises(ConfigError) as caught:
            require_memory(settings, whole - 1, Sharding("zero3", offload), 64)
        assert caught.value.problem.startswith("This training needs 21.8 GiB in each process; ")
        assert caught.value.remedy.splitlines()[1].startswith("  1. --sharding fsdp --processes ")
    require_memory(settings, whole - 1, Sharding("fsdp"), 64)


def test_adapters_need_little_room_on_disk(six_billion):
    shape = read_shape(str(six_billion))
    trained = 16 * shape.lora_rows + 4096
    assert checkpoint_disk_bytes(settings_for(six_billion, adapter="lora")) == (
        2 * 12 * trained + 4 * shape.reward_parameters
    )
    kept = settings_for(six_billion, keep_checkpoints=3)
    assert checkpoint_disk_bytes(kept) == (4 * 12 + 4) * shape.reward_parameters


def test_what_fits_is_not_refused(tiny_model):
    require_memory(settings_for(tiny_model, precision="fp32", max_length=64), device_bytes(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="each process has a GPU of its own")
def test_processes_of_one_machine_share_its_memory(monkeypatch):
    assert device_bytes(4) == device_bytes(1) / 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # under torchrun
    assert device_bytes(1) == device_bytes(2)


def test_a_llama_of_the_same_size_is_planned_too(tmp_path):
    LlamaConfig(hidden_size=4096, num_hidden_layers=28).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="This training needs"):
        require_memory(settings_for(tmp_path), 10 * GIB)


def flags_of(way):
    """The settings that a way out names."""
    words = re.findall(r"--([a-z.-]+)(?: (\w+))?", way.partition(":")[0])
    return {name.replace("-", "_"): value_of(word) for name, word in words}


def value_of(word):
    if word.isdigit():
        return int(word)
    return {"": True, "none": None}.get(word, word)


@pytest.mark.parametrize(
    ("changes", "gib", "needs"),
    [
        # of 119.3 GiB 21.7 are activations, which nobody divides
        ({"sharding": "fsdp", "processes": 2}, 40, "65.3"),
        ({"sharding": "fsdp", "processes": 4, "shard_group": 2}, 40, "65.3"),
        ({"tensor_parallel": 2, "processes": 2}, 40, ""),
        ({"ddp_comm_hook": "fp16", "processes": 2}, 40, ""),
        ({"adapter": "lora"}, 25, ""),
    ],
)
def test_ways_out_name_flags_that_go_together_and_fit(six_billion, changes, gib, needs):
    settings = settings_for(six_billion, tokens_per_batch=4096, **changes)

    def check(settings):
        parts = settings.parallel.shard_group or settings.processes
        sharding = Sharding(settings.sharding, tensor_parallel=settings.parallel.tensor_parallel)
        require_memory(settings, gib * GIB, sharding, parts)

    with pytest.raises(ConfigError) as caught:
        check(settings)
    assert f"This training needs {needs}" in caught.value.problem
    ways = [way[5:] for way in caught.value.remedy.splitlines()[1:]]
    assert len(ways) == 3
    named = [changed(settings, **flags_of(way)) for way in ways if way.startswith("--")]
    assert named
    assert all(one != other for one, other in combinations(named, 2))
    for lighter in named:
        check(lighter)


def test_the_dry_run_counts_what_processes_divide(six_billion):
    shape = read_shape(str(six_billion))
    held = 4 * (shape.trunk + 4096) / 8  # bytes of an eighth of the weights
    fsdp = settings_for(six_billion, sharding="fsdp", processes=8)
    plan = plan_sharded(fsdp)
    assert [item.size for item in plan.always] == [held, 2 * held]
    gradients, activations = plan.phases["computing gradients"]  # and no bf16 copies
    assert gradients.size == held
    assert activations == plan_memory(fsdp, shape).phases["computing gradients"][2]
    assert gradients.why == "float32; sharded over 8"
    in_groups = plan_sharded(changed(fsdp, shard_group=4))
    assert [item.size for item in in_groups.always] == [2 * held, 4 * held]
    offloaded = plan_sharded(changed(fsdp, offload=True))
    assert offloaded.peak == activations.size
    assert offloaded.always[0].why == "float32, 4 bytes per parameter; in main memory"
    adam_only = plan_sharded(changed(fsdp, sharding="zero1"))
    weights, adam, stepped = (item.size for item in adam_only.always)
    assert (weights, adam, stepped) == (8 * held, 2 * held, held)  # DeepSpeed's own copy
    text = memory_plan(fsdp)  # of the command
    assert text == plan.text
    assert text.startswith(
        "Memory of each process for the reward model, without gathered weights\n"
    )


def test_a_refusal_shows_the_plan_that_it_refuses(six_billion):
    settings = settings_for(six_billion, sharding="fsdp", processes=8)
    with pytest.raises(ConfigError) as caught:
        require_memory(settings, 1 * GIB, Sharding("fsdp"), 8)
    assert caught.value.problem.endswith(plan_sharded(settings).text)
