"""A training spread over two processes is the training of one, whatever they divide."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.parallel.settings import ReduceDtype
from rlhf.planning.planner import read_shape
from rlhf.planning.strategies import DDP, FSDP, ZERO1, ZERO2, ZERO3, Load, Option, sizes_of
from rlhf.planning.traffic import communication_bytes
from rlhf.run.metrics import read_metrics
from tests.pipeline.loop import Loop, require_same, spread, without_clock
from tests.servers.commands import run_group, run_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def two(folder: Path, tiny_model: Path) -> dict[str, Any]:
    """Two processes under every strategy that has code of its own."""
    return spread(2, str(tiny_model), str(folder / "two.json"), "ddp", "fsdp", "fsdp:1", "zero3")


@pytest.fixture(scope="module")
def one(folder: Path, tiny_model: Path, two: dict[str, Any]) -> dict[str, Any]:
    """One process from the start, and from the checkpoints of two."""
    others = [f"auto@{folder / f'two.{strategy}'}" for strategy in ("ddp", "fsdp")]
    return spread(1, str(tiny_model), str(folder / "one.json"), "auto", *others)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp:1", "zero3"])
def test_losses_and_weights_are_those_of_one_process(one, two, strategy: str) -> None:
    require_same(two[strategy], one["auto"])
    rows = one["auto"]["ppo"]["rows"]
    assert rows[0]["loss/policy"] != pytest.approx(rows[-1]["loss/policy"], rel=1e-3)  # it trains


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp:1", "zero3"])
def test_a_trained_head_is_where_training_goes_on(one, two, strategy: str) -> None:
    expected, fresh = (one["auto"][name]["rows"] for name in ("trained_head", "reward"))
    assert expected[0]["loss"] != pytest.approx(fresh[0]["loss"], rel=1e-2)
    for mine, theirs in zip(two[strategy]["trained_head"]["rows"], expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_advantages_are_whitened_over_the_tokens_of_all_processes(one, two) -> None:
    for mine, theirs in zip(two["advantages"], one["advantages"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    tokens = np.concatenate(two["advantages"])
    assert tokens.mean() == pytest.approx(0, abs=1e-5)
    assert tokens.std() == pytest.approx(1, abs=1e-3)
    of_the_first = np.concatenate(two["advantages"][::2])
    assert of_the_first.mean() < -0.1  # its rows have the lower rewards


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_texts_and_token_budgets_change_nothing_either(one, two, strategy: str) -> None:
    expected = one["auto"]["ppo"]["with_texts"]
    assert expected["loss/ptx"] > 0
    assert two[strategy]["ppo"]["with_texts"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp:1", "zero3"])
def test_a_resumed_step_is_the_undisturbed_one_bit_for_bit(two, strategy: str) -> None:
    assert two[strategy]["ppo"]["resumed"]
    assert two[strategy]["ppo"]["progress"] == {"step": 3, "facts": 1}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process_goes_on_from_the_checkpoint_of_two(
    one, two, folder: Path, strategy: str
) -> None:
    found = one[f"auto@{folder / f'two.{strategy}'}"]
    assert found["row"] == pytest.approx(two[strategy]["ppo"]["rows"][-1], rel=1e-4, abs=1e-6)
    assert found["norms"] == pytest.approx(two[strategy]["ppo"]["norms"], rel=1e-7)


@pytest.mark.slow
def test_layers_gathered_in_bf16_train_as_autocast_does(folder: Path, tiny_model: Path) -> None:
    found = spread(2, str(tiny_model), str(folder / "bf16.json"), "bf16", "ddp", "fsdp")
    for part, rows in (
        ("ppo", found["ddp"]["ppo"]["rows"]),
        ("reward", found["ddp"]["reward"]["rows"]),
    ):
        for mine, theirs in zip(found["fsdp"][part]["rows"], rows, strict=True):
            assert mine == pytest.approx(theirs, rel=0.02, abs=0.002)
    sizes = [found[name]["ppo"]["norms"] for name in ("ddp", "fsdp")]
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-4)
    assert found["fsdp"]["ppo"]["resumed"]
    require_planned_traffic(FSDP, found["fsdp"]["ppo"]["traffic"], tiny_model, bf16=True)


@pytest.mark.slow
def test_bf16_weights_train_as_autocast_does(folder: Path, tiny_model: Path) -> None:
    autocast = spread(1, str(tiny_model), str(folder / "cast.json"), "bf16", "auto")["auto"]
    out = folder / "weights.json"
    found = spread(2, str(tiny_model), str(out), "bf16-weights", "ddp", "fsdp")
    others = [f"auto@{folder / f'weights.{strategy}'}" for strategy in ("ddp", "fsdp")]
    alone = spread(1, str(tiny_model), str(folder / "alone.json"), "bf16-weights", "auto", *others)
    for one in (found["ddp"], found["fsdp"], alone["auto"]):
        for part in ("ppo", "reward", "trained_head"):
            for mine, theirs in zip(one[part]["rows"], autocast[part]["rows"], strict=True):
                assert mine == pytest.approx(theirs, rel=0.03, abs=0.005)
        assert one["ppo"]["norms"] == pytest.approx(autocast["ppo"]["norms"], rel=1e-4)
        assert one["ppo"]["resumed"]
    for name, strategy in zip(others, ("ddp", "fsdp"), strict=True):
        assert alone[name]["row"] == pytest.approx(
            found[strategy]["ppo"]["rows"][-1], rel=0.03, abs=0.005
        )
    shape = read_shape(str(tiny_model))
    rounded = shape.parameters + shape.trunk  # gradients of 2 bytes, but for the head's
    sent = found["ddp"]["ppo"]["traffic"]["allreduce_.default"]
    assert sent == pytest.approx(2 * rounded + 4 * shape.hidden, abs=200)  # and a few counts


def bytes_of(traffic: dict[str, int], kind: str) -> int:
    return sum(size for name, size in traffic.items() if kind in name)


def test_gradients_added_up_in_bf16_are_half_as_wide(folder: Path, tiny_model: Path, two) -> None:
    found = spread(2, str(tiny_model), str(folder / "reduced.json"), "ddp+bf16", "fsdp+bf16")
    sent = {name: one["ppo"]["traffic"] for name, one in {**two, **found}.items() if "ppo" in one}
    for exact in ("ddp", "fsdp"):
        mine, theirs = found[f"{exact}+bf16"], two[exact]
        for part in ("ppo", "reward"):
            for row, other in zip(mine[part]["rows"], theirs[part]["rows"], strict=True):
                assert row == pytest.approx(other, rel=0.01, abs=1e-3)
            assert mine[part]["rows"] != theirs[part]["rows"]
        assert mine["ppo"]["norms"] == pytest.approx(theirs["ppo"]["norms"], rel=1e-4)
    shape = read_shape(str(tiny_model))
    trained = shape.parameters + shape.trunk + shape.hidden
    saved = sent["ddp"]["allreduce_.default"] - sent["ddp+bf16"]["allreduce_.default"]
    assert saved == 2 * trained
    whole, half = (bytes_of(sent[name], "reduce_scatter") for name in ("fsdp", "fsdp+bf16"))
    assert whole == 2 * half == pytest.approx(2 * 4 * trained, rel=0.01)  # both passes, padded
    for kind in ("allgather", "all_gather"):
        assert bytes_of(sent["fsdp"], kind) == bytes_of(sent["fsdp+bf16"], kind)
    for option, strategy in ((DDP, "ddp+bf16"), (FSDP, "fsdp+bf16")):
        require_planned_traffic(option, sent[strategy], tiny_model, reduce_dtype="bf16")


ADAPTERS = """
import sys
from pathlib import Path
import torch
from rlhf.modeling.adapters import add_adapters
from rlhf.modeling.models import load_causal_lm
from rlhf.parallel.distributed import start
from rlhf.parallel.gathered_model import whole
from rlhf.parallel.sharding import Sharding, backward, prepare
from tests.pipeline.processes.spread import Collectives
accelerator = start("fp32", 0)
found = {}
for strategy, dtype in (("ddp", "fp32"), ("ddp", "bf16"), ("fsdp", "fp32"), ("fsdp", "bf16")):
    accelerator.free_memory()
    sharding = Sharding(strategy, reduce_dtype=dtype)
    model = load_causal_lm(sys.argv[1], held=sharding.held(trained=True), trained=True)
    add_adapters(model, 4, 8, seed=0)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    model, _ = prepare(accelerator, model, optimizer, sharding)
    ids = torch.tensor([[5, 6, 7, 8 + accelerator.process_index]])
    with Collectives() as traffic:
        backward(accelerator, model, model(ids).logits.log_softmax(dim=-1)[0, :, 9].sum())
    gradients = [whole(one.grad, torch.device("cpu")) for one in model.parameters()
                 if one.requires_grad]
    found[f"{strategy} {dtype}"] = torch.cat([one.flatten() for one in gradients]), traffic.sizes
if accelerator.is_main_process:
    torch.save(found, Path(sys.argv[2]))
del model, optimizer
accelerator.free_memory()
accelerator.end_training()
"""


def test_gradients_of_adapters_are_added_up_in_bf16_too(folder: Path, tiny_model: Path) -> None:
    program, out = folder / "adapters.py", folder / "adapters.pt"
    program.write_text(ADAPTERS, encoding="utf-8")
    done = run_group(2, program, tiny_model, out)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(out, weights_only=False)
    exact, _ = found["ddp fp32"]
    trained = 4 * read_shape(str(tiny_model)).lora_rows
    assert exact.numel() == trained
    torch.testing.assert_close(found["fsdp fp32"][0], exact)
    for strategy, kind in (("ddp", "allreduce_"), ("fsdp", "reduce_scatter")):
        rounded, half = found[f"{strategy} bf16"]
        difference = (rounded - exact).norm() / exact.norm()
        assert 1e-5 < difference < 2**-8  # of 8 significant bits
        whole = bytes_of(found[f"{strategy} fp32"][1], kind)
        # beside them DDP sends a count
        assert whole - bytes_of(half, kind) == pytest.approx(2 * trained, rel=0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp:1", "zero3"])
def test_a_divided_reward_model_says_the_same(one, two, strategy: str) -> None:
    assert len(two[strategy]["scores"]) == 4
    assert two[strategy]["scores"] == pytest.approx(one["auto"]["scores"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_each_process_holds_its_part(one, two, strategy: str) -> None:
    assert two[strategy]["ppo"]["held"] <= 0.55 * one["auto"]["ppo"]["held"]


def test_sampling_gathers_once_however_many_tokens_it_samples(two) -> None:
    short, long, fills = two["fsdp"]["ppo"]["gathers"]
    assert short == long > 0
    assert fills == 1
    assert two["fsdp:1"]["ppo"]["held"] == two["ddp"]["ppo"]["held"]  # in groups of one
    _, long, fills = two["zero3"]["ppo"]["gathers"]  # after loading, small weights are still whole
    assert 0 < long <= short
    assert fills == 1
    assert two["ddp"]["ppo"]["gathers"] == [0, 0, 0]


def require_planned_traffic(
    option: Option,
    measured: dict[str, int],
    tiny_model: Path,
    *,
    bf16: bool = False,
    reduce_dtype: ReduceDtype = "fp32",
) -> None:
    # of two processes each sends half of what is gathered or scattered; a sum is one of each
    sent = sum(size * (1.0 if "allreduce" in kind else 0.5) for kind, size in measured.items())
    shape = read_shape(str(tiny_model))
    sizes = sizes_of("ppo", shape, Load(length=1, batch=1, checkpointing=False, lora_rank=0))
    # two passes: two rows of each process, one at a time
    planned = communication_bytes(option, sizes, 2, 2, bf16=bf16, reduce_dtype=reduce_dtype)
    assert planned == pytest.approx(sent, rel=0.05)


@pytest.mark.parametrize(("strategy", "option"), [("ddp", DDP), ("fsdp", FSDP), ("zero3", ZERO3)])
def test_the_traffic_of_a_step_is_the_planners(
    two, tiny_model: Path, strategy: str, option: Option
) -> None:
    require_planned_traffic(option, two[strategy]["ppo"]["traffic"], tiny_model)


def test_a_checkpoint_of_deepspeed_is_refused_by_others(folder: Path, tiny_model, two) -> None:
    name = f"auto@{folder / 'two.zero3'}"
    with pytest.raises(AssertionError, match="has the format 'zero3', this run reads 'torch'"):
        spread(1, str(tiny_model), str(folder / "refused.json"), name)


@pytest.mark.slow
def test_lesser_divisions_too(folder: Path, tiny_model, one) -> None:
    found = spread(2, str(tiny_model), str(folder / "more.json"), "zero1", "zero2")
    for strategy, option in (("zero1", ZERO1), ("zero2", ZERO2)):
        require_same(found[strategy], one["auto"])
        require_planned_traffic(option, found[strategy]["ppo"]["traffic"], tiny_model)
        assert found[strategy]["ppo"]["resumed"]


def run_ppo(loop: Loop, out: Path, sharding: str, *more: str) -> list[dict[str, Any]]:
    options = ("--sharding", sharding, "--save-every", "3", *more)
    done = run_process(*loop.ppo_arguments(out, *options), processes=2)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(out / "metrics.jsonl")
    return [without_clock(row) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp", "zero3"])
def test_a_whole_ppo_run_is_that_of_ddp_and_leaves_a_plain_model(
    loop: Loop, tmp_path: Path, sharding: str
) -> None:
    more = ("--gradient-checkpointing",) if sharding == "fsdp" else ()
    found = run_ppo(loop, tmp_path / sharding, sharding, *more)
    expected = run_ppo(loop, tmp_path / "ddp", "ddp")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    plain = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "policy").state_dict()
        for name in (sharding, "ddp")
    ]
    assert all(plain[0][name].allclose(plain[1][name], atol=1e-5) for name in plain[1])
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        contents = [(tmp_path / one / "policy" / name).read_bytes() for one in (sharding, "ddp")]
        assert contents[0] == contents[1]
