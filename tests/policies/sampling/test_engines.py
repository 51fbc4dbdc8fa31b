"""Both engines sample what the policy says, and tell what they thought of it."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from policies.ppo.checks import check_step
from policies.reference.audit import score_responses
from policies.sampling.continuous import ContinuousSampler, batching_config, rounded
from policies.sampling.generate import GenerateSampler, Sample, draw, sample_responses
from rlhf.cli import main
from rlhf.errors import GuardError, InputError
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.log_probs import Sequences, response_log_probs
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import load_tokenizer, pad_left, pad_right
from rlhf.parallel.distributed import start
from rlhf.records.schema import Sampling
from tests.families import FAMILIES, build_family_model
from tests.policies.sampling.samples import PROMPTS, SAMPLING, TEMPERATURE, sample_everywhere
from tests.policies.training import TrainingInputs

SAMPLERS = {"generate": GenerateSampler, "continuous": ContinuousSampler}


@pytest.fixture
def model(tiny_model: Path) -> PreTrainedModel:
    loaded = load_causal_lm(str(tiny_model)).eval()
    pack_prefixes(loaded)
    return loaded


def sample(
    model: PreTrainedModel, folder: Path, engine: str, sampling: Sampling = SAMPLING
) -> tuple[Accelerator, list[Sample]]:
    accelerator, tokenizer = start("fp32", 0), load_tokenizer(str(folder))
    sampler = SAMPLERS[engine](accelerator)
    found = sample_responses(sampler, model, tokenizer, PROMPTS, sampling, 3)
    return accelerator, found


@pytest.mark.parametrize("engine", ["generate", "continuous"])
def test_the_samplers_log_probs_are_the_trainers(
    model: PreTrainedModel, tiny_model: Path, engine: str
) -> None:
    accelerator, samples = sample(model, tiny_model, engine)
    expected = score_responses(
        accelerator,
        model,
        load_tokenizer(str(tiny_model)),
        PROMPTS,
        [one.token_ids for one in samples],
        TEMPERATURE,
    )
    for one, theirs in zip(samples, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "engine"), [("llama3", "generate"), ("qwen", "continuous")])
def test_every_end_token_ends_a_response(name: str, engine: str, tmp_path: Path) -> None:
    folder = build_family_model(tmp_path, FAMILIES[name])
    accelerator, tokenizer = start("fp32", 0), load_tokenizer(str(folder))
    model = load_causal_lm(str(folder)).eval()
    sampler = SAMPLERS[engine](accelerator)
    found = sample_responses(sampler, model, tokenizer, PROMPTS * 12, SAMPLING, 20)
    ends = set(end_token_ids(tokenizer))
    assert {one.token_ids[-1] for one in found if one.finished} == ends
    for one in found:
        assert not set(one.token_ids[:-1]) & ends
        assert one.finished or len(one.token_ids) == SAMPLING.max_new_tokens
        assert one.log_probs is not None
        assert len(one.log_probs) == len(one.token_ids)


LONG = [5 + number % 7 for number in range(260)]
ALIKE = {
    "unlike lengths": ([[5, 6, 7, 8], [5, 6, 7, 9, 10], [5, 6, 7]], [(1, 2), (3, 3), (3, 1)]),
    "one length, long": (
        [[*LONG, 20, 21, 22], [*LONG, 23, 24, 25], [*LONG, 26, 27, 28]],
        [(1, 260), (3, 3), (3, 1)],
    ),
    "one prompt three times": ([[5, 6, 7, 8]] * 3, [(1, 3), (3, 1), (3, 1)]),
    "two prompts twice, of unlike lengths": (
        [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [9, 10]],
        [(2, 3), (4, 1), (4, 1)],
    ),
    "two prompts twice that begin alike": (
        [[*LONG, *own] for own in ([20] * 90, [23] * 80) for _ in range(2)],
        [(1, 260), (2, 89), (4, 1)],
    ),
    "nothing in common": ([[5, 6, 7], [8, 9, 10]], [(2, 3), (2, 1), (2, 1)]),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_prompts_have_in_common_is_read_once(
    model: PreTrainedModel, tiny_model: Path, case: str
) -> None:
    prompts, expected_reads = ALIKE[case]
    accelerator, tokenizer = start("fp32", 0), load_tokenizer(str(tiny_model))
    reads: list[tuple[int, int]] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: reads.append(tuple(inputs[0].shape))
    )
    sampler = GenerateSampler(accelerator)
    samples = sample_responses(sampler, model, tokenizer, prompts, SAMPLING, len(prompts))
    assert reads[:3] == expected_reads  # the shortest prompt keeps a token of its own
    answers = [one.token_ids for one in samples]
    expected = score_responses(accelerator, model, tokenizer, prompts, answers, TEMPERATURE)
    for one, theirs in zip(samples, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), theirs, rtol=0, atol=1e-4)


def test_a_token_of_no_probability_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number at the border of two parts, where the second one's float32 sum is too large."""
    torch.manual_seed(0)
    probabilities = torch.rand(1, 512).softmax(dim=1)
    probabilities[0, 256] = 0
    second = probabilities[0, 256:]
    while second.sum() <= second.double().sum():
        probabilities[0, 257:] = torch.rand(255) / 512
    sums = probabilities.view(1, 2, 256).sum(dim=2).cumsum(dim=1, dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: sums[:, :1] / sums[:, 1:])
    assert draw(probabilities).item() == 257


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    torch.manual_seed(0)
    probabilities = torch.zeros(600)  # three parts, the last one short
    places, shares = [0, 1, 255, 256, 300, 599], [0.3, 0.05, 0.15, 0.2, 0.1, 0.2]
    probabilities[places] = torch.tensor(shares)
    counts = draw(probabilities.expand(20_000, -1)).flatten().bincount(minlength=600) / 20_000
    assert counts.sum() == pytest.approx(1)
    # three standard deviations of the most likely: 3 √(.3 · .7 / 20000) = .0097
    torch.testing.assert_close(counts[places], torch.tensor(shares), rtol=0, atol=0.0097)
    assert counts[probabilities == 0].sum() == 0


def test_sampling_from_the_most_likely_token_alone_is_greedy(
    model: PreTrainedModel, tiny_model: Path
) -> None:
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        sampling = replace(SAMPLING, **narrow)
        _, samples = sample(model, tiny_model, "generate", sampling)
        for prompt, one in zip(PROMPTS, samples, strict=True):
            ids = list(prompt)
            for token in one.token_ids:
                with torch.no_grad():
                    assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
                ids.append(token)


def test_continuous_sampling_repeats_itself_and_leaves_the_model_alone(
    model: PreTrainedModel, tiny_model: Path
) -> None:
    attention = model.config._attn_implementation
    first, second = (sample(model, tiny_model, "continuous")[1] for _ in range(2))
    assert first == second
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("engine", ["generate", "continuous"])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_in_training_stays_in_training(
    model: PreTrainedModel, tiny_model: Path, engine: str, *, training: bool
) -> None:
    model.train(training)
    sample(model, tiny_model, engine)
    assert {part.training for part in model.modules()} == {training}


def test_rounded_weights_come_back_as_they_were(model: PreTrainedModel) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with rounded(model, torch.bfloat16):
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_model_that_the_engine_cannot_run_is_refused(tiny_model: Path) -> None:
    config = MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=300, state_size=4)
    with pytest.raises(InputError, match="Continuous batching cannot run Mamba") as caught:
        sample(MambaForCausalLM(config), tiny_model, "continuous")
    assert caught.value.remedy == "Use --engine generate, which samples from every model."


def test_every_command_that_samples_has_the_engines(
    training: TrainingInputs, tmp_path: Path
) -> None:
    found = []
    for engine in ("generate", "continuous"):
        (tmp_path / engine).mkdir()
        found.append(sample_everywhere(training, tmp_path / engine, engine))
    plain, continuous = found
    for name in ("generate", "reference", "policy", "rival", "round"):
        assert plain[name]
        assert continuous[name]
        assert plain[name] != continuous[name]  # an engine draws other random numbers
    assert len(plain["reference"]) == len(continuous["reference"]) == 12


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_vllm_is_asked_for_where_it_is_not_installed(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = ("--reward", "r", "--reference", "f")
    for command, flag in (
        (training.arguments(tmp_path / "x"), "--sampling.engine"),
        (["reference", "--model", "m", "--prompts", "p", "--out", "o"], "--sampling.engine"),
        (["generate", "--db", "d", "--model", "m"], "--engine"),
        (["evaluate", "--policy", "p", "--out", "o", *compared], "--engine"),
        (["round", "--policy", "p", "--db", "d", *compared], "--engine"),
    ):
        assert main([*command, "--engine", "vllm"]) == 2
        words = " ".join(capsys.readouterr().err.split())
        assert f"{flag} vllm needs the package vllm, which is not installed" in words
        assert f"Install it: pip install vllm, or use {flag} generate." in words
    assert not (tmp_path / "x").exists()


def test_only_vllm_is_shared_by_processes(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = training.arguments(tmp_path / "x", "--engine-tensor-parallel", "2")
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "--sampling.engine-tensor-parallel 2 does nothing with --sampling.engine generate" in said
    )
    assert "Add --sampling.engine vllm, or leave it out." in said
    assert main([*words[:-1], "0"]) == 2
    assert "--sampling.engine-tensor-parallel is 0" in capsys.readouterr().err


def test_a_sampler_that_disagrees_with_training_is_stopped_at_once() -> None:
    row = {"step": 1, "sampler_gap": 0.002, "approx_kl": 0.0, "entropy": 1.0}
    with pytest.raises(GuardError, match=r"differ by 0\.0020 nats per token"):
        check_step(row, "no", None, single_update=False)
    check_step({**row, "step": 2}, "no", None, single_update=False)
    check_step(row, "bf16", None, single_update=True)


def test_continuous_batching_asks_for_cuda_graphs_on_cuda() -> None:
    on_cuda = batching_config(torch.device("cuda"), 3, 300)
    assert on_cuda.use_cuda_graph is True
    assert (on_cuda.num_blocks, on_cuda.max_batch_tokens) == (6, 300)  # two pages each
    assert batching_config(torch.device("cpu"), 3, 300).use_cuda_graph is False


def test_sampling_stops_when_every_response_has_ended(
    model: PreTrainedModel, tiny_model: Path
) -> None:
    calls = []

    def end_at_once(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
        calls.append(logits.shape[0])
        logits[..., 2] = 1e4  # <|im_end|>
        return logits

    model.get_output_embeddings().register_forward_hook(end_at_once)
    _, samples = sample(model, tiny_model, "generate")
    assert [one.token_ids for one in samples] == [[2]] * len(PROMPTS)
    assert all(one.finished for one in samples)
    assert calls == [
        3,
        1,
        2,
    ]  # a step for each of two batches, and one for what a batch begins with


def test_only_positions_of_responses_reach_the_output_matrix(model: PreTrainedModel) -> None:
    read: list[torch.Size] = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].shape)
    )
    responses = [[20, 21, 2], [22, 2], [23, 24, 2], [25], [2]]
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(responses, 0))
    with torch.no_grad():
        found = response_log_probs(model, sequences, 1.0)
    assert found.log_probs.shape == (5, 3, 1)
    assert [shape[:-1].numel() for shape in read] == [3 + 2 + 3 + 1 + 1]
