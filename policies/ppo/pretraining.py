"""Pretraining gradients: ordinary text keeps a policy able to do what no reward asks for.

PPO-ptx (arXiv 2203.02155, section 3.5) adds γ E[log π(x)] over pretraining text x to its objective;
γ was 27.8, beside a KL penalty of 0.02. Here the loss grows by γ times the mean of −log π over the
tokens of all processes, at temperature 1, in the same optimizer step as the clip loss. A piece is
at most so many tokens of one text; texts are not joined.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from policies.ppo.settings import PPOSettings
from rlhf.errors import InputError
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.tokens import pad_left, pad_right
from rlhf.records.fingerprints import file_hash
from rlhf.records.jsonl import BadLineError, parse_line, read_lines

PLAIN_TEXT = (".txt", ".txt.gz")


def describe_texts(path: Path | None) -> dict[str, dict[str, str]]:
    """The file of texts as a stage's input; nothing where there is none.

    Raises:
        InputError: there is no such file.
    """
    if path is None:
        return {}
    if not path.is_file():
        raise InputError(
            f"No such file: {path}",
            'Give --ptx.data lines such as {"text": "…"}, or a .txt file with a text on each line.',
        )
    return {"ptx": {"path": str(path), "hash": file_hash(path)}}


def read_pieces(
    path: Path, tokenizer: PreTrainedTokenizerBase, length: int, limit: int
) -> list[list[int]]:
    """Token ids of pieces of 2 to `length` tokens, in the order of the file.

    Args:
        path: JSON Lines with `text`, or a .txt file with a text on each line.
        tokenizer: the policy's.
        length: most tokens of a piece.
        limit: how many pieces are wanted; what comes after them is not read.

    Raises:
        InputError: there is no text, or a line cannot be read.
    """
    pieces: list[list[int]] = []
    for text in _texts(path):
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        parts = [ids[first : first + length] for first in range(0, len(ids), length)]
        pieces += [part for part in parts if len(part) > 1]  # the first token is only read
        if len(pieces) >= limit:
            break
    if not pieces:
        raise InputError(f"{path} holds no text", "Give --ptx.data a file with texts to keep.")
    return pieces[:limit]


def _texts(path: Path) -> Iterator[str]:
    for place, line in read_lines(path):
        if path.name.endswith(PLAIN_TEXT):
            yield line.strip()
            continue
        text = parse_line(line, place).get("text")
        if not isinstance(text, str):
            raise BadLineError(
                f"{place}: no text (expected a string under `text`)",
                'Write lines such as {"text": "…"}, or give a .txt file.',
            )
        yield text


def pieces_per_step(settings: PPOSettings, processes: int) -> int:
    """Pieces of text of one process in one step; every minibatch has one at least."""
    wanted = round(settings.batch.episodes_per_step * settings.ptx.per_episode / processes)
    return max(settings.optim.minibatches, wanted)


def stack_pieces(pieces: Sequence[list[int]], pad_id: int, device: torch.device) -> Sequences:
    """Pieces as sequences whose prompt is their first token."""
    prompts = pad_left([ids[:1] for ids in pieces], pad_id)
    return Sequences(prompts, pad_right([ids[1:] for ids in pieces], pad_id)).to(device)
