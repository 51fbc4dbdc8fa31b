"""Judgements to measure reward training with, and what training on them will cost.

Lines {"prompt", "responses", "pairs": [[i, j, "first" | "second" | "tie"], ...]}, or "tiers" for
pairs, become groups of token ids: one for each prompt, or, as trl has it, one for each pair.
"""

import gzip
import json
import random
from argparse import Namespace
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reward.data.groups import Group

Line = dict[str, Any]


def read_judgements(path: str | None, prompts: int) -> list[Line]:
    """Prompts with responses and [winner, loser] pairs."""
    if path is None:
        lines = random_judgements(prompts)
    else:
        opener = gzip.open if path.endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8") as stream:
            lines = [json.loads(line) for line, _ in zip(stream, range(prompts), strict=False)]
    for line in lines:
        if "pairs" in line:
            strict = [(i, j, won) for i, j, won in line["pairs"] if won != "tie"]
            line["pairs"] = [[i, j] if won == "first" else [j, i] for i, j, won in strict]
        else:
            line["pairs"] = [
                [i, j] for a, b in combinations(line["tiers"], 2) for i in a for j in b
            ]
    return [line for line in lines if line["pairs"]]


def random_judgements(prompts: int) -> list[Line]:
    """Four responses of about 100 tokens to prompts of about 700, all six pairs judged."""
    generator = random.Random(0)
    vocabulary = ["time", "people", "water", "house", "music", "light", "paper", "river", "green"]

    def text(low: int, high: int) -> str:
        return " ".join(generator.choices(vocabulary, k=generator.randint(low, high)))

    pairs = [[i, j, "first"] for i, j in combinations(range(4), 2)]
    return [
        {"prompt": text(600, 800), "responses": [text(40, 160) for _ in range(4)], "pairs": pairs}
        for _ in range(prompts)
    ]


def build_groups(lines: list[Line], arguments: Namespace, *, apart: bool) -> "list[Group]":
    """Groups of our trainer, texts cut as asked for; `apart` makes a group of a pair."""
    from reward.data.groups import Group, Pair
    from rlhf.modeling.tokens import encode_prompt, encode_response, load_tokenizer
    from rlhf.records.schema import Message, Prompt, Response

    tokenizer = load_tokenizer(arguments.model)
    longest = arguments.response_tokens
    groups = []
    for number, line in enumerate(lines):
        prompt_ids = tokenizer.encode(line["prompt"], add_special_tokens=False)
        prompt_text = tokenizer.decode(prompt_ids[: arguments.prompt_tokens])
        chat = (Message(role="user", content=prompt_text),)
        prompt = tuple(encode_prompt(tokenizer, Prompt.create(chat, "train", "")))
        responses = [Response(id="", prompt_id="", text=t, model="") for t in line["responses"]]
        answers = tuple(
            tuple(encode_response(tokenizer, response, "")[:longest]) for response in responses
        )
        pairs = [Pair(i, j, 1.0, 0, "benchmark") for i, j in line["pairs"]]
        if apart:
            only = (Pair(0, 1, 1.0, 0, "benchmark"),)
            groups += [
                Group(
                    f"{number}-{p.first}-{p.second}",
                    prompt,
                    (answers[p.first], answers[p.second]),
                    only,
                )
                for p in pairs
            ]
        else:
            groups.append(Group(str(number), prompt, answers, tuple(pairs)))
    return groups


def epoch_tokens(groups: "list[Group]", kind: str) -> int:
    """Tokens that an epoch over groups of whole prompts encodes, by kind of run; padding aside."""
    total = 0
    for group in groups:
        prompt, lengths = len(group.prompt), [len(response) for response in group.responses]
        if kind in ("trl", "pairs"):
            total += sum(2 * prompt + lengths[p.first] + lengths[p.second] for p in group.pairs)
        else:
            prompts = len(lengths) if kind == "groups" else 1
            total += prompts * prompt + sum(lengths)
    return total


def pairs_per_pass(groups: "list[Group]", tokens: int) -> int:
    """How many pairs have about as many tokens as one forward pass of ours may have."""
    pairs = sum(len(group.pairs) for group in groups)
    return max(1, round(tokens * pairs / epoch_tokens(groups, "trl")))
