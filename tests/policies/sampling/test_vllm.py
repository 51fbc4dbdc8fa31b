"""vLLM samples what the policy of the moment says. Runs where it is installed: `make test-vllm`."""

import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vllm, in an environment of its own: make test-vllm")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import PreTrainedModel

from policies.deployment.settings import FormName
from policies.reference.audit import score_responses
from policies.reference.store import open_store
from policies.sampling.generate import Sample, sample_responses
from policies.sampling.vllm_engine import VLLM
from rlhf.errors import InputError
from rlhf.modeling.adapters import add_adapters
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.models import load_causal_lm, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import read_heartbeats
from tests.conftest import build_tiny_model
from tests.pipeline.loop import SHORT, write_prompts
from tests.policies.sampling.samples import (
    PROMPTS,
    SAMPLING,
    TEMPERATURE,
    sample_everywhere,
)
from tests.policies.training import TrainingInputs, build_training, metrics_of
from tests.servers.commands import run_group, run_process
from tests.servers.interrupted import kill_when

LONG = [5 + number % 7 for number in range(290)]
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM has some of its own


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are as wide as vLLM's attention on CPUs wants them.

    It ends at any of many tokens, so that answers end at others than the tokenizer's own.
    """
    folder = build_tiny_model(tmp_path_factory.mktemp("wide") / "model", head_dim=32)
    ends = [2, *range(100, 140)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, wide: Path) -> TrainingInputs:
    return build_training(tmp_path_factory.mktemp("training"), wide)


@pytest.fixture(scope="module")
def vllm(wide: Path) -> VLLM:
    return VLLM(
        str(wide), start("fp32", 0), longest=len(LONG) + SAMPLING.max_new_tokens, requests=3
    )


def sample(
    vllm: VLLM, model: PreTrainedModel, folder: Path, prompts: Sequence[list[int]] = PROMPTS
) -> list[Sample]:
    """Answers to the prompts, whose log-probs must be those that training sees."""
    accelerator, tokenizer = start("fp32", 0), load_tokenizer(str(folder))
    samples = sample_responses(vllm, model, tokenizer, prompts, SAMPLING, 3)
    answers = [one.token_ids for one in samples]
    ends = set(end_token_ids(tokenizer))
    assert all(one.finished or len(one.token_ids) == SAMPLING.max_new_tokens for one in samples)
    assert all(one.finished is (one.token_ids[-1] in ends) for one in samples)
    assert not any(set(one.token_ids[:-1]) & ends for one in samples)
    scored = score_responses(accelerator, model, tokenizer, prompts, answers, TEMPERATURE)
    for one, expected in zip(samples, scored, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), expected, rtol=0, atol=1e-4)
    return samples


def test_it_samples_from_the_weights_of_the_moment_with_adapters_merged_in(
    vllm: VLLM, wide: Path
) -> None:
    model = load_causal_lm(str(wide)).eval()
    first = sample(vllm, model, wide)
    assert sample(vllm, model, wide) == first
    # fills pages, whose keys and values are soon those of old weights
    sample(vllm, model, wide, [LONG])
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    sample(vllm, model, wide, [LONG])
    changed = sample(vllm, model, wide)
    add_adapters(model, rank=4, alpha=8, seed=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.2)
    adapted = sample(vllm, model, wide)
    assert first[0].log_probs != changed[0].log_probs != adapted[0].log_probs


def test_other_random_numbers_go_on_as_if_it_drew_a_seed_for_each_response(
    vllm: VLLM, wide: Path
) -> None:
    model = load_causal_lm(str(wide)).eval()
    start("fp32", 0)
    torch.randint(2**31, (len(PROMPTS),))
    expected = (torch.rand(3).tolist(), random.random())
    sample(vllm, model, wide)  # starts with seed 0, too
    assert (torch.rand(3).tolist(), random.random()) == expected


# These start engines of their own, which end the one that the tests above share.


def test_in_bf16_it_gets_adapters_beside_weights_from_disk(wide: Path, bf16: Accelerator) -> None:
    """Its log-probs follow the adapters of the moment, sampled from weights that never change."""
    engine = VLLM(str(wide), bf16, 40, requests=3, lora_rank=4)
    model, tokenizer = load_causal_lm(str(wide)).eval(), load_tokenizer(str(wide))
    add_adapters(model, rank=4, alpha=8, seed=0)
    for value in (0.0, 0.2, -0.3):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.fill_(value)
                elif "lora_" not in name and value:
                    weight.zero_()  # of these the engine has its own
        samples = sample_responses(engine, model, tokenizer, PROMPTS, SAMPLING, 3)
        answers = [one.token_ids for one in samples]
        ours = torch.cat([torch.tensor(one.log_probs) for one in samples])
        judge = load_causal_lm(str(wide)).eval()
        plain = torch.cat(score_responses(bf16, judge, tokenizer, PROMPTS, answers, TEMPERATURE))
        add_adapters(judge, rank=4, alpha=8, seed=0)
        judge.load_state_dict(
            {name: one for name, one in model.state_dict().items() if "lora_" in name}, strict=False
        )
        theirs = torch.cat(score_responses(bf16, judge, tokenizer, PROMPTS, answers, TEMPERATURE))
        assert (ours - theirs).abs().mean() < 0.01
        if value:
            assert (ours - plain).abs().mean() > 0.1


def test_a_model_that_is_not_trained_is_read_from_disk(wide: Path) -> None:
    longest = len(LONG) + SAMPLING.max_new_tokens
    engine = VLLM(str(wide), start("fp32", 0), longest, requests=3, lora_rank=0)
    model = load_causal_lm(str(wide)).eval()
    expected = sample(engine, model, wide)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()  # the engine does not look at it
    start("fp32", 0)
    tokenizer = load_tokenizer(str(wide))
    assert sample_responses(engine, None, tokenizer, PROMPTS, SAMPLING, 3) == expected


def quantized(wide: Path, form: FormName, folder: Path) -> Path:
    from policies.deployment.forms import quantize_weights  # which warns when it is imported

    model = load_causal_lm(str(wide))
    quantize_weights(model, form)
    save_model(model, load_tokenizer(str(wide)), folder)
    return folder


@pytest.fixture
def bf16() -> Iterator[Accelerator]:
    """In a process that has another precision before and after."""
    AcceleratorState._reset_state()
    yield start("bf16", 0)
    AcceleratorState._reset_state()


def test_it_multiplies_the_integers_of_int4(wide: Path, bf16: Accelerator, tmp_path: Path) -> None:
    """Its log-probs are those of transformers, which expands the weights while loading.

    Those of the unquantized model are further away.
    """
    folder, accelerator = quantized(wide, "int4", tmp_path / "int4"), bf16
    longest = len(LONG) + SAMPLING.max_new_tokens
    engine = VLLM(str(folder), accelerator, longest, requests=3, lora_rank=0)
    tokenizer = load_tokenizer(str(folder))
    samples = sample_responses(engine, None, tokenizer, PROMPTS, SAMPLING, 3)
    answers = [one.token_ids for one in samples]
    ours = torch.cat([torch.tensor(one.log_probs) for one in samples])
    near, far = (
        (torch.cat(score_responses(
            accelerator, load_causal_lm(str(model)).eval(), tokenizer, PROMPTS, answers, TEMPERATURE
        )) - ours).abs().mean()
        for model in (folder, wide)
    )  # fmt: skip
    assert near < 0.005
    assert far > 2 * near


def test_on_cpus_it_refuses_int8(wide: Path, bf16: Accelerator, tmp_path: Path) -> None:
    folder = quantized(wide, "int8", tmp_path / "int8")
    with pytest.raises(InputError, match="vLLM does not start with"):
        VLLM(str(folder), bf16, 64, requests=3, lora_rank=0)


def test_every_command_that_samples_does_it(training: TrainingInputs, tmp_path: Path) -> None:
    found = sample_everywhere(training, tmp_path, "vllm")
    assert all(found[name] for name in ("generate", "reference", "policy", "rival", "round"))


def test_it_is_measured_on_answers_that_no_end_token_closes(wide: Path, tmp_path: Path) -> None:
    sizes = ("--batch-sizes", "2", "--prompt-tokens", "5", "--answer-tokens", "24")
    out = ("--repeats", "1", "--precision", "fp32", "--out", str(tmp_path / "out"))
    done = run_process("benchmark", str(wide), "--engine", "vllm", *sizes, *out)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_second_engine_takes_the_place_of_the_first(wide: Path) -> None:
    model = load_causal_lm(str(wide)).eval()
    for longest in (20, 40):
        engine = VLLM(str(wide), start("fp32", 0), longest, requests=2)
        sample(engine, model, wide)


def test_a_policy_is_trained_and_a_resumed_run_is_the_undisturbed_one(
    training: TrainingInputs, tmp_path: Path
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    options = ("--engine", "vllm", "--save-every", "1")
    done = run_process(*training.arguments(straight, *options, steps=3))
    assert done.returncode == 0, done.stderr
    assert "Step" not in done.stderr  # no guard warns
    kill_when(training.arguments(killed, *options, steps=3), killed / "metrics.jsonl", lines=2)
    assert run_process(*training.arguments(killed, *options, "--resume", steps=3)).returncode == 0
    assert metrics_of(killed) == metrics_of(straight)
    weights = [load_file(out / "policy" / "model.safetensors") for out in (straight, killed)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert all(row["sampler_gap"] < 1e-4 for row in metrics_of(straight))


BF16_ADAPTERS = (  # of a rate at which the second step's are seen
    *("--sharding", "fsdp", "--engine-tensor-parallel", "2", "--precision", "bf16"),
    *("--lora-rank", "2", "--kl.source", "adapter", "--learning-rate", "3e-2"),
)


@pytest.mark.parametrize(
    "layout",
    [
        ("--sharding", "fsdp"),
        ("--engine-tensor-parallel", "2"),  # of a model that each process holds
        pytest.param(("--sharding", "fsdp", "--kl.source", "resident"), marks=pytest.mark.slow),
        pytest.param(BF16_ADAPTERS, marks=pytest.mark.slow),
    ],
)
def test_two_processes_with_an_engine_each_or_one(
    training: TrainingInputs, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    options = ("--engine", "vllm", "--processes", "2", *layout)
    done = run_process(*training.arguments(tmp_path, *options, steps=2))
    assert done.returncode == 0, done.stderr
    gap = 0.01 if "bf16" in layout else 1e-4
    assert all(row["sampler_gap"] < gap for row in metrics_of(tmp_path))


@pytest.mark.parametrize(
    "adapters",
    [
        (),
        pytest.param(("--lora-rank", "2", "--kl.source", "adapter"), marks=pytest.mark.slow),
    ],
)
def test_two_processes_share_an_engine_and_gather_no_model(
    training: TrainingInputs, tmp_path: Path, adapters: tuple[str, ...]
) -> None:
    """They take the steps of two processes that hold everything and have an engine each."""
    both = ("--engine", "vllm", "--processes", "2", "--save-every", "1", *adapters)
    shared = (*both, "--sharding", "fsdp", "--engine-tensor-parallel", "2")
    straight, killed, whole = (tmp_path / name for name in ("straight", "killed", "whole"))
    for out, options in ((whole, both), (straight, shared)):
        done = run_process(*training.arguments(out, *options, steps=5))
        assert done.returncode == 0, done.stderr
    found, expected = metrics_of(straight), metrics_of(whole)
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=2e-3, abs=2e-4)
        assert row["sampler_gap"] < 1e-4
    weights = [load_file(out / "policy" / "model.safetensors") for out in (straight, whole)]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=1e-4)
    kill_when(training.arguments(killed, *shared, steps=5), killed / "metrics.jsonl", lines=2)
    for beat in read_heartbeats(RunDir(killed).heartbeat):  # the launcher alone is dead
        with suppress(ProcessLookupError):
            os.kill(beat.pid, signal.SIGKILL)
    assert RunDir(killed).read_stage()["status"] != "done"
    done = run_process(*training.arguments(killed, *shared, "--resume", steps=5))
    assert done.returncode == 0, done.stderr
    assert metrics_of(killed) == metrics_of(straight)


SEEDED = """
import sys
import zlib
from itertools import count
from vllm import LLM
from rlhf.cli import main
plain, calls = LLM.generate, count()

def generate(self, inputs, how, **rest):
    if isinstance(how, list):
        call = next(calls)
        for one, request in zip(how, inputs, strict=True):
            one.seed = zlib.crc32(repr((call, request["prompt_token_ids"])).encode())
    return plain(self, inputs, how, **rest)

LLM.generate = generate
sys.exit(main(sys.argv[1:]))
"""


def test_two_processes_that_share_an_engine_take_the_steps_of_one(
    training: TrainingInputs, tmp_path: Path
) -> None:
    """A response has the same random numbers in both runs, whichever process asks for it."""
    program = tmp_path / "program.py"
    program.write_text(SEEDED, encoding="utf-8")
    shared = ("--sharding", "fsdp", "--engine-tensor-parallel", "2")
    for count, layout in ((1, ()), (2, shared)):
        # stored outputs are drawn by each process for itself
        options = ("--engine", "vllm", "--kl.source", "resident", *layout)
        words = training.arguments(tmp_path / str(count), *options, steps=5)
        done = run_group(count, program, *words)
        assert done.returncode == 0, done.stderr[-4000:]
    one, two = (metrics_of(tmp_path / name) for name in "12")
    assert len(one) == 5
    for row, expected in zip(two, one, strict=True):
        assert row == pytest.approx(expected, rel=2e-3, abs=2e-4)
    assert one[-1]["kl/reverse_k1_per_token"] > 10 * 2e-4  # it trains
    mine, theirs = (load_file(tmp_path / n / "policy" / "model.safetensors") for n in "21")
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-4)


def test_reference_outputs_of_processes_that_share_an_engine(
    training: TrainingInputs, tmp_path: Path
) -> None:
    """One has two files to write and the other one, so it calls the engine less often."""
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    words = ["reference", "--prompts", str(prompts), "--model", str(training.model), *SHORT]
    words += ["--processes", "2", "--prompts-per-shard", "5", "--batch-size", "1"]
    shared = ["--engine", "vllm", "--engine-tensor-parallel", "2", "--out", str(tmp_path / "out")]
    done = run_process(*words, *shared, "--sharding", "fsdp")
    assert done.returncode == 0, done.stderr
    store = open_store(tmp_path / "out" / "outputs")
    splits = (store.by_prompt("train"), store.by_prompt("test"))
    rows = [row for split in splits for group in split for row in group]
    assert len(rows) == 12
    accelerator, model = start("fp32", 0), load_causal_lm(str(training.model)).eval()
    inputs = [row.prompt_ids for row in rows], [row.response_ids for row in rows]
    tokenizer, temperature = load_tokenizer(str(training.model)), store.sampling.temperature
    scored = score_responses(accelerator, model, tokenizer, *inputs, temperature)
    for row, expected in zip(rows, scored, strict=True):
        torch.testing.assert_close(torch.tensor(row.log_probs), expected, rtol=0, atol=1e-4)
    refused = run_process(*words, *shared)
    assert refused.returncode == 2
    assert "--sampling.engine-tensor-parallel 2 needs a sharded model" in refused.stderr
