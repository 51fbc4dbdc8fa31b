"""Ranked datasets for the reward tests: sunny words beat rainy ones."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from reward.data.groups import Group
from reward.data.stored_groups import GroupFile, StoredGroups, to_batches
from reward.settings import RewardSettings
from rlhf.modeling.tokens import encode_prompt, encode_response
from rlhf.records.ranked import write_ranked
from rlhf.records.schema import Message, Prompt, RankedPrompt, Ranking, Response
from tests.settings import reward_settings

GOOD = ("Lovely, warm and happy!", "We loved the kind people.")
BAD = ("Awful, cold and sad.", "I hated the late train.")

MakeRecord = Callable[..., RankedPrompt]


def stored(groups: Iterable[Group]) -> StoredGroups:
    """Groups as training reads them; the pairs are those of the rankings."""
    return GroupFile(list(to_batches(("train", group) for group in groups))).of_use("train")


def build_record(
    number: int,
    split: str = "train",
    texts: tuple[str, ...] = (GOOD[0], GOOD[1], BAD[0], BAD[1]),
    tiers: tuple[tuple[int, ...], ...] = ((0,), (1,), (2, 3)),
    scores: tuple[float, ...] = (),
) -> RankedPrompt:
    """One prompt with responses and one ranking; tiers name responses by number."""
    question = f"How was trip {number}, the one to the {'very ' * (number % 5)}far house?"
    prompt = Prompt.create((Message(role="user", content=question),), split, "test")
    responses = tuple(
        Response(id=f"{prompt.id}-{n}", prompt_id=prompt.id, text=text, model="m")
        for n, text in enumerate(texts)
    )
    ranking = Ranking(
        id=f"{prompt.id}-r",
        prompt_id=prompt.id,
        annotator="ann",
        kind="human",
        tiers=tuple(tuple(responses[n].id for n in tier) for tier in tiers),
        scores=scores,
    )
    return RankedPrompt(prompt=prompt, responses=responses, rankings=(ranking,))


def thumbed(
    number: int, flags: dict[int, str], split: str = "train", annotator: str = "ann"
) -> RankedPrompt:
    """The same prompt with thumbs instead of a ranking: flags by the number of their response."""
    record = build_record(number, split)
    thumbs = tuple(
        Ranking(
            id=f"{record.prompt.id}-{place}-{annotator}",
            prompt_id=record.prompt.id,
            annotator=annotator,
            kind="human",
            tiers=((record.responses[place].id,),),
            flags=(flag,),
        )
        for place, flag in flags.items()
    )
    return replace(record, rankings=thumbs)


def export(folder: Path, records: Sequence[RankedPrompt]) -> Path:
    """Write an export; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_ranked(folder, records, {})
    return folder


def settings_for(rankings: Path, model: Path, out: Path, **changes: Any) -> RewardSettings:
    """Settings of a short training on a few prompts."""
    usual = {"precision": "fp32", "prompts_per_batch": 4, "tokens_per_batch": 400}
    values = {**usual, "learning_rate": 1e-3, **changes}
    return reward_settings(rankings=rankings, model=str(model), out=out, **values)


@pytest.fixture(scope="session")
def rankings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of 24 train and 8 test prompts."""
    records = [build_record(n, "test" if n % 4 == 0 else "train") for n in range(32)]
    return export(tmp_path_factory.mktemp("rankings"), records)


def sequences_of(
    records: list[RankedPrompt], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Token ids of every response of every record, each after its prompt."""
    return [
        encode_prompt(tokenizer, record.prompt) + encode_response(tokenizer, response, "")
        for record in records
        for response in record.responses
    ]


@pytest.fixture
def broken_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with a norm that is not a number."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    state = load_file(broken / "model.safetensors")
    state["model.norm.weight"] *= float("nan")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    return broken
