"""Rewards of responses given as text, from a reward model, a Python function or an HTTP endpoint.

A reward model does not read text inside think tags unless it was trained to; functions and
endpoints get the whole response.

An endpoint gets POST {"items": [{"messages": [...], "response": "..."}, ...]} and answers
{"rewards": [number, ...]}, one for each item.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any
from urllib.request import Request

import torch
from accelerate import Accelerator
from torch import Tensor

from reward.data.batches import lay_out, split_packed, split_padded
from reward.data.groups import Group
from reward.scoring.scorer import combine_members, load_module, member_folders
from reward.settings import Combine
from rlhf.endpoints.retries import ask_with_retries
from rlhf.endpoints.signals import load_signal
from rlhf.endpoints.urls import open_url, read_answer
from rlhf.errors import InputError
from rlhf.modeling.attention.shared_prefix import share_prompts
from rlhf.modeling.models import context_length
from rlhf.modeling.readers import load_reader
from rlhf.modeling.tokens import encode_prompt, tokenizer_fingerprint
from rlhf.records.schema import Prompt, Response
from rlhf.run.metrics import progress

PromptResponses = tuple[Prompt, tuple[Response, ...]]
TextReward = Callable[[Sequence[PromptResponses]], list[list[float]]]
# For every prompt: the features (K, d) of its responses and their rewards (K), on the CPU.
Features = Callable[[Sequence[PromptResponses]], list[tuple[Tensor, Tensor]]]

SIGNAL = "signal:"
ITEMS_PER_REQUEST = 64
TIMEOUT_SECONDS = 60
MAX_QUOTED = 200


def load_text_reward(
    name: str,
    accelerator: Accelerator,
    tokens_per_batch: int,
    combine: Combine = "mean",
    *,
    given: dict[str, Any] | None = None,
) -> TextReward:
    """A function that scores every response to each of several prompts.

    Args:
        name: a reward model, `signal:package.module:function`, or an http(s):// address.
        accelerator: device and precision of a reward model.
        tokens_per_batch: tokens in one forward pass of a reward model.
        combine: how the rewards of an ensemble are combined.
        given: --chat-template-kwargs of a reward model.

    Raises:
        InputError: there is no such model, or the function cannot be imported.
    """
    if name.startswith(SIGNAL):
        score = _by_signal(name)
    elif name.startswith(("http://", "https://")):
        score = _by_endpoint(name)
    else:
        folders = member_folders(name)
        members = [
            load_features(folder, accelerator, tokens_per_batch, given) for folder in folders
        ]
        score = _by_model(members, combine)

    def checked(items: Sequence[PromptResponses]) -> list[list[float]]:
        rewards = score(items)
        rows = zip(items, rewards, strict=True)
        require_numbers(name, [(prompt, value) for (prompt, _), row in rows for value in row])
        return rewards

    return checked


def require_numbers(name: str, rewards: Sequence[tuple[Prompt, float]]) -> None:
    """Refuse rewards that are not finite.

    Args:
        name: of the reward, for errors.
        rewards: each with its prompt.

    Raises:
        InputError: one is infinite or not a number.
    """
    bad = [prompt.text for prompt, value in rewards if not math.isfinite(value)]
    if bad:
        raise InputError(
            f"{name} gave {len(bad)} of {len(rewards)} responses a reward that is not a number, "
            f"the first of them to {bad[0][:60]!r}",
            "It must give every response a finite number: fix it, or train it again.",
        )


def _by_signal(name: str) -> TextReward:
    signal = load_signal(name.removeprefix(SIGNAL))

    def score(items: Sequence[PromptResponses]) -> list[list[float]]:
        return [
            [float(signal(prompt.text, response.text)) for response in responses]
            for prompt, responses in items
        ]

    return score


def _by_endpoint(address: str) -> TextReward:
    def score(items: Sequence[PromptResponses]) -> list[list[float]]:
        requested = [
            {"messages": prompt.chat, "response": response.text}
            for prompt, responses in items
            for response in responses
        ]
        rewards: list[float] = []
        for start in range(0, len(requested), ITEMS_PER_REQUEST):
            rewards += _post(address, requested[start : start + ITEMS_PER_REQUEST])
        return _rows(rewards, items)

    return score


def _post(address: str, items: Sequence[dict[str, Any]]) -> list[float]:
    body = json.dumps({"items": items}).encode()
    request = Request(address, body, {"Content-Type": "application/json"})

    def post() -> bytes:
        with open_url(request, timeout_seconds=TIMEOUT_SECONDS) as answer:
            return read_answer(answer)

    content = ask_with_retries(
        post,
        address,
        when_refused="Check the address of the reward.",
        when_absent="Check the address, and that the server runs; then give the same command "
        "again, with --resume where its --out has begun.",
    )
    try:
        rewards = _read_rewards(content)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise InputError(
            f"{address} answered something else than rewards "
            f"({type(error).__name__}: {str(error)[:MAX_QUOTED]})",
            'It must answer {"rewards": [number, ...]}.',
        ) from None
    if len(rewards) != len(items):
        raise InputError(
            f"{address} answered {len(rewards)} rewards for {len(items)} items",
            "It must answer one reward for each item, in their order.",
        )
    return rewards


def _read_rewards(content: bytes) -> list[float]:
    """The rewards in an answer, which must be JSON numbers, not text."""
    values = json.loads(content)["rewards"]
    if not isinstance(values, list):
        raise TypeError(f"rewards is a {type(values).__name__}, not a list")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{value!r} is not a number")
    return [float(value) for value in values]


def _by_model(members: Sequence[Features], combine: Combine) -> TextReward:
    def score(items: Sequence[PromptResponses]) -> list[list[float]]:
        by_prompt = zip(*(read(items) for read in members), strict=True)
        return [
            combine_members(torch.stack([rewards for _, rewards in readings]), combine).tolist()
            for readings in by_prompt
        ]

    return score


def load_features(
    name: str,
    accelerator: Accelerator,
    tokens_per_batch: int,
    given: dict[str, Any] | None = None,
) -> Features:
    """A function that returns, for every response, the input of the head and the reward.

    Args:
        name: a reward model; of an ensemble the first member.
        accelerator: device and precision.
        tokens_per_batch: tokens in one forward pass.
        given: --chat-template-kwargs.

    Raises:
        InputError: there is no such model.
    """
    module, bias, description = load_module(name, accelerator, given=given)
    reader = load_reader(description)
    tokenizer = reader.tokenizer
    fingerprint = tokenizer_fingerprint(tokenizer)
    shared = share_prompts(module.classifier) is None
    pad_id = int(tokenizer.pad_token_id)
    longest = context_length(module.classifier.config)

    def group(name: str, prompt: Prompt, responses: Sequence[Response]) -> Group:
        ids = encode_prompt(tokenizer, prompt)
        read = (reader.encode(response, fingerprint, ids) for response in responses)
        return Group(name, tuple(ids), tuple(map(tuple, read)))

    def read(items: Sequence[PromptResponses]) -> list[tuple[Tensor, Tensor]]:
        groups = [
            group(str(number), prompt, responses)
            for number, (prompt, responses) in enumerate(items)
            if responses
        ]
        _refuse_too_long(groups, longest, name)
        outputs: dict[str, tuple[Tensor, Tensor]] = {}
        parts = (split_packed if shared else split_padded)(groups, tokens_per_batch)
        with progress("scoring", len(parts)) as bar, torch.no_grad(), accelerator.autocast():
            for part in parts:
                inputs = lay_out(part, pad_id, shared=shared).to(accelerator.device)
                features = module.features(inputs)
                rewards = module.rewards(features) + bias
                sizes = [len(group.responses) for group in part]
                parted = zip(
                    features.float().cpu().split(sizes), rewards.cpu().split(sizes), strict=True
                )
                outputs.update(zip((group.prompt_id for group in part), parted, strict=True))
                bar.advance()
        nothing = (torch.zeros(0, 0), torch.zeros(0))
        return [outputs.get(str(number), nothing) for number in range(len(items))]

    return read


def _refuse_too_long(groups: Sequence[Group], longest: int | None, name: str) -> None:
    too_long = [group.longest for group in groups if longest and group.longest > longest]
    if too_long:
        raise InputError(
            f"{len(too_long)} prompts with their responses are longer than the {longest} tokens "
            f"that {name} reads (up to {max(too_long)})",
            "Shorten them, or leave them out.",
        )


def _rows(values: list[float], items: Sequence[PromptResponses]) -> list[list[float]]:
    """Split a flat list into one list for each prompt."""
    rows = []
    for _, responses in items:
        rows.append(values[: len(responses)])
        values = values[len(responses) :]
    return rows
