"""Which sequences a forward pass of a reward model reads together, and how they are laid out.

All of it is a pure function of the sequences, so that every process computes the same plan.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rlhf.modeling.attention.layout import TokenIds, TrunkInputs, common_prefix_length, pack_prompts
from rlhf.modeling.attention.shared_prefix import LEAST_SAVING


@dataclass
class SharedPrefix:
    """Sequences, by number, that begin with the same `shared` tokens, which are read once."""

    shared: int
    rows: list[int] = field(default_factory=list)
    tokens: int = 0
    """Tokens that a forward pass reads: the shared ones, and those that follow in each sequence."""


PackedPass = list[SharedPrefix]


def padded_passes(lengths: Sequence[int], tokens_per_pass: int) -> list[list[int]]:
    """The sequences, by number, of each padded pass, the longest first.

    Args:
        lengths: of the sequences, in tokens.
        tokens_per_pass: at most, padding included; one longer sequence has a pass of its own.
    """
    passes: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not passes or (len(passes[-1]) + 1) * lengths[passes[-1][0]] > tokens_per_pass:
            passes.append([])
        passes[-1].append(row)
    return passes


def packed_passes(
    sequences: Sequence[TokenIds], prompts: Sequence[str] | None, tokens_per_pass: int
) -> list[PackedPass] | None:
    """Passes without padding; None if they read hardly fewer tokens than padded ones.

    What the sequences of a prompt begin with is read once in a pass, or what all sequences begin
    with, whichever leaves fewer tokens.

    Args:
        sequences: token ids of prompts with responses.
        prompts: of each sequence the id of its prompt, if that is known.
        tokens_per_pass: at most; one longer sequence has a pass of its own.
    """
    rows = range(len(sequences))
    plans = [
        _plan(sequences, keys, tokens_per_pass) for keys in (prompts or rows, [""] * len(rows))
    ]
    best = min(plans, key=_num_tokens)
    lengths = list(map(len, sequences))
    padded = padded_passes(lengths, tokens_per_pass)
    most = (1 - LEAST_SAVING) * sum(len(part) * lengths[part[0]] for part in padded)
    return best if _num_tokens(best) <= most else None


def pack_pass(groups: PackedPass, sequences: Sequence[TokenIds]) -> TrunkInputs:
    """The groups of a pass end to end in one row."""
    return pack_prompts(
        [
            (
                sequences[group.rows[0]][: group.shared],
                [sequences[row][group.shared :] for row in group.rows],
            )
            for group in groups
        ],
        0,
    )


def _plan(
    sequences: Sequence[TokenIds], keys: Sequence[Hashable], tokens_per_pass: int
) -> list[PackedPass]:
    """Sequences with the same key in a group, or in several that fit into a pass each."""
    members: dict[Hashable, list[int]] = {}
    for row in sorted(range(len(sequences)), key=lambda row: -len(sequences[row])):
        members.setdefault(keys[row], []).append(row)
    groups: list[SharedPrefix] = []
    for rows in members.values():
        of_rows = [sequences[row] for row in rows]
        shared = common_prefix_length(of_rows) if len(rows) > 1 else len(of_rows[0]) - 1
        group = SharedPrefix(shared)
        for row in rows:
            own = len(sequences[row]) - shared
            if not group.rows or group.tokens + own > tokens_per_pass:
                group = SharedPrefix(shared, tokens=shared)
                groups.append(group)
            group.rows.append(row)
            group.tokens += own
    passes: list[PackedPass] = []
    room = 0
    for group in sorted(groups, key=lambda group: -len(sequences[group.rows[0]])):
        if group.tokens > room:
            passes.append([])
            room = tokens_per_pass
        passes[-1].append(group)
        room -= group.tokens
    return passes


def _num_tokens(passes: Sequence[PackedPass]) -> int:
    return sum(group.tokens for groups in passes for group in groups)
