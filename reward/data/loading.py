"""From an export folder to groups for training, for measuring and for the scale of rewards."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from reward.data.annotators import AnnotatorWeights, estimate_weights
from reward.data.groups import (
    Encoder,
    Group,
    PointwiseRules,
    TieredRanking,
    build_groups,
    build_reference_groups,
    take_part,
)
from reward.settings import RewardSettings
from rlhf.config import part_of
from rlhf.config.paths import with_changes
from rlhf.errors import ConfigError, InputError
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.models import context_length, describe_model, is_reward_model, load_config
from rlhf.modeling.readers import load_reader, tokenizer_of
from rlhf.records.ranked import SPLITS, read_manifest, read_ranked
from rlhf.records.schema import RankedPrompt

MAX_REFERENCE_OUTPUTS = 512
SMALLEST_SPREAD = 1e-12  # of the largest score; less is rounding


@dataclass(frozen=True)
class Data:
    """Groups by their use, where the held-out ones come from, and counts for the report.

    Evaluations during training use `validation`, since they choose the weights; `held_out` measures
    the result.
    """

    train: list[Group]
    validation: list[Group]
    held_out: list[Group]
    reference: list[Group]
    held_out_source: str
    counts: dict[str, dict[str, int]]
    annotators: AnnotatorWeights


def describe_inputs(settings: RewardSettings) -> dict[str, dict[str, str]]:
    """Rankings and model with their hashes, as stage.json records them.

    Raises:
        InputError: there is no such model, or no export.
    """
    manifest = read_manifest(settings.rankings)
    rankings = {"path": str(settings.rankings), "hash": str(manifest["content_hash"])}
    return {
        "rankings": rankings,
        "model": describe_model(settings.model, settings.chat_template_kwargs),
    }


def read_data(
    settings: RewardSettings, tokenizer: PreTrainedTokenizerBase, model_fingerprint: str
) -> Data:
    """Read, encode and split the rankings; for a regression, standardize their scores.

    Raises:
        InputError: too few judgments to train or to measure, scores that cannot be targets, or
            judgments that `estimate_weights` or `build_groups` refuse.
    """
    records = read_ranked(settings.rankings)
    _refuse_unknown_names(settings, records)
    given = settings.annotator_weights
    annotators = estimate_weights(records) if given == "auto" else AnnotatorWeights(given)
    encoder = Encoder.create(
        tokenizer,
        min(settings.data.max_length, read_context(settings.model)),
        truncate=settings.data.too_long == "truncate",
        weights=annotators.weights,
        pointwise=PointwiseRules(
            settings.objective.pointwise_weights, settings.data.thumbs_down_flags
        ),
        reads_thinking=bool(settings.data.reads_thinking),
    )
    groups: dict[str, list[Group]] = {}
    counts: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        chosen = [record for record in records if record.prompt.split == split]
        groups[split], counts[split] = build_groups(chosen, encoder)
    train, held_out, source = groups["train"], groups["test"], "test prompts"
    seen = {group.prompt for group in train}
    leaked = sum(group.prompt in seen for group in held_out)
    if leaked:  # prompts that were trained on cannot measure
        held_out = [group for group in held_out if group.prompt not in seen]
        counts["test"]["prompts_also_in_train"] = leaked
    if not _can_measure(held_out, train) and len(train) > 1:
        train, aside = hold_out(train, settings.evaluation.held_out_fraction)
        lacking = "'s test prompts have no pairs" if held_out else " has no judged test prompts"
        source = f"train prompts set aside, because the export{lacking}"
        held_out = held_out + aside
    wanted = part_of("data.limit", settings.data.limit, len(train))
    if wanted < len(train):
        counts["train"]["prompts_beyond_limit"] = len(train) - wanted
    train, validation = _take_train(settings, train, wanted)
    _require_judgments(settings, len(records), train, held_out)
    if settings.evaluation.every and not validation:
        raise InputError(
            f"--evaluation.every {settings.evaluation.every} sets train prompts aside, and the "
            f"{len(train)} of {settings.rankings} are too few",
            "Leave --evaluation.every out, or judge responses of more prompts.",
        )
    if settings.loss == "regression" and _have_scores(settings, records, [*train, *validation]):
        train, validation = standardize_scores(train, validation)
    reference = build_reference_groups(records, encoder, model_fingerprint, MAX_REFERENCE_OUTPUTS)
    return Data(train, validation, held_out, reference, source, counts, annotators)


def held_out_as_before(settings: RewardSettings, data: Data, model: dict[str, str]) -> list[Group]:
    """The held-out groups, encoded as the reward model that the training starts from reads them.

    Args:
        settings: of the stage.
        data: encoded as this training reads it.
        model: the initial model, as `describe_model` describes it.
    """
    if not is_reward_model(settings.model):
        return data.held_out
    reader = load_reader(model)
    is_same = reader.reads_thinking == bool(settings.data.reads_thinking)
    if is_same and end_token_ids(reader.tokenizer) == end_token_ids(tokenizer_of(model)):
        return data.held_out
    # a prompt may be too long with thinking and not without
    before = with_changes(
        settings, {"data.reads_thinking": reader.reads_thinking, "data.too_long": "truncate"}
    )
    return read_data(before, reader.tokenizer, str(model["hash"])).held_out


def read_context(model: str) -> int:
    """The maximum number of tokens that a model reads; no limit if its config has none."""
    return context_length(load_config(model)) or sys.maxsize


def _take_train(
    settings: RewardSettings, groups: list[Group], wanted: int
) -> tuple[list[Group], list[Group]]:
    """Of `wanted` groups, those to train on and those that `--evaluation.every` sets aside.

    All groups are split before the limit applies: none is set aside under one limit and trained on
    under another.
    """
    train, validation, aside = groups, list[Group](), 0
    if settings.evaluation.every:
        train, validation = hold_out(groups, settings.evaluation.held_out_fraction)
        aside = num_held_out(wanted, settings.evaluation.held_out_fraction)
    if wanted >= len(groups):
        return train, validation
    return take_part(train, wanted - aside), take_part(validation, aside)


def hold_out(groups: Sequence[Group], fraction: float) -> tuple[list[Group], list[Group]]:
    """Split groups into training and held-out ones by a hash of the prompt id.

    Groups with pairs and groups with thumbs alone are split separately, so that both can be
    measured; the only prompt of its kind is trained on. Equal prompts under several ids stay on the
    same side.
    """
    kinds = [[group for group in groups if bool(group.pairs) == has] for has in (True, False)]
    prompts = {
        group.prompt
        for kind in kinds
        if len({group.prompt for group in kind}) > 1
        for group in take_part(kind, num_held_out(len(kind), fraction))
    }
    held_out = [group for group in groups if group.prompt in prompts]
    return [group for group in groups if group.prompt not in prompts], held_out


def num_held_out(number: int, fraction: float) -> int:
    """The number of held-out prompts: at least one."""
    return max(1, round(number * fraction))


def standardize_scores(
    train: Sequence[Group], others: Sequence[Group]
) -> tuple[list[Group], list[Group]]:
    """Both with scores that have mean 0 and standard deviation 1 over the rankings of `train`.

    s → (s − mean) / deviation, where every score of every ranking counts once.

    Raises:
        InputError: the scores of `train` are all the same.
    """
    found = [score for group in train for r in group.rankings for score in r.scores]
    scores = np.array(found, dtype=np.float64)
    mean, deviation = float(scores.mean()), float(scores.std())
    if not deviation > SMALLEST_SPREAD * np.abs(scores).max():
        raise InputError(
            f"The {len(scores)} scores of the training rankings are all {mean:g}",
            "Give scores that differ, or use a loss that needs only an order: "
            "--loss bradley_terry.",
        )
    return _rescale(train, mean, deviation), _rescale(others, mean, deviation)


def _rescale(groups: Sequence[Group], mean: float, deviation: float) -> list[Group]:
    def ranking(one: TieredRanking) -> TieredRanking:
        return replace(one, scores=tuple((score - mean) / deviation for score in one.scores))

    return [replace(group, rankings=tuple(map(ranking, group.rankings))) for group in groups]


def _can_measure(held_out: list[Group], train: list[Group]) -> bool:
    """Whether groups are held out, with pairs if there are pairs to train on."""
    compared = any(group.pairs for group in held_out)
    return compared or (bool(held_out) and not any(group.pairs for group in train))


def _require_judgments(
    settings: RewardSettings, prompts: int, train: list[Group], held_out: list[Group]
) -> None:
    if not train or not held_out:
        remedy = "Rank two or more responses of more prompts, then: rlhf export --db DB --out DIR"
        limit = settings.data.limit
        if limit != "100%":
            remedy = f"Raise --data.limit (now {limit}), or rank responses of more prompts."
        raise InputError(
            f"{settings.rankings} has {prompts} prompts, but too few with a judged pair or thumb: "
            f"{len(train)} to train on, {len(held_out)} to measure with",
            remedy,
        )
    if any(group.num_preferences for group in train):
        return
    said = {one.is_good for group in train for one in group.pointwise}
    if len(said) == 1:
        raise InputError(
            f"All thumbs on the {len(train)} train prompts of {settings.rankings} are "
            f"{'up' if said.pop() else 'down'}, and no judgment is a preference",
            "Add rankings or thumbs of the other kind: the model learns only from differences.",
        )
    if not said:
        raise InputError(
            f"All judgments of the {len(train)} train prompts of {settings.rankings} are ties",
            "Collect preferences: a reward model learns nothing from ties alone.",
        )


def _have_scores(
    settings: RewardSettings, records: list[RankedPrompt], groups: list[Group]
) -> bool:
    """Whether all rankings have scores, or none; a mixture is refused, since scales differ."""
    rankings = [ranking for group in groups for ranking in group.rankings]
    scored = sum(bool(ranking.scores) for ranking in rankings)
    if 0 < scored < len(rankings):
        found = [r for record in records for r in record.rankings]
        kinds = {r.kind for r in found if r.scores} - {r.kind for r in found if not r.scores}
        chosen = " ".join(f"--kind {kind}" for kind in sorted(kinds))
        export = f"Export those with scores alone: rlhf export {chosen} --db DB --out DIR, or use"
        raise InputError(
            f"--loss regression needs one scale: of the training rankings in {settings.rankings}, "
            f"{scored} have scores and {len(rankings) - scored} have none",
            f"{export if kinds else 'Use'} a loss that needs only an order: --loss bradley_terry.",
        )
    return scored > 0


def _refuse_unknown_names(settings: RewardSettings, records: list[RankedPrompt]) -> None:
    rankings = [ranking for record in records for ranking in record.rankings]
    flags = {flag.partition("@")[0] for one in rankings for flag in one.flags if "@" in flag}
    absent = sorted(set(settings.data.thumbs_down_flags) - flags)
    if absent:
        raise ConfigError(
            f"--data.thumbs-down-flags names {', '.join(absent)}, which no response is flagged as",
            f"Responses are flagged as: {', '.join(sorted(flags)) or 'nothing'}.",
        )
    known = {ranking.annotator for ranking in rankings}
    named = settings.annotator_weights
    unknown = sorted(set(named) - known) if named != "auto" else []
    if unknown:
        raise ConfigError(
            f"--annotator-weights names {', '.join(unknown)}, who ranked nothing here",
            f"The annotators are: {', '.join(sorted(known))}.",
        )
