"""Rankings by a function of prompt and response; their kind is `signal`, never human."""

from collections.abc import Iterator

from labeling_app.db.store import Store
from labeling_app.rankings.tiers import tiers_of_scores
from rlhf.endpoints.signals import Signal
from rlhf.errors import InputError
from rlhf.records.schema import RankedPrompt, Ranking, content_id

BATCH = 256


def annotate_with_signal(
    store: Store, name: str, signal: Signal, tie_within: float
) -> dict[str, int]:
    """Rank the responses of every prompt by a signal; prompts it has already ranked are left alone.

    Args:
        store: the database.
        name: the annotator's name in the database.
        signal: function of (prompt text, response text); higher is better.
        tie_within: responses whose scores differ by no more than this tie with the best of their
        tier.

    Returns:
        How many prompts were ranked now, were ranked before, and have fewer than two responses.

    Raises:
        InputError: the database has no responses, or the signal returned something that is not a
        number.
    """
    counts = {"ranked": 0, "ranked_before": 0, "too_few_responses": 0}
    batch: list[Ranking] = []
    for record in records_of(store, name):
        if len(record.responses) < 2:
            counts["too_few_responses"] += 1
        elif _covers(record):
            counts["ranked_before"] += 1
        else:
            scores = [signal(record.prompt.text, response.text) for response in record.responses]
            batch.append(_ranking(record, name, scores, tiers_of_scores(scores, tie_within)))
            counts["ranked"] += 1
        if len(batch) == BATCH:
            store.add_rankings(batch, supersede=True)
            batch = []
    store.add_rankings(batch, supersede=True)
    return counts


def records_of(store: Store, name: str) -> Iterator[RankedPrompt]:
    """Every prompt with its responses and the live rankings by one annotator.

    Raises:
        InputError: the database has no responses.
    """
    if not store.counts()["responses"]:
        raise InputError(
            "The database holds no responses to rank",
            "Sample some first: rlhf generate --db DB --model MODEL",
        )
    return store.ranked_prompts(annotators=[name])


def _covers(record: RankedPrompt) -> bool:
    """Whether this annotator has ranked exactly the responses that are there now."""
    all_ids = {response.id for response in record.responses}
    return any({i for tier in r.tiers for i in tier} == all_ids for r in record.rankings)


def _ranking(
    record: RankedPrompt, name: str, scores: list[float], tiers: list[list[int]]
) -> Ranking:
    ids = tuple(tuple(record.responses[i].id for i in tier) for tier in tiers)
    everyone = sorted(response.id for response in record.responses)
    return Ranking(
        id=content_id("signal", name, record.prompt.id, everyone),
        prompt_id=record.prompt.id,
        annotator=name,
        kind="signal",
        tiers=ids,
        scores=tuple(scores[i] for tier in tiers for i in tier),
    )
