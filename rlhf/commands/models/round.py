"""`rlhf round`: samples of the newest policy go back to the annotators."""

from typing import Any

from policies.rounds.settings import RoundSettings as Settings
from rlhf.commands.wording import listed, next_command
from rlhf.records.wording import counted

EXAMPLE = """rlhf round --db labels.db --policy runs/first/ppo \\
    --reference runs/first/reference --reward runs/first/reward"""


def run(settings: Settings) -> dict[str, Any]:
    """Sample the newest policy and queue the samples most worth ranking."""
    from labeling_app.annotators.rounds import queue_round
    from labeling_app.db.store import Store
    from labeling_app.quality.selection import pair_entropy
    from policies.rounds.candidates import choose, sample_candidates
    from reward.scoring.rankings import training_gain

    with Store(settings.db, read_only=True):
        pass  # a missing database fails here, before an hour of sampling
    candidates, inputs = sample_candidates(settings)
    gain = training_gain(settings.reward)  # rewards over it are the log-odds that were trained
    chosen = choose(
        [candidate.nats for candidate in candidates],
        [pair_entropy(candidate.rewards / gain) for candidate in candidates],
        pick=settings.pick,
        random_share=settings.random_share,
        seed=settings.seed,
    )
    selection = {name: getattr(settings, name) for name in ("k", "pick", "random_share", "seed")}
    tasks = [(candidates[n].prompt, candidates[n].responses, reason) for n, reason in chosen]
    with Store(settings.db) as store:
        queued = queue_round(store, inputs, tasks, selection)
    reasons = [reason for _, reason in chosen]
    return {**queued, "chosen": {reason: reasons.count(reason) for reason in sorted({*reasons})}}


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How many prompts wait for people now, and why they were chosen."""
    chosen = listed([f"{count:,} {reason}" for reason, count in result["chosen"].items()])
    return (
        f"Round {result['round']}: queued {counted(result['queued'], 'new task')} ({chosen}).\n"
        f"{next_command('label', db=settings.db)}"
    )
