"""A GPU works ahead: no micro-batch of a step waits for it."""

from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from policies.ppo.kl import measure_reference
from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.rollout import Episodes, Experience, _measure
from policies.ppo.update import (
    Learner,
    Minibatch,
    StepData,
    compute_gradients,
    reference_batch,
    step_metrics,
)
from policies.sampling.generate import GenerateSampler, sample_responses
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.log_probs import Sequences, response_log_probs
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start
from rlhf.parallel.sharding import Sharding, prepare
from rlhf.records.schema import Sampling
from tests.policies.ppo.updates import (
    PROMPTS,
    RESPONSES,
    SETTINGS,
    build_experience,
    build_model,
    build_rows,
)
from tests.rlhf.fake_device import DEVICE, READS, numbers, on_device, use_device, waiting
from tests.settings import changed

ALL = Minibatch(torch.arange(4), torch.arange(3), torch.arange(2))


def build_packing_model(folder: Path) -> PolicyAndCritic:
    model = build_model(folder)
    assert pack_prefixes(model.policy) is pack_prefixes(model.critic) is None
    return model


def sent(experience: Experience) -> Experience:
    """The experience on the device, its sequences in both places."""
    there = {
        one.name: getattr(experience, one.name).to(DEVICE)
        for one in fields(experience)
        if getattr(experience, one.name) is not None
    }
    return replace(experience, **there)


def step_data(device: torch.device) -> StepData:
    texts = Sequences.of([[5], [6]], [[7, 8, 9], [10]], 0).to(device)
    experience = build_experience()
    if device == DEVICE:
        experience = sent(experience)
    return StepData(experience, reference_batch(build_rows(), 0, device), texts)


@pytest.mark.parametrize("how", [{"micro_batch_size": 1}, {"micro_tokens": 12}])
def test_policy_value_kl_and_text_losses_are_read_after_all_micro_batches(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, int]
) -> None:
    settings = changed(SETTINGS, **how)
    plain, model = (build_packing_model(tiny_model) for _ in range(2))
    learner = Learner(
        start("fp32", 0),
        plain,
        torch.optim.SGD(plain.parameters()),
        settings,
        1.0,
        settings.kl.coefficient,
    )
    expected = step_metrics(
        *compute_gradients(learner, step_data(torch.device("cpu")), ALL), settings
    )
    learner = replace(learner, accelerator=use_device(monkeypatch), model=on_device(model))
    with waiting() as waits:
        data = step_data(DEVICE)
        model.register_forward_hook(lambda *_: waits.append("forward"))
        found = step_metrics(*compute_gradients(learner, data, ALL), settings)
    assert found == pytest.approx(expected, rel=1e-6)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(numbers(mine.grad), other.grad, rtol=1e-5, atol=1e-6)
    assert waits.count("forward") > 4
    # before: how many micro-batches the others have, and whether the model changes its logits
    assert [is_forward for is_forward, _ in groupby(waits, "forward".__eq__)] == [
        *(False, True, False)
    ]


def measured(model: PolicyAndCritic, device: torch.device, size: int) -> tuple[list[Tensor], list]:
    sequences = Sequences.of(PROMPTS, RESPONSES, 0).to(device)
    episodes = Episodes([()] * 4, sequences, torch.ones(4), [""] * 4, torch.zeros(4, 6))
    context = SimpleNamespace(
        accelerator=SimpleNamespace(**{"device": device, "autocast": torch.no_grad}),
        sampling=SimpleNamespace(temperature=1.0),
        sharding=Sharding(),
        reference_policy=lambda model, part: response_log_probs(model.policy, part, 1.0).first(
            part.responses.mask
        ),
    )
    settings = changed(SETTINGS, micro_batch_size=size)
    with torch.no_grad(), waiting() as waits:
        found = _measure(context, model, episodes, settings)
        again = measure_reference(
            context.accelerator, model, context.reference_policy, sequences, 1, Sharding()
        )
    return [found.log_probs, found.values, found.entropy, found.reference_log_probs, again], waits


def test_measuring_a_rollout_never_waits(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_packing_model(tiny_model)
    expected, _ = measured(model, torch.device("cpu"), 2)
    use_device(monkeypatch)
    on_device(model)
    found, waits = measured(model, DEVICE, 2)
    assert waits == []
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(numbers(mine), other, rtol=1e-5, atol=1e-6)


def sampled(
    folder: Path, policy: PreTrainedModel, tokens: int, accelerator: Accelerator
) -> list[list[int]]:
    tokenizer = load_tokenizer(str(folder))
    sampling = Sampling(max_new_tokens=tokens)
    torch.manual_seed(0)
    sampler = GenerateSampler(accelerator)
    found = sample_responses(sampler, policy, tokenizer, PROMPTS, sampling, len(PROMPTS))
    return [one.token_ids for one in found]


def test_sampling_waits_once_for_each_token(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = build_packing_model(tiny_model).policy
    expected = sampled(tiny_model, policy, 8, start("fp32", 0))
    assert max(map(len, expected)) == 8
    accelerator, counts = use_device(monkeypatch), []
    on_device(policy)
    for tokens in (4, 8):
        with waiting() as waits:
            found = sampled(tiny_model, policy, tokens, accelerator)
        counts.append(len(waits))
        assert [one[:tokens] for one in expected] == found
    # transformers asks after each token whether all responses have ended
    assert counts[1] - counts[0] == 4


class Reads(TorchDispatchMode):
    """Counts the operations that a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in READS
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("group")
def test_autocast_and_fsdp_read_no_more_numbers(tiny_model: Path) -> None:
    counts = {}
    for precision, strategy in (("fp32", "ddp"), ("bf16", "ddp"), ("fp32", "fsdp")):
        AcceleratorState._reset_state()
        accelerator, model = start(precision, 0), build_packing_model(tiny_model)
        optimizer = torch.optim.AdamW(model.parameters())
        if strategy == "fsdp":
            model, optimizer = prepare(accelerator, model, optimizer, Sharding("fsdp"))
            assert all(isinstance(one, DTensor) for one in model.parameters())
        settings = changed(SETTINGS, micro_batch_size=1)
        learner = Learner(accelerator, model, optimizer, settings, 1.0, settings.kl.coefficient)
        with Reads() as reads:
            compute_gradients(learner, step_data(torch.device("cpu")), ALL)
        counts[precision, strategy] = reads.count
    assert len(set(counts.values())) == 1, counts


def test_the_device_notices_what_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with waiting() as waits:
        there = torch.arange(3).to(DEVICE, non_blocking=True)
        double = (there * 2)[there.flip(0)]
        assert waits == []
        assert numbers(double).tolist() == [4, 2, 0]
        assert int(there.sum()) == 3
        assert numbers(there[there > 0]).tolist() == [1, 2]
        assert there[torch.tensor([2])].tolist() == [2]
        there.cpu()
        torch.arange(3).to(DEVICE)
        torch.tensor([1.0], device=DEVICE)
        with pytest.raises(RuntimeError, match="mixes tensors of the device and of main memory"):
            there + torch.arange(3)
    assert waits == [
        "aten._local_scalar_dense.default",
        "aten.index.Tensor by a mask",
        "aten.index.Tensor by an index in main memory",
        "tolist",
        "aten._to_copy.default from the device",
        "aten._to_copy.default to the device",
        "torch.tensor to the device",
    ]
