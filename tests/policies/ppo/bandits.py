"""A bandit: one prompt, eight tokens to answer with, and a reference that is a table."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers import PreTrainedTokenizerFast as FastTokenizer

from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.rollout import (
    Episodes,
    Experience,
    RolloutContext,
    Scores,
    TokenStats,
    build_experience,
    measure_episodes,
    sample_episodes,
    score_episodes,
)
from policies.ppo.setting_groups import KLSettings
from policies.ppo.settings import PPOSettings
from policies.reference.store import ReferenceRow, TopTokens
from rlhf.records.schema import Message, Prompt
from tests.settings import ppo_settings

PAD, EOS = 0, 1
WORDS = {"<pad>": PAD, "<eos>": EOS, **{letter: 2 + i for i, letter in enumerate("abcdef")}}
COUNTS = np.array([2, 4, 24, 12, 8, 8, 4, 2])  # of each token in the store
REFERENCE = COUNTS / COUNTS.sum()
KEPT = np.arange(1, len(REFERENCE))  # the bucket of the others holds one token: it is exact
PROMPT = Prompt.create((Message(role="user", content="x"),), "train", "test")
SETTINGS = ppo_settings(
    model="m",
    reward=("r",),
    reference=Path("ref"),
    out=Path("out"),
    episodes_per_step=256,
    samples_per_prompt=256,
    micro_batch_size=256,
    sample_batch_size=256,
    advantages="rloo",
    reward_shaping="none",
    missing_eos_penalty=0.0,
    max_approx_kl=math.inf,
    kl=KLSettings(source="none"),
)


def build_models(vocabulary: dict[str, int]) -> tuple[PolicyAndCritic, FastTokenizer]:
    """A random policy and critic of one layer, and their tokenizer."""
    torch.manual_seed(0)
    tokenizer = FastTokenizer(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")),
        eos_token="<eos>",
        pad_token="<pad>",
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        num_labels=1,
    )
    critic = LlamaForSequenceClassification(config)
    return PolicyAndCritic(LlamaForCausalLM(config), critic, 0.0).eval(), tokenizer


def stored_rows() -> list[ReferenceRow]:
    """The reference's answers, in exactly the proportions of its probabilities."""
    return [
        ReferenceRow(
            prompt=PROMPT,
            sample_index=0,
            prompt_ids=[2, 3],
            response_ids=[token],
            text="",
            finished=token == EOS,
            reused=False,
            log_probs=[math.log(REFERENCE[token])],
            log_probs_at_1=[math.log(REFERENCE[token])],
            entropy=[1.0],
            top=TopTokens(KEPT[None], np.log(REFERENCE[KEPT], dtype=np.float32)[None], np.zeros(1)),
        )
        for token, count in enumerate(COUNTS)
        for _ in range(count)
    ]


def collect(
    context: RolloutContext,
    model: Any,
    prompts: Sequence[tuple[ReferenceRow, ...]],
    settings: PPOSettings,
) -> tuple[Episodes, Scores, TokenStats, Experience]:
    """A rollout and what is learned from it, as a step of the loop gets them."""
    episodes = sample_episodes(context, model.policy, prompts, settings.sampling.batch_size)
    scores = score_episodes(context, episodes)
    measured = measure_episodes(context, model, episodes, settings)
    experience = build_experience(
        context, episodes, scores, measured, settings, settings.kl.coefficient
    )
    return episodes, scores, measured, experience
