"""Guards: signs that a run has gone astray, judged against the stored reference outputs.

A reward model that is hacked gives rising rewards for answers that no person would like. What
such answers have in common shows without people: they do not end, they grow, they shrink, they
repeat themselves. Each sign is first a warning; when it stays, the run ends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from policies.ppo.setting_groups import GuardSettings
from policies.reference.store import ReferenceRow
from rlhf.errors import GuardError
from rlhf.run.checkpoint import last_good


@dataclass(frozen=True, kw_only=True)
class Normal:
    """What the reference outputs look like: tokens, share that ends, variety, nats a token."""

    length: float
    eos_rate: float
    distinct_2: float
    entropy: float


def normal_of(rows: Sequence[ReferenceRow]) -> Normal:
    """Measure stored outputs the way a step's responses are measured."""
    tokens = sum(len(row.response_ids) for row in rows)
    return Normal(
        length=tokens / len(rows),
        eos_rate=fmean(row.finished for row in rows),
        distinct_2=fmean(distinct_2(row.response_ids) for row in rows),
        entropy=sum(sum(row.entropy) for row in rows) / tokens,
    )


def distinct_2(ids: Sequence[int]) -> float:
    """Different pairs of neighbouring tokens as a share of all pairs of one response; 1 for none.

    Within a response, so that neither the number of responses nor their likeness plays a part.
    """
    pairs = list(pairwise(ids))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def signs(
    row: Mapping[str, float], kl: float | None, normal: Normal, settings: GuardSettings
) -> dict[str, str]:
    """What is wrong with a step, by guard.

    Args:
        row: the step's metrics.
        kl: the measured KL in nats per token; None where none is.
        normal: of the reference outputs.
        settings: how much is too much.
    """
    found = {}
    if settings.max_kl is not None and kl is not None and kl > settings.max_kl:
        found["kl"] = f"the KL is {kl:.3f} nats per token, the ceiling {settings.max_kl:g}"
    if row["entropy"] < settings.min_entropy * normal.entropy:
        found["entropy"] = _compare("entropy has collapsed to", row["entropy"], normal.entropy)
    if row["reward/centered"] <= 0:  # hacking is a rising reward that pays for something else
        return found
    length, band = row["length"], settings.length_band
    if not normal.length / band <= length <= normal.length * band:
        found["length"] = _compare("the reward rises while the length is", length, normal.length)
    if row["eos_rate"] < normal.eos_rate - settings.eos_drop:
        found["eos"] = _compare(
            "the reward rises while the share of answers that end is",
            row["eos_rate"],
            normal.eos_rate,
        )
    if row["distinct_2"] < settings.min_distinct * normal.distinct_2:
        found["distinct"] = _compare(
            "the reward rises while distinct-2 is", row["distinct_2"], normal.distinct_2
        )
    return found


def watch(
    row: Mapping[str, float],
    kl: float | None,
    normal: Normal,
    settings: GuardSettings,
    counts: Mapping[str, int],
    checkpoint: Path | None,
    warn: Callable[[str], None],
) -> dict[str, int]:
    """Warn of every new sign; stop when one has stood for `patience` steps.

    Args:
        row: the step's metrics.
        kl: as in `signs`.
        normal: of the reference outputs.
        settings: how much is too much, and for how long.
        counts: what the step before returned.
        checkpoint: the newest one; none is saved while a sign stands that may stop the run.
        warn: is told.

    Returns:
        How many steps in a row each sign has stood, `counts` brought up to date.

    Raises:
        GuardError: a sign has stayed; the message names the checkpoint.
    """
    found = signs(row, kl, normal, settings)
    updated = {name: counts.get(name, 0) + 1 for name in found}
    for name, words in found.items():
        if updated[name] == 1:
            warn(f"Step {row['step']}: {words}.")
        if settings.patience and updated[name] >= settings.patience:
            raise GuardError(
                f"Step {row['step']}: {words}, for {updated[name]} steps now",
                f"{last_good(checkpoint)}. Start a new --out with a stronger KL term, "
                "--rewards.shaping par or a lower --optim.learning-rate; the --guards settings say "
                "what is tolerated.",
            )
    return updated


def _compare(words: str, value: float, normal: float) -> str:
    return f"{words} {value:.2f}, {normal:.2f} in the reference outputs"
