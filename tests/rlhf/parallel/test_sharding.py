import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rlhf.errors import ConfigError, InputError
from rlhf.parallel.fsdp import make_mesh
from rlhf.parallel.gathered_model import GatheredModel
from rlhf.parallel.settings import ClusterSettings, GroupSettings
from rlhf.parallel.sharding import Sharding, assign, clear_gradients, prepare
from rlhf.parallel.sharding_choice import choose_sharding
from tests.settings import changed, reward_settings


@pytest.fixture(autouse=True)
def _in_a_group(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # offloading would form a group
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)


def choose(**flags: Any) -> Sharding:
    return choose_sharding(changed(GroupSettings(), **flags))


def test_what_the_flags_say() -> None:
    assert choose() == Sharding()
    assert choose(sharding="fsdp", offload=True) == Sharding("fsdp", offload=True)
    assert choose(sharding="zero2").zero_stage == 2
    assert [
        (Sharding(one).is_sharded, Sharding(one).shards_weights)
        for one in ("auto", "ddp", "zero1", "zero2", "fsdp", "zero3")
    ] == [(False, False)] * 2 + [(True, False)] * 2 + [(True, True)] * 2


def test_one_process_alone_cannot_shard(monkeypatch) -> None:
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError) as caught:
        choose(sharding="fsdp")
    assert str(caught.value) == (
        "--sharding fsdp shards a model over processes, and there is only one\n"
        "  Add --processes N, or start the command under torchrun."
    )
    assert choose(sharding="ddp").strategy == "ddp"


def test_tensor_parallelism_takes_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    sharding = choose(tensor_parallel=2)
    assert sharding == Sharding(tensor_parallel=2)
    assert (sharding.is_sharded, sharding.shards_weights, sharding.is_tensor_parallel) == (
        True,
        False,
        True,
    )
    with pytest.raises(
        ConfigError, match=r"--parallel\.tensor-parallel 4 needs 4 processes, and there are 2"
    ):
        choose(tensor_parallel=4)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="no effect with accelerate's FSDP or DeepSpeed"):
        choose(tensor_parallel=2)


def test_nothing_to_offload() -> None:
    with pytest.raises(ConfigError, match=r"--parallel\.offload has no effect with --sharding ddp"):
        choose(sharding="ddp", offload=True)


def reducing(**flags: Any) -> Sharding:
    settings = changed(ClusterSettings(), **flags)
    parallel = replace(settings.parallel, reduce_dtype="bf16")
    return choose_sharding(replace(settings, parallel=parallel))


def test_gradients_are_added_up_in_bf16_where_there_are_several(monkeypatch) -> None:
    with pytest.raises(ConfigError) as caught:
        reducing(sharding="ddp")
    assert str(caught.value) == (
        "--parallel.reduce-dtype bf16 has no effect in one process, which adds up nothing with "
        "others\n  Add --processes N, or leave it out."
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose(sharding="fsdp").reduce_dtype == "fp32"
    for sharding in ("auto", "ddp", "fsdp"):
        assert reducing(sharding=sharding) == Sharding(sharding, reduce_dtype="bf16")
    for flags, other in (
        ({"sharding": "zero2"}, "--sharding zero2"),
        ({"tensor_parallel": 2}, "--parallel.tensor-parallel 2"),
    ):
        with pytest.raises(ConfigError, match=f"reduce-dtype bf16 cannot be combined with {other}"):
            reducing(**flags)


@pytest.mark.parametrize("sharding", ["auto", "ddp", "fsdp"])
def test_only_fsdp_has_other_gradients_than_bf16_beside_bf16_weights(
    monkeypatch: pytest.MonkeyPatch, sharding: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = reward_settings(
        rankings="r", model="m", out="o", precision="bf16-weights", sharding=sharding
    )
    parallel = replace(settings.parallel, reduce_dtype="bf16")
    with (
        nullcontext()
        if sharding == "fsdp"
        else pytest.raises(
            ConfigError, match="no effect with --precision bf16-weights and --sharding"
        )
    ):
        assert choose_sharding(replace(settings, parallel=parallel)).strategy == "fsdp"


def test_gradients_are_compressed_by_one_setting() -> None:
    settings = reward_settings(rankings="r", model="m", out="o", ddp_comm_hook="fp16")
    with pytest.raises(ConfigError, match="bf16 and --ddp-comm-hook fp16 both compress gradients"):
        replace(settings, parallel=replace(settings.parallel, reduce_dtype="bf16"))


def test_accelerates_fsdp_configuration_is_used(monkeypatch) -> None:
    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
    }.items():
        monkeypatch.setenv(name, value)
    expected = Sharding("fsdp", offload=True, reshard=False)
    assert choose() == expected
    # accelerate's own switch is off from here on, and a flag goes before it
    assert choose() == Sharding()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert choose(sharding="ddp") == Sharding("ddp")


def test_flags_go_with_accelerates_fsdp_configuration(monkeypatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    expected = Sharding("fsdp", offload=True, group=2)
    assert choose(offload=True, shard_group=2) == expected
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        ConfigError, match=r"--parallel\.shard-group 3 does not divide the 4 processes"
    ):
        choose(shard_group=3)


def test_the_first_fsdp_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ConfigError, match="configured for FSDP 1\n  Write fsdp_v"):
        choose()


def test_a_deepspeed_configuration_is_used(monkeypatch, tmp_path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(
        '{"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 7}, '
        '"train_batch_size": "auto"}',
        encoding="utf-8",
    )
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    sharding = choose()
    assert sharding.strategy == "zero3"
    assert sharding.deepspeed["zero_optimization"]["stage3_max_live_parameters"] == 7
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(
        ConfigError, match=r"--parallel\.offload has no effect with a DeepSpeed config"
    ):
        choose(offload=True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(
        ConfigError, match=r"--parallel\.shard-group has no effect with --sharding zero3"
    ):
        choose(shard_group=2)


def test_deepspeed_that_is_not_installed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.delitem(sys.modules, "rlhf.parallel.zero", raising=False)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="--sharding zero3 needs DeepSpeed, which is not inst"):
        prepare(Accelerator(cpu=True), model, optimizer, Sharding("zero3"))


def test_the_gathered_model_of_a_replicated_one_is_itself() -> None:
    model = nn.Linear(2, 2)
    model_copy = GatheredModel(model, torch.device("cpu"), is_copy=False)
    with model_copy.weights_of(model) as plain:
        assert plain is model
    assert model_copy.fills == 0


def test_a_gathered_model_holds_weights_only_inside_its_block() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model_copy = GatheredModel(model, torch.device("cpu"), is_copy=True)
    assert all(value.numel() == 0 for value in model_copy.module.parameters())
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model[1].running_mean.fill_(5.0)
    with model_copy.weights_of(model) as plain:
        assert plain[0].weight.eq(2.0).all()
        assert plain[1].running_mean.eq(5.0).all()
        assert plain is not model
        with model_copy.weights_of(model):
            pass
        assert plain[0].weight.numel() == 6  # the inner one has emptied nothing
    assert all(value.numel() == 0 for value in model_copy.module.parameters())
    assert model_copy.fills == 1


def test_a_parameter_is_overwritten_in_its_own_shape() -> None:
    layer = nn.Linear(3, 1)
    assign(layer.weight, torch.tensor([1.0, 2.0, 3.0]))
    assert layer.weight.tolist() == [[1.0, 2.0, 3.0]]


def test_gradients_of_ddp_accumulate_in_its_buckets(tmp_path) -> None:
    def accumulate() -> None:
        model = DistributedDataParallel(nn.Linear(2, 2), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        row, weight = torch.ones(1, 2), model.module.weight
        for _ in range(2):  # buckets are arranged anew after the first pass
            model(row).sum().backward()
            clear_gradients(model, optimizer)
        bucket = weight.grad.data_ptr()
        with model.no_sync():
            model(row).sum().backward()
        model(row).sum().backward()
        assert weight.grad.data_ptr() == bucket
        assert weight.grad.tolist() == [[2, 2], [2, 2]]

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        accumulate()  # DDP must be gone before its group: else its end may wait for Python's lock
    finally:
        dist.destroy_process_group()


def test_one_mesh_of_a_kind_is_made(tmp_path) -> None:
    """Every mesh makes process groups, which PyTorch keeps."""
    meshes = []
    for number in range(2):
        file = f"file://{tmp_path}/group-{number}"
        dist.init_process_group("gloo", init_method=file, rank=0, world_size=1)
        try:
            meshes += [make_mesh(torch.device("cpu"), 1, group) for group in (0, 1, 0, 1)]
        finally:
            dist.destroy_process_group()
    plain, grouped, again, grouped_again, *later = meshes
    assert plain is again
    assert grouped is grouped_again
    assert later[0] is not plain
    assert later[1] is not grouped
