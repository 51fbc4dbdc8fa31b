"""Two processes that hold one model together store, and learn, what one process does."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config

from policies.reference.store import open_store
from reward.training.train import train_reward
from rlhf.errors import InputError
from rlhf.modeling.models import load_causal_lm, new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.planning.planner import read_shape, tensor_parallel_shape
from rlhf.planning.strategies import Load
from rlhf.planning.traffic import tensor_parallel_traffic
from rlhf.records.jsonl import write_json
from rlhf.records.ranked import write_ranked
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.pipeline.loop import SHORT, Loop, read_json, without_clock, write_prompts
from tests.reward.conftest import build_record, thumbed
from tests.servers.commands import run_group, run_process
from tests.settings import reward_settings

PARTS = """
import json
import sys
from pathlib import Path
import torch
from reward.model.module import TrunkInputs, RewardModule
from rlhf.modeling.attention.checkpointing import checkpoint_activations
from rlhf.parallel.distributed import start
from rlhf.modeling.models import new_reward_model
from rlhf.parallel.tensor_parallel import prepare_tensor_parallel
from tests.pipeline.processes.spread import Collectives
accelerator = start("fp32", 0)
module = RewardModule(new_reward_model(sys.argv[1], 0, 0, held="parts")).train()
prepare_tensor_parallel(module, torch.optim.AdamW(module.parameters()))
inputs = TrunkInputs(torch.randint(3, 300, (2, 10)), torch.tensor([9, 19]))
found = []
for bf16, again in ((False, False), (True, False), (True, True)):
    if again:
        checkpoint_activations(module.classifier)
    with Collectives() as counter, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        module(inputs).sum().backward()
    found.append(counter.sizes["all_reduce.default"])
gradients = [one.grad for one in module.parameters()]
for values in (module.parameters(), gradients):
    found.append(sum(getattr(one, "_local_tensor", one).numel() for one in values))
Path(sys.argv[2], str(accelerator.process_index)).write_text(json.dumps(found))
"""


def run_in_two(text: str, model: Path, folder: Path) -> None:
    """Run a program in two processes, with a model and a folder as its arguments."""
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    done = run_group(2, program, model, folder)
    assert done.returncode == 0, done.stderr[-4000:]


def test_what_each_process_holds_and_sends_is_the_planners(
    tiny_model: Path, tmp_path: Path
) -> None:
    run_in_two(PARTS, tiny_model, tmp_path)
    shape, load = read_shape(str(tiny_model)), Load(10, 2, False, 1)
    planned = [
        tensor_parallel_traffic(shape, replace(load, checkpointing=again), 1, 2, bf16=bf16)
        for bf16, again in ((False, False), (True, False), (True, True))
    ]
    for rank in ("0", "1"):
        *sent, held, of_gradients = json.loads((tmp_path / rank).read_text())
        # of two processes each sends as many bytes as are added up
        assert sent == pytest.approx(planned, rel=0.05)
        assert of_gradients == held
        assert held == pytest.approx(tensor_parallel_shape(shape, 2).reward_parameters, abs=32)
    assert tensor_parallel_shape(shape, 2).reward_parameters < 0.51 * shape.reward_parameters


REPLICAS = """
import sys
from pathlib import Path
import torch
from torch.distributed.tensor import DTensor
from reward.model.module import TrunkInputs, RewardModule
from rlhf.parallel.distributed import start
from rlhf.modeling.models import new_reward_model
from rlhf.parallel.sharding import clip_gradients
from rlhf.parallel.tensor_parallel import prepare_tensor_parallel
accelerator = start("fp32", 0)
module = RewardModule(new_reward_model(sys.argv[1], 0, 0, held="parts")).train()
prepare_tensor_parallel(module, torch.optim.AdamW(module.parameters()))
inputs = TrunkInputs(torch.randint(3, 300, (2, 10)), torch.tensor([9, 19]))
module(inputs).sum().backward()
replicated = {n: p for n, p in module.named_parameters() if not isinstance(p, DTensor)}
expected = {name: one.grad * 1.5 for name, one in replicated.items()}
if accelerator.process_index == 1:  # as if rounding had been another one here
    for one in replicated.values():
        one.grad *= 2
norm = clip_gradients(accelerator, module, module.parameters(), 1e9)
found = {name: one.grad for name, one in replicated.items()}
torch.save([norm, found, expected], Path(sys.argv[2], str(accelerator.process_index)))
"""


def test_replicated_weights_get_the_same_gradients_in_every_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    run_in_two(REPLICAS, tiny_model, tmp_path)
    (norm, found, expected), (other_norm, others, _) = (torch.load(tmp_path / n) for n in "01")
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in found} >= {"norm", "score"}
    assert norm == other_norm
    for name, gradient in found.items():
        assert gradient.equal(others[name])
        torch.testing.assert_close(gradient, expected[name])


def test_reference_outputs_are_those_of_one_process(
    tiny_model: Path, tmp_path: Path, run_rlhf
) -> None:
    prompts, judge = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "judge"
    save_model(new_reward_model(str(tiny_model), 0, 0), load_tokenizer(str(tiny_model)), judge)
    words = ["reference", "--prompts", str(prompts), "--model", str(tiny_model), *SHORT]
    words += ["--reward", str(judge)]
    cut = ["--prompts-per-shard", "3"]
    code, _, shown = run_rlhf(*words, *cut, "--out", str(tmp_path / "one"))
    assert code == 0, shown
    together = ["--tensor-parallel", "2", "--out", str(tmp_path / "two")]
    done = run_process(*words, *cut, *together, processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    expected, found = (open_store(tmp_path / name / "outputs").rows for name in ("one", "two"))
    assert len(found) == 12
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.response_ids == theirs.response_ids
        assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
    alone, shared = (
        [one for part in rows.tables("reward") for one in part.to_pydict()["reward"]]
        for rows in (expected, found)
    )
    assert len(alone) == 12
    assert shared == pytest.approx(alone, abs=1e-4)


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=10)
    config.base_model_tp_plan = None
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no plan to split the matrices of"):
        load_causal_lm(str(tmp_path), held="parts")


TRAINING = {
    **{"precision": "fp32", "prompts_per_batch": 4, "learning_rate": 1e-3, "save_every": 2},
    "tokens_per_batch": 100,  # several passes a step
}


def words_of(rankings: Path, model: Path, out: Path, *more: str) -> list[str]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TRAINING.items()]
    given = ["--rankings", str(rankings), "--model", str(model), "--out", str(out)]
    return ["train-reward", *given, *options, *more]


def curve(out: Path) -> list[dict[str, Any]]:
    return [without_clock(row) for row in read_metrics(out / "metrics.jsonl")]


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same reward training by one process, and by two that hold the model together."""
    folder = tmp_path_factory.mktemp("together")
    records = [build_record(n, "test" if n % 4 == 0 else "train") for n in range(22)]
    records[17:20] = [thumbed(n, {0: "thumbs-up", 2: "thumbs-down"}) for n in (17, 18, 19)]
    write_ranked(folder / "rankings", records, {})
    given = {"rankings": folder / "rankings", "model": str(tiny_model), "out": folder / "one"}
    train_reward(reward_settings(**given, **TRAINING, keep_checkpoints=9))
    together = ("--tensor-parallel=2", "--keep-checkpoints=9")
    words = words_of(folder / "rankings", tiny_model, folder / "two", *together)
    done = run_process(*words, processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def require_same_weights(first: Path, second: Path) -> None:
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert value.allclose(theirs[name], atol=1e-5), name


def test_a_reward_model_held_together_learns_what_one_process_does(runs: Path) -> None:
    one = curve(runs / "one")
    assert len(one) == 4
    assert one[0]["grad_norm"] > 1  # so that clipping counts
    require_same_curve(runs / "two", runs / "one")
    require_same_weights(*(runs / name / "model" for name in ("one", "two")))


def test_its_folder_is_a_plain_model(runs: Path) -> None:
    assert read_json(runs / "two" / "model" / "config.json").keys() == (
        read_json(runs / "one" / "model" / "config.json").keys()
    )
    assert RunDir(runs / "two").read_report()["processes"] == 2


def begin_again(begun: Path, out: Path) -> Path:
    """A run that was stopped after two of its four steps."""
    shutil.copytree(begun, out)
    for later in ("checkpoints/step-000004", "model", "policy"):
        shutil.rmtree(out / later, ignore_errors=True)
    (out / "checkpoints" / "latest").write_text("step-000002")
    stage = read_json(out / "stage.json")
    write_json(out / "stage.json", {**stage, "status": "interrupted"})
    return out


def require_same_curve(out: Path, expected: Path) -> None:
    for mine, theirs in zip(curve(out), curve(expected), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_one_process_goes_on_with_it(runs: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = begin_again(runs / "two", tmp_path / "resumed")
    given = {"rankings": runs / "rankings", "model": str(tiny_model), "out": out}
    train_reward(reward_settings(**given, **TRAINING, keep_checkpoints=9, resume=True))
    require_same_curve(out, runs / "one")


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["one", "two"])
def test_two_processes_go_on(runs: Path, tiny_model: Path, tmp_path: Path, begun: str) -> None:
    out = begin_again(runs / begun, tmp_path / "resumed")
    together = ("--tensor-parallel=2", "--resume")
    done = run_process(*words_of(runs / "rankings", tiny_model, out, *together), processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    require_same_curve(out, runs / "one")


def test_processes_that_cannot_hold_it_together_are_refused(
    runs: Path, tiny_model: Path, tmp_path: Path, run_rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = words_of(runs / "rankings", tiny_model, tmp_path / "out", "--tensor-parallel=2")
    code, _, shown = run_rlhf(*words)
    assert code == 2
    assert (
        "--parallel.tensor-parallel 2 needs 2 processes, and there are 1\n  Give --processes 2"
        in shown
    )
    code, _, shown = run_rlhf(*words, "--seeds=0,1", "--sharding=fsdp")
    assert code == 2
    assert (
        "--parallel.tensor-parallel 2 cannot be combined with --seeds and --sharding\n  Leave"
        in shown
    )
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="has 2 key-value heads, which 3 processes"):
        load_causal_lm(str(tiny_model), held="parts")


def test_a_model_whose_gradients_would_be_wrong_is_refused(tmp_path: Path) -> None:
    Qwen3Config(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has norms within attention heads, whose gradients"):
        new_reward_model(str(tmp_path), 0, 0, held="parts")


TOGETHER = ("--tensor-parallel", "2")
GROUPS = ("--advantages", "rloo", "--samples-per-prompt", "2", "--ptx-per-episode", "0.5")
GROUPS += ("--micro-tokens", "150", "--gradient-checkpointing")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), GROUPS], ids=["critic", "groups"])
def test_ppo_of_models_held_together_is_that_of_one_process(
    loop: Loop, tmp_path: Path, run_rlhf, options: tuple[str, ...]
) -> None:
    if options:
        texts = tmp_path / "texts.txt"
        texts.write_text("".join(f"The {n} dogs went to the house.\n" for n in range(20)))
        options = (*options, "--ptx-data", str(texts))
    code, _, shown = run_rlhf(*loop.ppo_arguments(tmp_path / "one", *options, steps=2))
    assert code == 0, shown
    more = (*TOGETHER, "--micro-batch-size", "1", *options)
    done = run_process(*loop.ppo_arguments(tmp_path / "two", *more, steps=2), processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(one) == 2
    for mine, theirs in zip(two, one, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    require_same_weights(*(tmp_path / name / "policy" for name in ("one", "two")))
    for kind in ("forward", "reverse"):
        found = [RunDir(tmp_path / name).read_report()["kl"][kind] for name in ("one", "two")]
        assert found[1]["per_token"] == pytest.approx(found[0]["per_token"], rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_ppo_of_models_held_together_goes_on_as_if_undisturbed(loop: Loop, tmp_path: Path) -> None:
    options = (*TOGETHER, "--save-every", "2", "--keep-checkpoints", "9")
    straight = tmp_path / "straight"
    done = run_process(*loop.ppo_arguments(straight, *options), processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    out = begin_again(straight, tmp_path / "resumed")
    done = run_process(*loop.ppo_arguments(out, *options, "--resume"), processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(curve(out)) == 4
    assert curve(out) == curve(straight)
    mine, theirs = (load_file(f / "policy" / "model.safetensors") for f in (out, straight))
    assert all(value.equal(theirs[name]) for name, value in mine.items())
