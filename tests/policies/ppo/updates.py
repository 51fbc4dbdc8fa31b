"""One update of a tiny policy: four episodes and three reference outputs, made by hand."""

from pathlib import Path

import torch

from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.rollout import Experience
from policies.ppo.setting_groups import KLSettings
from policies.ppo.train import update
from policies.ppo.update import Learner, StepData, reference_batch
from policies.reference.store import ReferenceRow
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.models import load_causal_lm, new_reward_model
from rlhf.modeling.tokens import pad_left, pad_right
from rlhf.parallel.distributed import start
from rlhf.records.schema import Message, Prompt
from tests.settings import changed, ppo_settings

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14], [15]]
RESPONSES = [[20, 21, 22, 2], [23, 2], [24, 25, 26], [27, 28, 29, 30, 31, 2]]
SETTINGS = ppo_settings(
    model="m",
    reward=("r",),
    reference=Path("ref"),
    out=Path("out"),
    learning_rate=1e-3,
    critic_learning_rate=1e-3,
    precision="fp32",
    kl=KLSettings(coefficient=0.3),
)


def build_model(folder: Path) -> PolicyAndCritic:
    """The tiny model as policy, and as critic with a random head and a bias of 0.25."""
    return PolicyAndCritic(
        load_causal_lm(str(folder)), new_reward_model(str(folder), 0, seed=1), value_bias=0.25
    )


def build_experience() -> Experience:
    """RESPONSES to PROMPTS, with random advantages and returns."""
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    mask = sequences.responses.mask
    generator = torch.Generator().manual_seed(3)

    def noise(scale: float, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(mask.shape, generator=generator) * scale + shift) * mask

    return Experience(
        sequences=sequences,
        loss_mask=mask,
        old_log_probs=noise(0.05, -5.9),
        old_values=noise(0.3),
        advantages=noise(1.0),
        returns=noise(1.0),
    )


def build_rows(shift: float = 0.0) -> list[ReferenceRow]:
    """Other answers to three of the prompts; `shift` moves their stored log-probs."""
    prompt = Prompt.create((Message(role="user", content="x"),), "train", "test")
    return [
        ReferenceRow(
            prompt=prompt,
            sample_index=0,
            prompt_ids=prompt_ids,
            response_ids=ids,
            text="",
            finished=True,
            reused=False,
            log_probs=[-5.5 + shift] * len(ids),
            log_probs_at_1=[-5.5] * len(ids),
            entropy=[1.0] * len(ids),
        )
        for prompt_ids, ids in zip(PROMPTS[:3], [[40, 2], [41, 42, 43, 44, 2], [45]], strict=True)
    ]


def weights_after_update(
    folder: Path, rows: list[ReferenceRow], **changes: object
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The weights and the statistics after an update, with some settings changed."""
    settings = changed(SETTINGS, **changes)
    accelerator = start("fp32", 0)
    # plain gradient descent: Adam would turn rounding of tiny gradients into whole steps
    plain = build_model(folder)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    data = StepData(build_experience(), reference_batch(rows, 0, accelerator.device))
    learner = Learner(accelerator, model, optimizer, settings, 1.0, settings.kl.coefficient)
    statistics = update(learner, data, torch.Generator().manual_seed(0))
    return {k: v.clone() for k, v in plain.state_dict().items()}, statistics
