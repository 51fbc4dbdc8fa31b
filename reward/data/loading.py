"""From an export folder to groups for training, for measuring and for the scale of rewards."""

import sys
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from reward.data.annotators import AnnotatorWeights
from reward.data.cache import REFERENCE, CachedGroups, read_groups
from reward.data.groups import Group
from reward.data.stored_groups import StoredGroups
from reward.settings import RewardSettings
from rlhf.config import part_of
from rlhf.config.paths import with_changes
from rlhf.errors import InputError
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.models import context_length, describe_for_all, is_reward_model, load_config
from rlhf.modeling.readers import load_reader, tokenizer_of
from rlhf.parallel.distributed import on_main
from rlhf.records.ranked import read_manifest

SMALLEST_SPREAD = 1e-12  # of the largest score; less is rounding


@dataclass(frozen=True)
class Data:
    """Groups by their use, where the held-out ones come from, and counts for the report.

    Evaluations during training use `validation`, since they choose the weights; `held_out` measures
    the result. Those of `train` stay in their file, the others are in memory.
    """

    train: StoredGroups
    validation: list[Group]
    held_out: list[Group]
    reference: list[Group]
    held_out_source: str
    counts: dict[str, dict[str, int]]
    annotators: AnnotatorWeights


def describe_inputs(settings: RewardSettings) -> dict[str, dict[str, str]]:
    """Rankings and model with their hashes, as stage.json records them; all processes call this.

    Raises:
        InputError: there is no such model, or no export.
    """
    manifest = on_main(lambda: read_manifest(settings.rankings))
    rankings = {"path": str(settings.rankings), "hash": str(manifest["content_hash"])}
    return {
        "rankings": rankings,
        "model": describe_for_all(settings.model, settings.chat_template_kwargs),
    }


def read_data(
    settings: RewardSettings, tokenizer: PreTrainedTokenizerBase, model_fingerprint: str
) -> Data:
    """Read, encode and split the rankings; for a regression, standardize their scores.

    Raises:
        InputError: too few judgments to train or to measure, scores that cannot be targets, or
            judgments that `estimate_weights`, `encode_records`, `refuse_repeated` or
            `refuse_too_long` refuse.
    """
    length = min(settings.data.max_length, read_context(settings.model))
    cached = read_groups(settings, tokenizer, model_fingerprint, length)
    train, held_out, source = cached.of("train"), cached.of("test"), "test prompts"
    counts = cached.counts
    leaked = np.isin(held_out.numbers("same_prompt"), train.numbers("same_prompt"))
    if leaked.any():  # prompts that were trained on cannot measure
        held_out = held_out.select(np.flatnonzero(~leaked))
        counts["test"]["prompts_also_in_train"] = int(leaked.sum())
    measured = list(held_out)
    if not _can_measure(held_out, train) and len(train) > 1:
        lacking = "'s test prompts have no pairs" if measured else " has no judged test prompts"
        train, aside = hold_out(train, settings.evaluation.held_out_fraction)
        source = f"train prompts set aside, because the export{lacking}"
        measured += aside
    wanted = part_of("data.limit", settings.data.limit, len(train))
    if wanted < len(train):
        counts["train"]["prompts_beyond_limit"] = len(train) - wanted
    train, validation = _take_train(settings, train, wanted)
    _require_judgments(settings, cached.prompts, train, measured)
    if settings.evaluation.every and not len(validation):
        raise InputError(
            f"--evaluation.every {settings.evaluation.every} sets train prompts aside, and the "
            f"{len(train)} of {settings.rankings} are too few",
            "Leave --evaluation.every out, or judge responses of more prompts.",
        )
    if settings.loss == "regression" and _have_scores(settings, cached, train, validation):
        train, validation = standardize_scores(train, validation)
    return Data(
        train=train,
        validation=list(validation),
        held_out=measured,
        reference=list(cached.of(REFERENCE)),
        held_out_source=source,
        counts=counts,
        annotators=cached.annotators,
    )


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
    settings: RewardSettings, groups: StoredGroups, wanted: int
) -> tuple[StoredGroups, StoredGroups]:
    """Of `wanted` groups, those to train on and those that `--evaluation.every` sets aside.

    All groups are split before the limit applies: none is set aside under one limit and trained on
    under another.
    """
    train, validation, aside = groups, groups[:0], 0
    if settings.evaluation.every:
        train, validation = hold_out(groups, settings.evaluation.held_out_fraction)
        aside = num_held_out(wanted, settings.evaluation.held_out_fraction)
    if wanted >= len(groups):
        return train, validation
    return train.take_part(wanted - aside), validation.take_part(aside)


def hold_out(groups: StoredGroups, fraction: float) -> tuple[StoredGroups, StoredGroups]:
    """Split groups into training and held-out ones by a hash of the prompt id.

    Groups with pairs and groups with thumbs alone are split separately, so that both can be
    measured; the only prompt of its kind is trained on. Equal prompts under several ids stay on the
    same side.
    """
    prompts, compared = groups.numbers("same_prompt"), groups.numbers("pairs") > 0
    chosen = [np.zeros(0, dtype=prompts.dtype)]
    for kind in (np.flatnonzero(compared), np.flatnonzero(~compared)):
        if len(np.unique(prompts[kind])) > 1:
            part = groups.select(kind).indices_of_part(num_held_out(len(kind), fraction))
            chosen.append(prompts[kind[part]])
    aside = np.isin(prompts, np.concatenate(chosen))
    return groups.select(np.flatnonzero(~aside)), groups.select(np.flatnonzero(aside))


def num_held_out(number: int, fraction: float) -> int:
    """The number of held-out prompts: at least one."""
    return max(1, round(number * fraction))


def standardize_scores(
    train: StoredGroups, others: StoredGroups
) -> tuple[StoredGroups, StoredGroups]:
    """Both with scores that have mean 0 and standard deviation 1 over the rankings of `train`.

    s → (s − mean) / deviation, where every score of every ranking counts once.

    Raises:
        InputError: the scores of `train` are all the same.
    """
    scores = train.scores()
    mean, deviation = float(scores.mean()), float(scores.std())
    if not deviation > SMALLEST_SPREAD * np.abs(scores).max():
        raise InputError(
            f"The {len(scores)} scores of the training rankings are all {mean:g}",
            "Give scores that differ, or use a loss that needs only an order: "
            "--loss bradley_terry.",
        )
    return train.with_scale(mean, deviation), others.with_scale(mean, deviation)


def _can_measure(held_out: StoredGroups, train: StoredGroups) -> bool:
    """Whether groups are held out, with pairs if there are pairs to train on."""
    compared = held_out.numbers("pairs").any()
    return bool(compared or (len(held_out) and not train.numbers("pairs").any()))


def _require_judgments(
    settings: RewardSettings, prompts: int, train: StoredGroups, held_out: list[Group]
) -> None:
    if not len(train) or not held_out:
        remedy = "Rank two or more responses of more prompts, then: rlhf export --db DB --out DIR"
        limit = settings.data.limit
        if limit != "100%":
            remedy = f"Raise --data.limit (now {limit}), or rank responses of more prompts."
        raise InputError(
            f"{settings.rankings} has {prompts} prompts, but too few with a judged pair or thumb: "
            f"{len(train)} to train on, {len(held_out)} to measure with",
            remedy,
        )
    if train.numbers("preferences").any():
        return
    verdicts = {
        judgment.is_good for group in train.with_pointwise() for judgment in group.pointwise
    }
    if len(verdicts) == 1:
        raise InputError(
            f"All thumbs on the {len(train)} train prompts of {settings.rankings} are "
            f"{'up' if verdicts.pop() else 'down'}, and no judgment is a preference",
            "Add rankings or thumbs of the other kind: the model learns only from differences.",
        )
    if not verdicts:
        raise InputError(
            f"All judgments of the {len(train)} train prompts of {settings.rankings} are ties",
            "Collect preferences: a reward model learns nothing from ties alone.",
        )


def _have_scores(settings: RewardSettings, cached: CachedGroups, *used: StoredGroups) -> bool:
    """Whether all rankings have scores, or none; a mixture is refused, since scales differ."""
    rankings = sum(int(groups.numbers("rankings").sum()) for groups in used)
    scored = sum(int(groups.numbers("scored").sum()) for groups in used)
    if 0 < scored < rankings:
        kinds = set(cached.kinds["with_scores"]) - set(cached.kinds["without_scores"])
        chosen = " ".join(f"--kind {kind}" for kind in sorted(kinds))
        export = f"Export those with scores alone: rlhf export {chosen} --db DB --out DIR, or use"
        raise InputError(
            f"--loss regression needs one scale: of the training rankings in {settings.rankings}, "
            f"{scored} have scores and {rankings - scored} have none",
            f"{export if kinds else 'Use'} a loss that needs only an order: --loss bradley_terry.",
        )
    return scored > 0
