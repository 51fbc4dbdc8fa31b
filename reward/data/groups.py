"""From ranked prompts to groups: a prompt with its judged responses as token ids, and judgments.

Every ranking of every annotator becomes pairs; thumbs and "all bad" become pointwise judgments.
Responses without a judgment are left out.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from transformers import PreTrainedTokenizerBase

from reward.settings import Loss
from rlhf.errors import InputError
from rlhf.modeling.chat_template import opens_thinking
from rlhf.modeling.tokens import encode_prompt, encode_response, tokenizer_fingerprint
from rlhf.records.fingerprints import text_hash
from rlhf.records.pairs import pairs
from rlhf.records.schema import Prompt, RankedPrompt, Ranking, Response
from rlhf.records.thumbs import PointwiseKind, pointwise_judgments


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
    """One annotator's ranking by numbers of responses, best tier first; scores where given."""

    tiers: tuple[tuple[int, ...], ...]
    annotator: str
    weight: float = 1.0
    scores: tuple[float, ...] = ()


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
        """What a loss averages over, separately: pairs or rankings, and pointwise judgments."""
        compared = self.pairs if loss == "bradley_terry" else self.rankings
        return [found for found in (compared, self.pointwise) if found]

    @property
    def longest(self) -> int:
        """Tokens of the prompt with its longest response."""
        return len(self.prompt) + max(len(response) for response in self.responses)

    @property
    def num_labels(self) -> int:
        """What annotators said of the prompt: rankings and thumbs."""
        return len(self.rankings) + sum(one.kind == "thumbs" for one in self.pointwise)

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

    def responses(
        self, responses: Sequence[Response], prompt_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """Token ids of the responses to one prompt as the reward model reads them."""
        how = {
            "reads_thinking": self.reads_thinking,
            "opened": opens_thinking(self.tokenizer, prompt_ids),
        }
        return tuple(
            tuple(encode_response(self.tokenizer, one, self.fingerprint, **how))
            for one in responses
        )

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
    tiers = [[position[name] for name in tier] for tier in ranking.tiers]
    who = ranking.annotator
    for tier in tiers:
        for first, second in combinations(tier, 2):
            yield Pair(first, second, 0.5, 0, who, weight)
    for better, worse, margin in pairs(ranking):
        yield Pair(position[better], position[worse], 1.0, margin, who, weight)


def build_groups(
    records: Sequence[RankedPrompt], encoder: Encoder
) -> tuple[list[Group], dict[str, int]]:
    """Groups of all prompts with a judgment of weight above 0, and counts for the report.

    Raises:
        InputError: an id occurs twice, or prompts are too long and may not be truncated.
    """
    _refuse_duplicates(records)
    groups, counts = [], Counter[str]()
    for record in records:
        group = _build_group(record, encoder)
        counts["rankings"] += len(record.rankings)
        counts.update("rankings_with_scores" for ranking in record.rankings if ranking.scores)
        if group is None:
            counts["prompts_without_pairs"] += 1
        elif group.longest > encoder.max_length:
            counts["prompts_too_long"] += 1
        else:
            groups.append(group)
            counts.update(
                prompts=1,
                responses=len(group.responses),
                pairs=len(group.pairs),
                ties=len(group.pairs) - group.num_preferences,
            )
            counts.update(map(_name, group.pointwise))
    if counts["prompts_too_long"] and not encoder.truncate:
        raise InputError(
            f"{counts['prompts_too_long']} of {len(records)} prompts with their responses are "
            f"longer than {encoder.max_length} tokens",
            "Raise --data.max-length as far as the model reads, or drop their oldest turns with "
            "--data.too-long truncate.",
        )
    return groups, dict(counts)


def _name(judgment: Pointwise) -> str:
    """The name under which a pointwise judgment is counted."""
    if judgment.kind == "all_bad":
        return "responses_of_all_bad"
    return "thumbs_up" if judgment.is_good else "thumbs_down"


def build_reference_groups(
    records: Sequence[RankedPrompt], encoder: Encoder, model_fingerprint: str, limit: int
) -> list[Group]:
    """Groups, without pairs, of responses that the model itself gave from its full distribution.

    Args:
        records: the whole dataset.
        encoder: how text becomes tokens; what is too long is left out.
        model_fingerprint: fingerprint of the model whose outputs are the reference.
        limit: how many responses to take at most, spread evenly over the dataset.
    """
    found = [
        (record, response)
        for record in records
        for response in record.responses
        if response.model_fingerprint == model_fingerprint
        and response.sampling is not None
        and response.sampling.is_untruncated
    ]
    stride = max(1, -(-len(found) // limit))
    chosen: dict[str, tuple[Prompt, list[Response]]] = {}
    for record, response in found[::stride]:
        chosen.setdefault(record.prompt.id, (record.prompt, []))[1].append(response)
    groups = [_encode(prompt, responses, encoder) for prompt, responses in chosen.values()]
    return [group for group in groups if group.longest <= encoder.max_length]


def take_part(groups: Sequence[Group], number: int) -> list[Group]:
    """A number of groups, chosen by a hash of the prompt id: a larger number includes a smaller."""
    order = sorted(groups, key=lambda group: text_hash(group.prompt_id))
    ids = {group.prompt_id for group in order[:number]}
    return [group for group in groups if group.prompt_id in ids]


def _build_group(record: RankedPrompt, encoder: Encoder) -> Group | None:
    rankings = [
        ranking
        for ranking in record.rankings
        if encoder.weight(ranking) > 0 and sum(map(len, ranking.tiers)) > 1
    ]
    rules = encoder.pointwise
    flagged = [
        (one, encoder.weight(one.ranking) * rules.weights.get(one.kind, 1.0))
        for one in pointwise_judgments(record.rankings, rules.down_flags)
    ]
    flagged = [(one, weight) for one, weight in flagged if weight > 0]
    judged = {name for ranking in rankings for tier in ranking.tiers for name in tier}
    judged.update(one.response_id for one, _ in flagged)
    responses = [response for response in record.responses if response.id in judged]
    if not responses:
        return None
    position = {response.id: number for number, response in enumerate(responses)}
    group = _encode(record.prompt, responses, encoder)
    weighted = [(ranking, encoder.weight(ranking)) for ranking in rankings]
    return replace(
        group,
        pairs=tuple(p for ranking, w in weighted for p in rank_pairs(ranking, position, w)),
        rankings=tuple(
            TieredRanking(
                tuple(tuple(position[name] for name in tier) for tier in ranking.tiers),
                ranking.annotator,
                weight,
                ranking.scores,
            )
            for ranking, weight in weighted
        ),
        pointwise=tuple(
            Pointwise(
                position[one.response_id], one.is_good, one.ranking.annotator, one.kind, weight
            )
            for one, weight in flagged
            if one.response_id in position
        ),
    )


def _encode(prompt: Prompt, responses: Sequence[Response], encoder: Encoder) -> Group:
    ids = encode_prompt(encoder.tokenizer, prompt)
    encoded = encoder.responses(responses, ids)
    room = encoder.max_length - max(len(response) for response in encoded)
    while encoder.truncate and len(ids) > room and (shorter := _without_oldest_turn(prompt)):
        prompt = shorter
        ids = encode_prompt(encoder.tokenizer, prompt)
    return Group(prompt.id, tuple(ids), encoded)


def _without_oldest_turn(prompt: Prompt) -> Prompt | None:
    """The prompt from its second user turn on, system message kept; None if there is no second."""
    system = [message for message in prompt.messages[:1] if message.role == "system"]
    turns = prompt.messages[len(system) :]
    later = [number for number, turn in enumerate(turns) if turn.role == "user" and number > 0]
    return replace(prompt, messages=(*system, *turns[later[0] :])) if later else None


def _refuse_duplicates(records: Sequence[RankedPrompt]) -> None:
    repeated = _repeated(record.prompt.id for record in records)
    if repeated:
        raise InputError(
            f"{len(repeated)} prompt ids occur more than once, for example {repeated[0]}",
            "Export again with `rlhf export`: one line a prompt, in one split.",
        )
    for record in records:
        repeated = _repeated(response.id for response in record.responses)
        if repeated:
            raise InputError(
                f"Prompt {record.prompt.id} has more than one response {repeated[0]}",
                "Export again with `rlhf export`: every response once.",
            )


def _repeated(ids: Iterable[str]) -> list[str]:
    return [name for name, number in Counter(ids).items() if number > 1]
