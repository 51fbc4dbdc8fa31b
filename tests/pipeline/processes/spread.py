"""A program for one or more processes: reward steps and PPO updates under several shardings.

python -m tests.pipeline.processes.spread MODEL OUT STRATEGY… : the main process writes OUT as JSON.
A first word of bf16 or bf16-weights is the precision, else float32. fsdp:2 is FSDP in groups of
two; fsdp+bf16 adds up gradients in bf16. STRATEGY@CHECKPOINTS only takes the last step of another
program's checkpoints.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policies.ppo.batches import stack_chunks
from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.rollout import Experience, compute_advantages
from policies.ppo.setting_groups import KLSettings
from policies.ppo.train import update
from policies.ppo.update import Learner, StepData, reference_batch
from policies.reference.store import ReferenceRow
from policies.sampling.generate import GenerateSampler, sample_responses
from reward.data.groups import Group, Pair, Pointwise
from reward.data.thresholds import OTHERS, Thresholds
from reward.losses import Objective
from reward.model.module import RewardModule
from reward.scoring.scorer import load_scorer
from reward.training.step import TrainState, fit_thresholds, take_step
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.models import load_causal_lm, new_reward_model
from rlhf.modeling.tokens import load_tokenizer, pad_left, pad_right
from rlhf.parallel.distributed import start
from rlhf.parallel.gathered_model import GatheredModel
from rlhf.parallel.master_weights import float32_model
from rlhf.parallel.settings import ClusterSettings, TrainingParallelSettings
from rlhf.parallel.sharding import Sharding, prepare
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.records.schema import Message, Prompt, Sampling
from rlhf.run.checkpoint import load_checkpoint, save_checkpoint
from tests.pipeline.processes.state import full_state
from tests.reward.conftest import stored
from tests.settings import changed, ppo_settings

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14], [15]]
WEIGHTS = [1.0, 0.1, 0.5, 2.0]  # of the prompts' annotators
RESPONSES = [[20, 21, 22, 2], [23, 2], [24, 25, 26], [27, 28, 29, 30, 31, 2]]
SETTINGS = ppo_settings(
    model="m",
    reward=("r",),
    reference=Path("reference"),
    out=Path("out"),
    micro_batch_size=1,
    max_grad_norm=0.01,  # so that clipping counts, of policy and critic each
    max_approx_kl=1e9,
    kl=KLSettings(coefficient=0.3),
)
STEPS = 4
# of two processes the first has sequences of 5 and 7 tokens, twice, the second four of 7: a first
# batch by length alone would have an episode and a stored row here, and two episodes there
MIXING = 14
RATE = 1e-3


def build_experience(rows: list[int]) -> Experience:
    """Made-up experience; `rows` of it are this process's."""
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    mask = sequences.responses.mask
    generator = torch.Generator().manual_seed(3)

    def noise(scale: float, shift: float = 0.0) -> torch.Tensor:
        return ((torch.randn(mask.shape, generator=generator) * scale + shift) * mask)[rows]

    return Experience(
        sequences.rows(torch.tensor(rows)),
        mask[rows],
        old_log_probs=noise(0.05, -5.9),
        old_values=noise(0.3),
        advantages=noise(1.0),
        returns=noise(1.0),
    )


def build_row(number: int) -> ReferenceRow:
    prompt = Prompt.create((Message(role="user", content=f"p{number}"),), "train", "test")
    ids = RESPONSES[number]
    return ReferenceRow(
        prompt=prompt,
        sample_index=0,
        prompt_ids=PROMPTS[number],
        response_ids=ids,
        text="",
        finished=True,
        reused=False,
        log_probs=[-5.5] * len(ids),
        log_probs_at_1=[-5.5] * len(ids),
        entropy=[1.0] * len(ids),
        reward=0.0,
    )


class Collectives(TorchDispatchMode):
    """Counts the operations that speak to other processes, and the bytes of their whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.sizes: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, inputs=(), named=None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.count += 1
            tensors = [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
            self.sizes[function.__name__] += max((one.nbytes for one in tensors), default=0)
        return function(*inputs, **(named or {}))


def read_sharding(words: Any) -> Sharding:
    rest, _, reduce_dtype = words.partition("+")
    strategy, _, group = rest.partition(":")
    parallel = TrainingParallelSettings(
        shard_group=int(group) if group else None, reduce_dtype=reduce_dtype or "fp32"
    )
    return choose_sharding(ClusterSettings(sharding=strategy, parallel=parallel))


class PPO:
    """Policy and critic, prepared, and their share of the experience."""

    def __init__(
        self, accelerator: Accelerator, folder: str, strategy: Any, *, is_rounded: bool = False
    ) -> None:
        accelerator.free_memory()
        self.accelerator = accelerator
        sharding = read_sharding(strategy)
        held = sharding.held(trained=True)
        critic = new_reward_model(folder, 0, seed=1, held=held)
        policy = load_causal_lm(folder, held=held)
        plain = PolicyAndCritic(policy, critic, value_bias=0.25)
        groups = [{"params": part.parameters(), "lr": RATE} for part in (plain.policy, critic)]
        optimizer = torch.optim.AdamW(groups, eps=1e-5, weight_decay=0.0, fused=True)
        precision = {"bf16_weights": is_rounded, "fp32_modules": plain.fp32_modules}
        self.model_copy = GatheredModel(
            plain, accelerator.device, is_copy=sharding.shards_weights, **precision
        )
        self.model, self.optimizer = prepare(accelerator, plain, optimizer, sharding, **precision)
        rows = list(range(accelerator.process_index, len(PROMPTS), accelerator.num_processes))
        self.experience = build_experience(rows)
        self.references = reference_batch([build_row(row) for row in rows], 0, accelerator.device)

    def step(self, number: int) -> dict[str, float]:
        learner = Learner(
            self.accelerator, self.model, self.optimizer, SETTINGS, 1.0, SETTINGS.kl.coefficient
        )
        data = StepData(self.experience, self.references)
        return update(learner, data, torch.Generator().manual_seed(number))

    def step_with_texts(self, number: int) -> dict[str, float]:
        """A step whose micro-batches have a token budget, with pretraining texts in it.

        Responses without an end token are masked, and another program sampled the others.
        """
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        mask, ids = self.experience.response_mask, self.experience.sequences.responses.ids
        experience = replace(
            self.experience,
            loss_mask=mask & (ids == 2).any(dim=1, keepdim=True),
            sampler_weights=0.5 + 0.1 * (ids % 7),
        )
        texts = stack_chunks(RESPONSES[rank::ranks], 0, self.accelerator.device)
        settings = changed(SETTINGS, micro_tokens=MIXING, ptx_coefficient=0.5)
        learner = Learner(
            self.accelerator, self.model, self.optimizer, settings, 1.0, settings.kl.coefficient
        )
        data = StepData(experience, self.references, texts)
        return update(learner, data, torch.Generator().manual_seed(number))

    def gathers(self, folder: str, new_tokens: int) -> tuple[int, int]:
        """Communication of one sampling phase, and how often the shell was filled."""
        sampling = Sampling(temperature=1.0, max_new_tokens=new_tokens, seed=0)
        sampler, tokenizer = GenerateSampler(self.accelerator), load_tokenizer(folder)
        with Collectives() as counter, self.model_copy.weights_of(self.model) as plain:
            for part in (PROMPTS[:2], PROMPTS[2:]):
                with self.model_copy.weights_of(self.model):
                    sample_responses(sampler, plain.policy, tokenizer, part, sampling, 1)
        return counter.count, self.model_copy.fills


def scores(accelerator: Accelerator, folder: str, strategy: str) -> list[float]:
    """What a frozen reward model says of all responses; the processes have unlike numbers."""
    sharding = read_sharding(strategy)
    scorer = load_scorer(folder, accelerator, sharding=sharding)
    values = scorer._members[0][0].parameters()
    assert any(isinstance(one, DTensor) for one in values) == sharding.shards_weights
    rows = range(len(PROMPTS) if accelerator.is_main_process else 1)
    batch = pad_right([PROMPTS[row] + RESPONSES[row] for row in rows], 0)
    found = scorer(batch, tokens_per_batch=1)  # a pass for each response
    return list(found.tolist())


def advantages(accelerator: Accelerator) -> list[list[float]]:
    """Of made-up rewards, which are the higher the later the row; rows of all processes in turn."""
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    mask = sequences.responses.mask
    rewards = torch.arange(len(PROMPTS))[:, None] * mask.float()
    mine = list(range(accelerator.process_index, len(PROMPTS), accelerator.num_processes))
    found, _ = compute_advantages(
        accelerator, rewards[mine], 0 * rewards[mine], mask[mine], SETTINGS
    )
    rows = [(row, one[mask[row]].tolist()) for row, one in zip(mine, found, strict=True)]
    return [values for _, values in sorted(gather_object(rows))]


def norms(run: PPO) -> float:
    state = full_state(run.accelerator, float32_model(run.model, run.optimizer))
    return sum(float(value.double().abs().sum()) for value in state.values())


def ppo(
    accelerator: Accelerator,
    folder: str,
    strategy: str,
    checkpoints: Path,
    *,
    is_rounded: bool = False,
) -> dict[str, Any]:
    run = PPO(accelerator, folder, strategy, is_rounded=is_rounded)
    with Collectives() as traffic:
        rows = [run.step(0)]
    rows += [run.step(number) for number in range(1, STEPS - 1)]
    save_checkpoint(accelerator, checkpoints, STEPS - 1, {"facts": 1}, keep=1)
    rows.append(run.step(STEPS - 1))
    after = norms(run)
    resumed = PPO(accelerator, folder, strategy, is_rounded=is_rounded)
    progress = load_checkpoint(accelerator, checkpoints)
    again = resumed.step(STEPS - 1)
    with_texts = resumed.step_with_texts(STEPS)
    short, fills = resumed.gathers(folder, 2)
    long, _ = resumed.gathers(folder, 9)
    local = sum(
        getattr(value, "ds_tensor", getattr(value, "_local_tensor", value)).numel()
        for value in resumed.model.parameters()
    )
    return {
        "rows": rows,
        "norms": after,
        "progress": progress,
        "resumed": again == rows[-1],
        "with_texts": with_texts,
        "gathers": [short, long, fills],
        "held": local,
        "traffic": dict(traffic.sizes),
    }


def reward(
    accelerator: Accelerator, folder: str, strategy: Any, *, is_rounded: bool = False
) -> dict[str, Any]:
    accelerator.free_memory()
    sharding = read_sharding(strategy)
    held = sharding.held(trained=True)
    module = RewardModule(new_reward_model(folder, 0, seed=1, held=held))
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, eps=1e-5, fused=True)
    precision = {"bf16_weights": is_rounded, "fp32_modules": module.fp32_modules}
    model, stepper = prepare(accelerator, module, optimizer, sharding, **precision)
    state = TrainState(accelerator, model, stepper, 0, 16, Objective(), shared=False)
    responses = (tuple(RESPONSES[0]), tuple(RESPONSES[1]))
    groups = [
        Group(str(number), tuple(prompt), responses, (Pair(0, 1, 1.0, 1, "a", weight),))
        for number, (prompt, weight) in enumerate(zip(PROMPTS, WEIGHTS, strict=True))
    ]
    # of two processes one has no thumbs
    thumbs = (Pointwise(0, True, "b", "thumbs"), Pointwise(1, False, "b", "thumbs", 0.5))
    groups[-1] = replace(groups[-1], pairs=(), pointwise=thumbs)
    state = replace(state, thresholds=Thresholds(stored(groups)))
    fit_thresholds(state, stored(groups))
    rows = [
        take_step(state, groups, RATE) | {"b": state.thresholds.state()[OTHERS][0]}
        for _ in range(STEPS)
    ]
    return {"rows": rows}


def main(folder: str, out: Path, strategies: list[str]) -> None:
    precision = strategies[0] if strategies[0].startswith("bf16") else "fp32"
    strategies = strategies[precision != "fp32" :]
    is_rounded = precision == "bf16-weights"
    accelerator = start(precision, 0)
    judge = str(out.with_suffix(".judge"))
    if accelerator.is_main_process:
        new_reward_model(folder, 0, seed=5).save_pretrained(judge)
        load_tokenizer(folder).save_pretrained(judge)
    accelerator.wait_for_everyone()
    found: dict[str, Any] = {"advantages": advantages(accelerator)}
    for name in strategies:
        strategy, _, checkpoints = name.partition("@")
        if checkpoints:
            run = PPO(accelerator, folder, strategy, is_rounded=is_rounded)
            load_checkpoint(accelerator, Path(checkpoints))
            found[name] = {"row": run.step(STEPS - 1), "norms": norms(run)}
            continue
        found[name] = {
            "ppo": ppo(
                accelerator,
                folder,
                strategy,
                out.with_suffix(f".{strategy}"),
                is_rounded=is_rounded,
            ),
            "reward": reward(accelerator, folder, strategy, is_rounded=is_rounded),
            "trained_head": reward(accelerator, judge, strategy, is_rounded=is_rounded),
            "scores": scores(accelerator, judge, strategy),
        }
    if accelerator.is_main_process:
        out.write_text(json.dumps(found), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
