"""The judged pairs of ETHICS, and prompts and rankings made of them.

The labels are the utilitarianism part of ETHICS (Hendrycks et al., arXiv 2008.02275): which of two
things that happened is the more pleasant for the person who tells it.
"""

import gzip
import json
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import networkx
import numpy as np
from datasets import load_dataset

from examples.evidence.commands import Config
from rlhf.errors import InputError
from rlhf.records.schema import Message, Prompt, RankedPrompt, Ranking, Response

SPLITS = ("A", "B", "heldout")
PARQUET = "refs/convert/parquet"  # where the hub keeps every dataset converted to Parquet
KINDS = ("chosen", "rejected")
TRAIN = "utilitarianism/train/*.parquet"


def read_pairs(data: str) -> dict[str, list[Config]]:
    """Judged pairs by split: `prefix`, what both texts share, `chosen` and `rejected`.

    Args:
        data: a gzipped JSON Lines file, or a dataset on the hub.

    Raises:
        InputError: there is no such file or dataset.
    """
    path = Path(data)
    if path.is_file():
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            rows = [json.loads(line) for line in stream]
    elif path.suffix:
        raise InputError(f"No such data: {path}", "Give a file or a dataset of the hub as `data`.")
    else:
        rows = with_splits(read_hub(data))
    return {name: [row for row in rows if row["split"] == name] for name in SPLITS}


def read_hub(name: str) -> list[Config]:
    """The pairs of a dataset with the columns `baseline`, the more pleasant, and `less_pleasant`.

    Reads the Parquet files that the hub makes of every dataset, as `hendrycks/ethics` itself is a
    script, which `datasets` no longer runs. `name` may also be a folder with these files.

    Raises:
        InputError: the dataset cannot be read.
    """
    files = {"train": TRAIN}
    try:
        lines = load_dataset(name, data_files=files, split="train", revision=PARQUET)
    except OSError as error:
        raise InputError(
            f"The dataset {name} cannot be read: {error}",
            f"Give `data` a file, or a folder that holds {TRAIN}.",
        ) from error
    rows = []
    for line in lines:
        chosen, rejected = (" ".join(line[key].split()) for key in ("baseline", "less_pleasant"))
        prefix = shared_words(chosen, rejected)
        rows.append({"prefix": prefix, "chosen": chosen, "rejected": rejected})
    return rows


def with_splits(pairs: list[Config]) -> list[Config]:
    """Give each pair a split, so that no first sentence is in two of them.

    Pairs with a common first sentence, also through other pairs, form a group. About 45 % of the
    groups are A, 45 % B and 10 % held out, by the hash of the first of their sentences.
    """
    edges = [tuple(first_sentence(pair[kind]).lower() for kind in KINDS) for pair in pairs]
    split_of = {}
    for group in networkx.connected_components(networkx.Graph(edges)):
        bucket = int(sha256(min(group).encode()).hexdigest(), 16) % 100
        split = "A" if bucket < 45 else "B" if bucket < 90 else "heldout"
        split_of.update(dict.fromkeys(group, split))
    return [
        {**pair, "split": split_of[first]} for pair, (first, _) in zip(pairs, edges, strict=True)
    ]


def shared_words(first: str, second: str) -> str:
    """The words with which both texts begin."""
    both = zip(first.split(), second.split(), strict=False)
    alike = [first_word == second_word for first_word, second_word in both]
    length = alike.index(False) if False in alike else len(alike)
    return " ".join(first.split()[:length])


def first_sentence(text: str) -> str:
    """A text up to the end of its first sentence."""
    return re.split(r"(?<=[.!?])\s", text.strip(), maxsplit=1)[0]


def first_sentences(pairs: Iterable[Config]) -> list[str]:
    """The first sentences of texts that go on after it; sorted, each once."""
    texts = {pair[kind] for pair in pairs for kind in KINDS}
    sentences = {first_sentence(text) for text in texts if text != first_sentence(text)}
    return sorted(
        sentence for sentence in sentences if sentence.endswith(".") and len(sentence.split()) >= 4
    )


def ask(config: Config, beginning: str) -> tuple[Message, ...]:
    """The conversation that asks for a story: worked turns, then the first sentence of this one."""
    messages = []
    for start, story in config["turns"]:
        messages.append(Message(role="user", content=config["question"].format(start)))
        messages.append(Message(role="assistant", content=story))
    return (*messages, Message(role="user", content=config["question"].format(beginning)))


def as_records(config: Config, pairs: Iterable[Config], split: str) -> list[RankedPrompt]:
    """Judged pairs as records: one prompt for all texts with one prefix, a ranking a pair."""
    by_prefix: dict[str, list[Config]] = {}
    for pair in pairs:
        by_prefix.setdefault(pair["prefix"], []).append(pair)
    records = []
    for prefix, judged in by_prefix.items():
        prompt = Prompt.create(ask(config, prefix), split, "ethics")
        texts = dict.fromkeys(pair[kind] for pair in judged for kind in KINDS)
        responses = {
            text: Response(id=f"{prompt.id}-{n}", prompt_id=prompt.id, text=text, model="people")
            for n, text in enumerate(texts)
        }
        rankings = tuple(
            Ranking(
                id=f"{prompt.id}-ranking-{n}",
                prompt_id=prompt.id,
                annotator="people",
                kind="human",
                tiers=((responses[pair["chosen"]].id,), (responses[pair["rejected"]].id,)),
            )
            for n, pair in enumerate(judged)
        )
        answers = tuple(responses.values())
        records.append(RankedPrompt(prompt=prompt, responses=answers, rankings=rankings))
    return records


def is_bare(pair: Config) -> bool:
    """Whether one of the two texts says no more than what both share."""
    return pair["prefix"] in (pair["chosen"], pair["rejected"])


def draw_test(
    config: Config, pairs: Iterable[Config], pool: Iterable[Config]
) -> list[RankedPrompt]:
    """`test` of the held-out pairs, no bare ones, whose prefix no pair of the pool has."""
    known = {pair["prefix"] for pair in pool}
    unseen = [pair for pair in pairs if not is_bare(pair) and pair["prefix"] not in known]
    drawn = np.random.default_rng(0).permutation(len(unseen))[: config["test"]]
    return as_records(config, (unseen[index] for index in drawn), "test")
