"""The quickstart's own prompts and its signal are what the demo relies on."""

import re
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest

from rlhf.endpoints.signals import Signal, load_signal
from rlhf.records.jsonl import read_jsonl
from rlhf.records.schema import Message, Prompt

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "examples" / "quickstart"
ENDING = " Answer in one short sentence."


@pytest.fixture
def score(monkeypatch) -> Signal:
    monkeypatch.chdir(REPOSITORY)
    return load_signal("examples.quickstart.sentiment:score")


def read(name: str) -> list[Prompt]:
    return [
        Prompt.create((Message(role="user", content=row["prompt"]),), row["split"], row["source"])
        for row in read_jsonl(QUICKSTART / name)
    ]


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return read("prompts.jsonl")


@pytest.fixture(scope="module")
def validation() -> list[Prompt]:
    return read("validation.jsonl")


def question(prompt: Prompt) -> str:
    return prompt.messages[-1].content.removesuffix(ENDING)


def test_counts_and_sources_of_the_three_splits(prompts, validation) -> None:
    for size, found in (
        (20, [prompt for prompt in prompts if prompt.split == "train"]),
        (5, [prompt for prompt in prompts if prompt.split == "test"]),
        (4, validation),
    ):
        by_source = Counter(prompt.source for prompt in found)
        assert len(by_source) == 13
        assert set(by_source.values()) == {size}
    assert {prompt.split for prompt in validation} == {"test"}  # for a run of its own


def test_each_prompt_is_one_short_question_that_asks_for_one_sentence(prompts, validation) -> None:
    for prompt in prompts + validation:
        assert prompt.messages[-1].content.endswith(ENDING)
        assert 5 <= len(question(prompt).split()) <= 20, question(prompt)
    assert len({prompt.id for prompt in prompts + validation}) == len(prompts) + len(validation)


def test_no_prompt_is_nearly_one_of_another_split(prompts, validation) -> None:
    splits = [[p for p in prompts if p.split == split] for split in ("train", "test")]
    words = {p.id: set(re.findall(r"\w+", question(p).lower())) for p in prompts + validation}
    for one, other in combinations([*splits, validation], 2):
        for first, second in product(one, other):
            ours, theirs = words[first.id], words[second.id]
            overlap = len(ours & theirs) / len(ours | theirs)
            assert overlap < 0.55, (question(first), question(second))


def test_prompts_do_not_force_a_sentiment(prompts, validation, score) -> None:
    scores = {question(p): score("", p.messages[-1].content) for p in prompts + validation}
    assert {text: value for text, value in scores.items() if abs(value) > 0.65} == {}


@pytest.mark.parametrize(
    ("response", "low", "high"),
    [
        ("I love it, what a wonderful day!", 0.8, 1.0),
        ("It was awful and I hated every minute.", -1.0, -0.6),
        ("The table is brown.", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_signal_follows_the_tone_of_the_response_alone(score, response, low, high) -> None:
    assert low <= score("What a lovely, happy question!", response) <= high


def test_the_signal_reads_a_huge_answer(score) -> None:
    assert -1 <= score("", "good <script> ${x} \u202e " * 4_000) <= 1
