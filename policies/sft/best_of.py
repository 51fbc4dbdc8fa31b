"""Best-of-n fine-tuning: the reference output of each prompt that has the highest reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from policies.reference.store import ReferenceRow, ReferenceStore, open_store
from policies.sft.demonstrations import Rows
from rlhf.errors import InputError
from rlhf.records.jsonl import JsonObject
from rlhf.records.ranked import SPLITS
from rlhf.run.rundir import require_done


@dataclass(frozen=True)
class Choice:
    """The best outputs as demonstrations, and how they were chosen.

    `counts` holds, of the training prompts: `prompts`, those with a `chosen` output, those with
    `no_choice` (left out: all their outputs have the same text or the same reward), those where
    several different outputs `tied` for the highest reward (the first of them was taken), and how
    many chosen outputs are `unfinished` (cut at the length limit). `samples` are the outputs per
    prompt, and `reward` is the mean of all outputs of these prompts and of the `chosen` ones.
    """

    rows: Rows
    counts: dict[str, int | dict[str, float]]


def open_best_of(folder: Path) -> ReferenceStore:
    """Open a finished store that has rewards and several outputs of a prompt.

    Raises:
        InputError: it has no rewards, or one output of each prompt; or it cannot be used.
    """
    store = open_store(require_done(folder, "reference", "outputs").outputs)
    if store.manifest["samples_per_prompt"] < 2:
        raise InputError(
            f"{folder} has one output of each prompt: there is no best to choose",
            f"Store several: rlhf reference --samples 4 --model {store.model} --reward RM …",
        )
    if store.manifest["reward"] is None:
        raise InputError(
            f"The outputs in {folder} have no rewards",
            f"Add them: rlhf reference --reward RM --out {folder}",
        )
    return store


def choose_best(store: ReferenceStore) -> Choice:
    """The best output of each prompt.

    Raises:
        InputError: no training prompt has outputs to choose among.
    """
    best = {split: [_best_of(rows) for rows in store.by_prompt(split)] for split in SPLITS}
    chosen = {split: [output for output in of_split if output] for split, of_split in best.items()}
    if not chosen["train"]:
        raise InputError(
            f"No training prompt of {store.folder} has outputs with different rewards",
            "Store more outputs (rlhf reference --samples 4), or score them with another --reward.",
        )
    train = chosen["train"]
    counts: dict[str, int | dict[str, float]] = {
        "samples": store.manifest["samples_per_prompt"],
        "prompts": len(best["train"]),
        "chosen": len(train),
        "no_choice": len(best["train"]) - len(train),
        "tied": sum(output.tied for output in train),
        "unfinished": sum(not output.row.finished for output in train),
        "reward": {
            "all": sum(output.mean for output in train) / len(train),
            "chosen": sum(_reward(output.row) for output in train) / len(train),
        },
    }
    rows: Rows = {
        split: [_as_row(output.row) for output in of_split] for split, of_split in chosen.items()
    }
    return Choice(rows, counts)


@dataclass(frozen=True)
class _Best:
    row: ReferenceRow
    tied: bool
    mean: float


def _best_of(rows: Sequence[ReferenceRow]) -> _Best | None:
    """The first row with the highest reward; None if all have the same reward or text."""
    rewards = [_reward(row) for row in rows]
    highest = max(rewards)
    if min(rewards) == highest or len({row.text for row in rows}) == 1:
        return None
    top = [row for row, reward in zip(rows, rewards, strict=True) if reward == highest]
    tied = len({row.text for row in top}) > 1
    return _Best(top[0], tied, sum(rewards) / len(rewards))


def _reward(row: ReferenceRow) -> float:
    assert row.reward is not None
    return row.reward


def _as_row(row: ReferenceRow) -> JsonObject:
    response = {"role": "assistant", "content": row.text}
    return {"prompt": row.prompt.chat, "completion": [response]}
