"""From ranked prompts to groups: a prompt with its judged responses as token ids, and judgments.

Every ranking of every annotator becomes pairs; thumbs and "all bad" become pointwise judgments.
Responses without a judgment are left out.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice

from transformers import PreTrainedTokenizerBase

from reward.settings import Loss
from rlhf.errors import InputError
from rlhf.modeling.chat_template import opens_thinking
from rlhf.modeling.tokens import (
    encode_prompt,
    encode_prompts,
    encode_responses,
    tokenizer_fingerprint,
)
from rlhf.records.pairs import pairs_of_tiers
from rlhf.records.schema import Prompt, RankedPrompt, Ranking, Response
from rlhf.records.thumbs import PointwiseJudgment, PointwiseKind, pointwise_judgments

RECORDS_AT_ONCE = 512  # a tokenizer is called once for all of their texts


@dataclass(frozen=True)
class Pair:
    """Two responses of a group that one annotator compared.

    `outcome` is 1.0 where the first won and 0.5 for a tie; `strength` adds up the strengths between
    their tiers (0 when not given).
    """

    first: int
    second: int
    outcome: float
    strength: int
    annotator: str
    weight: float = 1.0


@dataclass(frozen=True)
class TieredRanking:
    """One annotator's ranking by numbers of responses, best tier first; scores where given.

    `strengths` are those between neighboring tiers, empty when not given.
    """

    tiers: tuple[tuple[int, ...], ...]
    annotator: str
    weight: float = 1.0
    scores: tuple[float, ...] = ()
    strengths: tuple[int, ...] = ()

    def to_pairs(self) -> Iterator[Pair]:
        """Every pair: within a tier as ties, across tiers the better one first."""
        for tier in self.tiers:
            for first, second in combinations(tier, 2):
                yield Pair(first, second, 0.5, 0, self.annotator, self.weight)
        for better, worse, margin in pairs_of_tiers(self.tiers, self.strengths):
            yield Pair(better, worse, 1.0, margin, self.annotator, self.weight)


@dataclass(frozen=True)
class Pointwise:
    """A response of a group that one annotator called good or bad, without a comparison."""

    response: int
    is_good: bool
    annotator: str
    kind: PointwiseKind
    weight: float = 1.0


@dataclass(frozen=True)
class Group:
    """A prompt's token ids, its responses' token ids, and the judgments on them.

    `pairs` and `rankings` are two forms of the same judgments; `pointwise` are of single responses.
    """

    prompt_id: str
    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    pairs: tuple[Pair, ...] = ()
    rankings: tuple[TieredRanking, ...] = ()
    pointwise: tuple[Pointwise, ...] = ()

    def judgments(self, loss: Loss) -> list[Sequence[Pair | TieredRanking | Pointwise]]:
        """The judgments of a loss, averaged separately: pairs or rankings, and pointwise ones."""
        compared = self.pairs if loss == "bradley_terry" else self.rankings
        return [judgments for judgments in (compared, self.pointwise) if judgments]

    @property
    def longest(self) -> int:
        """Tokens of the prompt with its longest response."""
        return len(self.prompt) + max(len(response) for response in self.responses)

    @property
    def num_labels(self) -> int:
        """The number of rankings and thumbs that annotators gave the prompt."""
        return len(self.rankings) + sum(judgment.kind == "thumbs" for judgment in self.pointwise)

    @property
    def num_preferences(self) -> int:
        """Pairs that are not ties."""
        return sum(pair.outcome != 0.5 for pair in self.pairs)


@dataclass(frozen=True)
class PointwiseRules:
    """Weights of the kinds of pointwise judgments, 1 unless given; flags that are thumbs down."""

    weights: Mapping[PointwiseKind, float] = field(default_factory=dict)
    down_flags: Collection[str] = ()


@dataclass(frozen=True)
class Encoder:
    """How records become groups: the tokenizer, the longest sequence, the weights of judgments.

    `weights` are by annotator.
    """

    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    max_length: int
    truncate: bool
    weights: Mapping[str, float]
    pointwise: PointwiseRules = PointwiseRules()
    reads_thinking: bool = False

    @classmethod
    def create(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        truncate: bool,
        weights: Mapping[str, float] | None = None,
        pointwise: PointwiseRules = PointwiseRules(),
        reads_thinking: bool = False,
    ) -> "Encoder":
        """An encoder with the tokenizer's fingerprint computed once."""
        fingerprint = tokenizer_fingerprint(tokenizer)
        return cls(
            tokenizer, fingerprint, max_length, truncate, weights or {}, pointwise, reads_thinking
        )

    def encode(self, chosen: Sequence[tuple[Prompt, Sequence[Response]]]) -> list[Group]:
        """Groups, without judgments, of prompts and their responses as the reward model reads them.

        A prompt loses its oldest turns where it would be too long and may be truncated.
        """
        prompts = encode_prompts(self.tokenizer, [prompt for prompt, _ in chosen])
        encoded_responses = iter(
            encode_responses(
                self.tokenizer,
                [
                    (response, opens_thinking(self.tokenizer, ids))
                    for (_, responses), ids in zip(chosen, prompts, strict=True)
                    for response in responses
                ],
                self.fingerprint,
                reads_thinking=self.reads_thinking,
            )
        )
        groups = []
        for (prompt, responses), ids in zip(chosen, prompts, strict=True):
            encoded = tuple(tuple(next(encoded_responses)) for _ in responses)
            prompt_tokens = self._truncate(prompt, ids, max(len(response) for response in encoded))
            groups.append(Group(prompt.id, tuple(prompt_tokens), encoded))
        return groups

    def _truncate(self, prompt: Prompt, ids: list[int], longest_response: int) -> list[int]:
        room = self.max_length - longest_response
        while self.truncate and len(ids) > room and (shorter := _without_oldest_turn(prompt)):
            prompt = shorter
            ids = encode_prompt(self.tokenizer, prompt)
        return ids

    def weight(self, ranking: Ranking) -> float:
        """How much a ranking counts: 1 unless its annotator has a weight."""
        return self.weights.get(ranking.annotator, 1.0)


def rank_pairs(ranking: Ranking, position: dict[str, int], weight: float = 1.0) -> Iterator[Pair]:
    """Every pair of a ranking: across tiers the better one first, within a tier as ties.

    Args:
        ranking: one judgment, of some or all responses.
        position: for each response id its number in the group.
        weight: how much the annotator counts.
    """
    return rank_tiers(ranking, position, weight).to_pairs()


def rank_tiers(ranking: Ranking, position: dict[str, int], weight: float) -> TieredRanking:
    """A ranking by the numbers of its responses; arguments as for `rank_pairs`."""
    return TieredRanking(
        tuple(tuple(position[name] for name in tier) for tier in ranking.tiers),
        ranking.annotator,
        weight,
        ranking.scores,
        ranking.strengths,
    )


def encode_records(
    records: Iterable[RankedPrompt], encoder: Encoder
) -> Iterator[tuple[RankedPrompt, Group | None]]:
    """Every record with its group, None without a judgment of weight above 0.

    Raises:
        InputError: a prompt has two responses with one id, or the tokenizer refuses it.
    """
    rest = iter(records)
    while some := list(islice(rest, RECORDS_AT_ONCE)):
        judged = [_find_judgments(record, encoder) for record in some]
        chosen = [
            (judgments.record.prompt, judgments.responses)
            for judgments in judged
            if judgments.responses
        ]
        groups = iter(encoder.encode(chosen))
        for judgments in judged:
            yield judgments.record, judgments.add_to(next(groups)) if judgments.responses else None


def admit(
    record: RankedPrompt, group: Group | None, encoder: Encoder, counts: Counter[str]
) -> bool:
    """Count a record for the report, and say whether its group is used."""
    counts["rankings"] += len(record.rankings)
    counts.update("rankings_with_scores" for ranking in record.rankings if ranking.scores)
    if group is None:
        counts["prompts_without_pairs"] += 1
        return False
    if group.longest > encoder.max_length:
        counts["prompts_too_long"] += 1
        return False
    counts.update(
        prompts=1,
        responses=len(group.responses),
        pairs=len(group.pairs),
        ties=len(group.pairs) - group.num_preferences,
    )
    counts.update(map(_name, group.pointwise))
    return True


def refuse_too_long(counts: Mapping[str, int], prompts: int, encoder: Encoder) -> None:
    """Refuse prompts that `admit` has counted as too long, unless the oldest turns may be dropped.

    Raises:
        InputError: there are any, of `prompts` in all.
    """
    too_long = counts.get("prompts_too_long")
    if too_long and not encoder.truncate:
        raise InputError(
            f"{too_long} of {prompts} prompts with their responses are longer than "
            f"{encoder.max_length} tokens",
            "Raise --data.max-length as far as the model reads, or drop their oldest turns with "
            "--data.too-long truncate.",
        )


def _name(judgment: Pointwise) -> str:
    """The name under which a pointwise judgment is counted."""
    if judgment.kind == "all_bad":
        return "responses_of_all_bad"
    return "thumbs_up" if judgment.is_good else "thumbs_down"


def build_reference_groups(
    chosen: Iterable[tuple[Prompt, Response]], encoder: Encoder
) -> list[Group]:
    """Groups, without judgments, of some responses; what is too long is left out."""
    by_prompt: dict[str, tuple[Prompt, list[Response]]] = {}
    for prompt, response in chosen:
        by_prompt.setdefault(prompt.id, (prompt, []))[1].append(response)
    groups = encoder.encode(list(by_prompt.values()))
    return [group for group in groups if group.longest <= encoder.max_length]


def is_reference(response: Response, model_fingerprint: str) -> bool:
    """Whether a model itself gave a response, from its full distribution."""
    is_own = response.model_fingerprint == model_fingerprint
    return is_own and response.sampling is not None and response.sampling.is_untruncated


@dataclass(frozen=True)
class _Judgments:
    """The parts of a record that count: rankings, pointwise judgments, and judged responses."""

    record: RankedPrompt
    rankings: list[tuple[Ranking, float]]
    pointwise: list[tuple[PointwiseJudgment, float]]
    responses: list[Response]

    def add_to(self, group: Group) -> Group:
        position = {response.id: number for number, response in enumerate(self.responses)}
        rankings = tuple(rank_tiers(ranking, position, w) for ranking, w in self.rankings)
        return replace(
            group,
            pairs=tuple(pair for ranking in rankings for pair in ranking.to_pairs()),
            rankings=rankings,
            pointwise=tuple(
                Pointwise(
                    position[judgment.response_id],
                    judgment.is_good,
                    judgment.ranking.annotator,
                    judgment.kind,
                    weight,
                )
                for judgment, weight in self.pointwise
                if judgment.response_id in position
            ),
        )


def _find_judgments(record: RankedPrompt, encoder: Encoder) -> _Judgments:
    repeated = _repeated(response.id for response in record.responses)
    if repeated:
        raise InputError(
            f"Prompt {record.prompt.id} has more than one response {repeated[0]}",
            "Export again with `rlhf export`: every response once.",
        )
    rankings = [
        (ranking, encoder.weight(ranking))
        for ranking in record.rankings
        if encoder.weight(ranking) > 0 and sum(map(len, ranking.tiers)) > 1
    ]
    rules = encoder.pointwise
    flagged = [
        (judgment, encoder.weight(judgment.ranking) * rules.weights.get(judgment.kind, 1.0))
        for judgment in pointwise_judgments(record.rankings, rules.down_flags)
    ]
    flagged = [(judgment, weight) for judgment, weight in flagged if weight > 0]
    judged = {name for ranking, _ in rankings for tier in ranking.tiers for name in tier}
    judged.update(judgment.response_id for judgment, _ in flagged)
    responses = [response for response in record.responses if response.id in judged]
    return _Judgments(record, rankings, flagged, responses)


def _without_oldest_turn(prompt: Prompt) -> Prompt | None:
    """The prompt from its second user turn on, system message kept; None if there is no second."""
    system = [message for message in prompt.messages[:1] if message.role == "system"]
    turns = prompt.messages[len(system) :]
    later = [number for number, turn in enumerate(turns) if turn.role == "user" and number > 0]
    return replace(prompt, messages=(*system, *turns[later[0] :])) if later else None


def refuse_repeated(ids: Iterable[str]) -> None:
    """Refuse prompts of one split of which two have the same id.

    Raises:
        InputError: says how many, and names one.
    """
    repeated = _repeated(ids)
    if repeated:
        raise InputError(
            f"{len(repeated)} prompt ids occur more than once, for example {repeated[0]}",
            "Export again with `rlhf export`: one line a prompt, in one split.",
        )


def _repeated(ids: Iterable[str]) -> list[str]:
    return [name for name, number in Counter(ids).items() if number > 1]
