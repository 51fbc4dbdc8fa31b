"""bf16 weights with float32 masters, against AdamW and rounding in NumPy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from rlhf.errors import ConfigError
from rlhf.parallel.gathered_model import GatheredModel
from rlhf.parallel.master_weights import MasterOptimizer, float32_model
from rlhf.parallel.sharding import Sharding, clip_gradients, prepare
from rlhf.run.checkpoint import load_checkpoint, save_checkpoint

RATE, BETAS, EPS, DECAY = 0.05, (0.9, 0.95), 1e-5, 0.1


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to 8 significant bits, ties to even, on the bits of float32."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def adamw(weight: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """AdamW in float64: Loshchilov and Hutter (arXiv 1711.05101), algorithm 2."""
    weight, first, second = weight.astype(np.float64), 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        unbiased = first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step)
        weight = weight - RATE * DECAY * weight
        weight = weight - RATE * unbiased[0] / (np.sqrt(unbiased[1]) + EPS)
    return weight


class Scorer(nn.Module):
    """A trunk and a head that stays float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 3)
        self.head = nn.Linear(3, 1, bias=False)
        self.register_buffer("bias", torch.tensor(0.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(rows.to(self.trunk.weight.dtype))
        return self.head(hidden.float()) + self.bias


class Training:
    """A scorer in training; with `is_rounded` its trunk is bf16."""

    def __init__(self, *, is_rounded: bool = True) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.free_memory()
        plain = Scorer()
        optimizer = torch.optim.AdamW(
            plain.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
        )
        self.model, self.optimizer = prepare(
            self.accelerator,
            plain,
            optimizer,
            Sharding(),
            bf16_weights=is_rounded,
            fp32_modules=[plain.head],
        )

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = (self.model(torch.randn(8, 4)) - 1).pow(2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def test_steps_are_adamws_on_float32_masters() -> None:
    training = Training()
    weight, head = training.model.trunk.weight, training.model.head.weight
    start, head_start = Scorer().trunk.weight.detach().numpy(), Scorer().head.weight.detach()
    assert weight.detach().float().numpy() == pytest.approx(to_bf16(start), abs=0)
    draw = np.random.default_rng(0)
    gradients = [to_bf16(draw.normal(size=start.shape)) for _ in range(5)]
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient).bfloat16()
        head.grad = torch.from_numpy(gradient[:1, :3]).clone()
        training.optimizer.step()
        training.optimizer.zero_grad()
        assert weight.grad is None
    expected = adamw(start, gradients)
    masters = float32_model(training.model, training.optimizer)
    assert masters.trunk.weight.dtype == torch.float32
    found = masters.trunk.weight.detach().numpy()
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert weight.dtype == torch.bfloat16
    assert weight.detach().float().numpy() == pytest.approx(to_bf16(found), abs=0)
    # the head is its own master
    assert masters.head.weight is head
    expected = adamw(head_start.numpy(), [one[:1, :3] for one in gradients])
    assert head.detach().numpy() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert masters.bias is training.model.bias


@pytest.mark.parametrize(("has_masters", "expected"), [(True, 0.98828125), (False, 1.0)])
def test_masters_keep_steps_that_bf16_would_round_away(has_masters: bool, expected: float) -> None:
    # below 1 bf16 numbers are 1/256 apart: ten steps of .001 lead to .99, for which .98828125 is
    # nearer than .9921875; each alone leads back to 1
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0, fused=True)
    stepper = MasterOptimizer(optimizer, model, []) if has_masters else optimizer
    if not has_masters:
        model.weight.data = model.weight.data.bfloat16()
    for _ in range(10):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        stepper.step()
    assert model.weight.item() == expected


def test_weights_that_are_one_have_one_master() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model[1].requires_grad_(True)
    frozen = model.register_parameter("frozen", nn.Parameter(torch.ones(1), requires_grad=False))
    assert frozen is None
    optimizer = torch.optim.AdamW([model[0].weight], fused=True)
    masters = MasterOptimizer(optimizer, model, []).masters
    assert masters[0].weight is masters[1].weight
    assert masters[0].weight is optimizer.param_groups[0]["params"][0]
    assert masters.frozen is model.frozen
    assert model.frozen.dtype == torch.float32


def test_learning_rates_are_set_where_loops_set_them() -> None:
    training = Training()
    before = float32_model(training.model, training.optimizer).trunk.weight.clone()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    training.steps(1)
    assert float32_model(training.model, training.optimizer).trunk.weight.equal(before)


def test_gradients_of_bf16_weights_are_clipped_by_their_float32_norm() -> None:
    training = Training()
    trunk, head = training.model.trunk, training.model.head
    trunk.weight.grad = torch.full((3, 4), 3.0, dtype=torch.bfloat16)
    trunk.bias.grad = torch.full((3,), 5.0, dtype=torch.bfloat16)
    head.weight.grad = torch.full((1, 3), 4.0)
    norm = (12 * 9 + 3 * 25 + 3 * 16) ** 0.5  # 15.198684: bf16 has 15.1875 and 15.25
    found = clip_gradients(training.accelerator, training.model, training.model.parameters(), 1.5)
    assert found == pytest.approx(norm, rel=1e-6)
    assert trunk.weight.grad.dtype == torch.bfloat16
    assert trunk.weight.grad.float() == pytest.approx(3 * 1.5 / norm, rel=2**-8)
    assert head.weight.grad == pytest.approx(4 * 1.5 / norm, rel=1e-5)


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    training = Training()
    training.steps(3)
    save_checkpoint(training.accelerator, tmp_path, 3, {}, keep=1)
    expected = training.steps(4)
    resumed = Training()
    assert load_checkpoint(resumed.accelerator, tmp_path) == {"step": 3}
    assert resumed.model.trunk.weight.dtype == torch.bfloat16
    assert resumed.steps(4) == expected
    ends = [float32_model(one.model, one.optimizer).state_dict() for one in (training, resumed)]
    assert all(ends[0][name].equal(ends[1][name]) for name in ends[0])


def test_a_checkpoint_is_that_of_a_float32_training(tmp_path: Path) -> None:
    training = Training()
    training.steps(3)
    save_checkpoint(training.accelerator, tmp_path, 3, {}, keep=1)
    masters = float32_model(training.model, training.optimizer).state_dict()
    plain = Training(is_rounded=False)
    load_checkpoint(plain.accelerator, tmp_path)
    assert all(plain.model.state_dict()[name].equal(masters[name]) for name in masters)
    moments = plain.optimizer.optimizer.state[plain.model.trunk.weight]
    assert moments["exp_avg"].dtype == torch.float32
    assert moments["exp_avg"].any()


def test_a_gathered_copy_is_rounded_but_for_what_is_exact() -> None:
    model = Scorer()
    copy = GatheredModel(
        model, torch.device("cpu"), is_copy=True, bf16_weights=True, fp32_modules=[model.head]
    ).module
    assert copy.trunk.weight.dtype == copy.trunk.bias.dtype == torch.bfloat16
    assert copy.head.weight.dtype == torch.float32


def test_deepspeed_would_round_the_head() -> None:
    model = Scorer()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="bf16-weights cannot be combined with --sharding zero2"):
        prepare(Accelerator(cpu=True), model, optimizer, Sharding("zero2"), bf16_weights=True)
