"""Heads on the frozen model: its features are computed once, and every fit is a second's work.

As `rlhf train-reward --head fitted --epochs 0` fits them; experiments whose configurations name the
same folder of `features` share what was computed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from examples.evidence.commands import Config
from examples.evidence.human_labels.ethics import is_bare
from reward.data.groups import Group, rank_pairs
from reward.losses import Objective
from reward.scoring.texts import Features as Reader
from reward.scoring.texts import load_features
from reward.training.fit_head import WEIGHT_PENALTY, fit_weight
from rlhf.modeling.models import describe_model, new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start_alone
from rlhf.records.jsonl import new_file
from rlhf.records.schema import RankedPrompt, content_id

Array = NDArray[np.float64]
Features = Mapping[str, Array]  # of every text, by response id
TOKENS = 1024  # in one forward pass
CHUNK = 256  # prompts, after which features are kept


def one_a_prefix(pairs: Sequence[Config]) -> list[Config]:
    """One pair of every prefix, no bare ones: each is a prompt and a task of its own."""
    return list({pair["prefix"]: pair for pair in pairs if not is_bare(pair)}.values())


def read_features(config: Config, records: Sequence[RankedPrompt]) -> Features:
    """The head's input for every text, by the frozen model."""
    folder = Path(config["features"])
    folder.mkdir(parents=True, exist_ok=True)
    model = describe_model(config["model"])["hash"]
    read: Reader | None = None
    features: dict[str, Array] = {}
    for start in range(0, len(records), CHUNK):
        chunk = records[start : start + CHUNK]
        texts = [[record.prompt.id, *(r.text for r in record.responses)] for record in chunk]
        file = folder / f"{content_id(model, config['precision'], texts)}.npy"
        if not file.exists():
            read = read or load_frozen(config)
            chunk_features = read([(record.prompt, record.responses) for record in chunk])
            with new_file(file) as partial, partial.open("wb") as stream:
                np.save(stream, np.concatenate([rows.numpy() for rows, _ in chunk_features]))
        ids = [response.id for record in chunk for response in record.responses]
        features |= zip(ids, np.load(file).astype(np.float64), strict=True)
    return features


def load_frozen(config: Config) -> Reader:
    """A reader of features by the model of a configuration."""
    tokenizer = load_tokenizer(config["model"])
    with TemporaryDirectory() as folder:
        fresh = new_reward_model(config["model"], int(tokenizer.pad_token_id), 0)
        save_model(fresh, tokenizer, Path(folder) / "model")
        accelerator = start_alone(config["precision"], 0)
        return load_features(f"{folder}/model", accelerator, TOKENS)


def fit_head(
    records: Sequence[RankedPrompt], features: Features, weights: Mapping[str, float] | None = None
) -> Array:
    """The head that fits all rankings best.

    Args:
        records: with rankings.
        features: of their texts.
        weights: of annotators; 1 unless given, and 0 leaves one out.
    """
    known = weights or {}
    groups = []
    for record in records:
        index_of = {response.id: number for number, response in enumerate(record.responses)}
        weighed = [(ranking, known.get(ranking.annotator, 1.0)) for ranking in record.rankings]
        pairs = tuple(
            p for ranking, w in weighed if w > 0 for p in rank_pairs(ranking, index_of, w)
        )
        groups.append(Group(record.prompt.id, (), ((),) * len(index_of), pairs))
    rows = [features[response.id] for record in records for response in record.responses]
    weight = fit_weight(torch.tensor(np.array(rows)), groups, Objective(), WEIGHT_PENALTY)
    return np.asarray(weight, dtype=np.float64)


def share_right(record: RankedPrompt, features: Features, head: Array) -> float:
    """The share of a prompt's judgments that a head orders as people did."""
    tiers = [ranking.tiers for ranking in record.rankings]
    gaps = [(features[best] - features[worst]) @ head for (best,), (worst,) in tiers]
    return float(np.mean(np.greater(gaps, 0)))
