"""Quality measures for leads: work per annotator, agreement, and the tasks they disagree on.

Numbers come from the latest 5,000 live rankings that people made of tasks, in the app or, for what
was imported, elsewhere, so that they cost the same however large the database is: a second or two
of a processor.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import combinations
from statistics import fmean, median
from typing import Any

from labeling_app.db.board.overlap import num_for_everybody, num_open
from labeling_app.db.imports.unfinished import num_deferred
from labeling_app.db.rankings import newest_ranking
from labeling_app.db.reports import (
    latest_adjudications,
    latest_rankings,
    next_tasks,
    response_texts,
    votes_on_turns,
)
from labeling_app.db.store import Store
from labeling_app.db.tasks import default_overlap
from labeling_app.quality.checks import check_scores
from labeling_app.quality.history import in_words
from labeling_app.quality.live_votes import LiveVotes, count_live_votes
from labeling_app.quality.styles import Effect, properties_of, what_wins
from labeling_app.rankings.agreement import (
    Interval,
    longer_wins,
    mean_interval,
    pair_agreement,
    ranking_alpha,
    tau_b,
    top_share_by_position,
)
from rlhf.records.reliability import Reliability, labels_of, reliability_of_shared

LATEST = 5_000
# Twice the speed of a very fast reader, about 1,200 words a minute.
TOO_FAST_CHARACTERS_PER_SECOND = 120.0
SHOWN_DISAGREEMENTS = 20
SHOWN_NEXT = 10
PROMPT_CHARACTERS = 140

Tiers = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Judgment:
    """One ranking by one person, with what the screen held.

    An imported one has no screen: `shown_order` is that of the task; `seconds` are often unknown.
    """

    task_id: int
    prompt_id: str
    annotator: str
    tiers: Tiers
    flags: str
    """As they are stored."""
    shown_order: list[str]
    is_imported: bool
    seconds: float | None
    at: float
    prompt: str
    lengths: dict[str, int]

    @property
    def is_too_fast(self) -> bool | None:
        """Submitted faster than anybody can read the responses; None where nobody knows."""
        if self.seconds is None:
            return None
        return sum(self.lengths.values()) > TOO_FAST_CHARACTERS_PER_SECOND * max(self.seconds, 0.1)

    @property
    def is_unchanged(self) -> bool | None:
        """Submitted in the order in which it was shown, without a tie; None where nobody knows."""
        if self.is_imported:
            return None
        return self.tiers == [[response] for response in self.shown_order]


@dataclass(frozen=True, kw_only=True)
class Person:
    """One annotator's row."""

    name: str
    done: int
    today: int
    median_seconds: float | None
    too_fast: float | None
    unchanged: float | None
    agreement: Interval | None
    reliability: Interval | None
    gold: Interval | None
    self_agreement: Interval | None


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A task on which people differ, what each said, and a lead's adjudication ("" if none)."""

    task_id: int
    prompt: str
    agreement: float
    answers: list[str]
    adjudication: str


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The measured quality of the latest rankings."""

    num_considered: int
    times: list[float] = field(default_factory=list)
    """When those that were made in the app were, in seconds since 1970."""
    people: list[Person] = field(default_factory=list)
    agreement: Interval | None = None
    tau: Interval | None = None
    alpha: Interval | None = None
    matrix: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    top_by_position: list[Interval] = field(default_factory=list)
    longer_wins: Interval | None = None
    effects: list[Effect] = field(default_factory=list)
    disagreements: list[Disagreement] = field(default_factory=list)
    live: list[LiveVotes] = field(default_factory=list)
    """Of the latest 5,000 questions of live mode."""

    @property
    def last_hour(self) -> int:
        """How many of these rankings were made within an hour."""
        since = time.time() - 3600
        return sum(at > since for at in self.times)


@dataclass(frozen=True, kw_only=True)
class OpenWork:
    """The work that is left to do."""

    num_open: int
    """Tasks that are not done yet; those on somebody's screen are among them."""
    num_prompts: int
    num_tasks: int
    """All tasks for everybody, done or not; checks and decisions of leads are not among them."""
    overlap: int
    """How many people rank each new task."""
    next_tasks: list[tuple[str, str]]
    """(prompt, reason) of what is given out next, where it has a reason."""


def open_work(store: Store) -> OpenWork:
    """Return the work that is left to do now."""
    following = next_tasks(store.connections, SHOWN_NEXT)
    return OpenWork(
        num_open=num_open(store.connections),
        num_prompts=store.counts()["prompts"],
        num_tasks=num_for_everybody(store.connections),
        overlap=default_overlap(store.connections.db),
        next_tasks=[(_shortened(messages), reason) for messages, reason in following],
    )


def state_of_rankings(store: Store) -> tuple[int, int, int, str]:
    """A value that changes whenever those of `measure_quality` would; it takes few look-ups."""
    today = datetime.fromtimestamp(time.time()).strftime("%Y-%m-%d")
    connections = store.connections
    numbers = newest_ranking(connections), store.counts()["rankings"], num_deferred(connections)
    return (*numbers, today)


def measure_quality(store: Store) -> Quality:
    """Measure everybody's latest work."""
    judgments = [_judgment(row) for row in latest_rankings(store.connections, LATEST)]
    by_task: dict[int, list[Judgment]] = defaultdict(list)
    for judgment in judgments:
        by_task[judgment.task_id].append(judgment)
    shared = [group for group in by_task.values() if len(group) > 1]
    by_pair = _agreements(shared)
    task_means = [fmean(v) for group in shared if (v := _values(group, pair_agreement))]
    taus = [fmean(v) for group in shared if (v := _values(group, tau_b))]
    longer = [fmean(wins) for j in judgments if (wins := longer_wins(j.tiers, j.lengths))]
    labels = [
        label
        for judgment in judgments
        for label in labels_of(str(judgment.task_id), judgment.annotator, judgment.tiers)
    ]
    reliability = reliability_of_shared(labels)
    names = sorted({judgment.annotator for judgment in judgments})
    checks = check_scores(store.connections)
    return Quality(
        num_considered=len(judgments),
        times=[judgment.at for judgment in judgments if not judgment.is_imported],
        people=[_person(name, judgments, by_pair, reliability.get(name), checks) for name in names],
        agreement=mean_interval(task_means),
        tau=mean_interval(taus, lowest=-1.0),
        alpha=ranking_alpha([[judgment.tiers for judgment in group] for group in shared]),
        matrix={pair: (fmean(values), len(values)) for pair, values in by_pair.items()},
        top_by_position=top_share_by_position(
            [(j.tiers, j.shown_order) for j in judgments if not j.is_imported]
        ),
        longer_wins=mean_interval(longer),
        effects=_effects(store, judgments),
        disagreements=_disagreements(store, shared),
        live=count_live_votes(votes_on_turns(store.connections, LATEST)),
    )


def _effects(store: Store, judgments: Sequence[Judgment]) -> list[Effect]:
    ranked = {
        response_id for judgment in judgments for tier in judgment.tiers for response_id in tier
    }
    texts = response_texts(store.connections, sorted(ranked))
    properties = {response_id: properties_of(text) for response_id, text in texts}
    return what_wins(((judgment.prompt_id, judgment.tiers) for judgment in judgments), properties)


def _shortened(messages: str) -> str:
    text: str = json.loads(messages)[-1]["content"]
    return text[:PROMPT_CHARACTERS]


def _judgment(row: dict[str, Any]) -> Judgment:
    return Judgment(
        task_id=row["task_id"],
        prompt_id=row["prompt_id"],
        annotator=row["annotator"],
        tiers=json.loads(row["tiers"]),
        flags=row["flags"],
        shown_order=json.loads(row["shown"] or row["responses"]),
        is_imported=row["shown"] is None,
        seconds=None if row["duration_ms"] is None else row["duration_ms"] / 1000,
        at=row["created_at"],
        prompt=_shortened(row["messages"]),
        lengths=json.loads(row["lengths"]),
    )


def _values(group: Sequence[Judgment], measure: Any) -> list[float]:
    values = [measure(a.tiers, b.tiers) for a, b in combinations(group, 2)]
    return [value for value in values if value is not None]


def _agreements(shared: list[list[Judgment]]) -> dict[tuple[str, str], list[float]]:
    by_pair: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group in shared:
        for a, b in combinations(sorted(group, key=lambda j: j.annotator), 2):
            value = pair_agreement(a.tiers, b.tiers)
            if value is not None:
                by_pair[a.annotator, b.annotator].append(value)
    return dict(by_pair)


def _person(
    name: str,
    judgments: list[Judgment],
    by_pair: dict[tuple[str, str], list[float]],
    reliability: Reliability | None,
    checks: dict[str, dict[str, Interval | None]],
) -> Person:
    own = [judgment for judgment in judgments if judgment.annotator == name]
    seconds = [judgment.seconds for judgment in own if judgment.seconds is not None]
    now = datetime.fromtimestamp(time.time())
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    with_others = [value for pair, values in by_pair.items() if name in pair for value in values]
    return Person(
        name=name,
        done=len(own),
        today=sum(judgment.at >= midnight for judgment in own if not judgment.is_imported),
        median_seconds=median(seconds) if seconds else None,
        too_fast=_share(judgment.is_too_fast for judgment in own),
        unchanged=_share(judgment.is_unchanged for judgment in own),
        agreement=mean_interval(with_others),
        reliability=None
        if reliability is None
        else (reliability.value, reliability.low, reliability.high),
        gold=checks.get("gold", {}).get(name),
        self_agreement=checks.get("repeat", {}).get(name),
    )


def _share(answers: Iterable[bool | None]) -> float | None:
    known = [answer for answer in answers if answer is not None]
    return fmean(known) if known else None


def _disagreements(store: Store, shared: list[list[Judgment]]) -> list[Disagreement]:
    """The tasks people agree on least, worst first and adjudicated ones last.

    The letters are those of one screen, and nobody is named: a lead should not follow names.
    """
    means = [(fmean(v), group) for group in shared if (v := _values(group, pair_agreement))]
    differ = [(mean, group) for mean, group in means if mean < 1.0]
    adjudicated = latest_adjudications(store.connections, [group[0].task_id for _, group in differ])
    differ.sort(key=lambda item: (item[1][0].task_id in adjudicated, item[0]))
    return [
        Disagreement(
            task_id=group[0].task_id,
            prompt=group[0].prompt,
            agreement=mean,
            answers=sorted(
                in_words(group[0].shown_order, json.dumps(j.tiers), j.flags) for j in group
            ),
            adjudication=in_words(
                group[0].shown_order, *adjudicated.get(group[0].task_id, ("[]", "[]"))
            ),
        )
        for mean, group in differ[:SHOWN_DISAGREEMENTS]
    ]
