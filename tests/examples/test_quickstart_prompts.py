"""The quickstart's own prompts and its signal are what the demo relies on."""

import re
from collections import Counter
from pathlib import Path

import pytest

from rlhf.endpoints.signals import Signal, load_signal
from rlhf.records.jsonl import read_jsonl
from rlhf.records.schema import Prompt

REPOSITORY = Path(__file__).parents[2]
PROMPTS = REPOSITORY / "examples" / "quickstart" / "prompts.jsonl"


@pytest.fixture
def score(monkeypatch) -> Signal:
    monkeypatch.chdir(REPOSITORY)
    return load_signal("examples.quickstart.sentiment:score")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return [Prompt.from_json(row) for row in read_jsonl(PROMPTS)]


def test_counts_and_sources_of_both_splits(prompts) -> None:
    assert Counter(prompt.split for prompt in prompts) == {"train": 512, "test": 64}
    by_source = Counter((prompt.source, prompt.split) for prompt in prompts)
    sources = {source for source, _ in by_source}
    assert len(sources) == 16
    assert {by_source[source, "train"] for source in sources} == {32}
    assert {by_source[source, "test"] for source in sources} == {4}


def test_each_prompt_is_a_short_question_after_the_same_instruction(prompts) -> None:
    for prompt in prompts:
        roles = [message.role for message in prompt.messages]
        assert roles == ["system", "user", "assistant", "user"]
        assert prompt.messages[:3] == prompts[0].messages[:3]
        assert 6 <= len(prompt.messages[-1].content.split()) <= 20, prompt.messages[-1].content
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_no_test_prompt_is_nearly_a_training_prompt(prompts) -> None:
    words = {p.id: set(re.findall(r"\w+", p.messages[-1].content.lower())) for p in prompts}
    train = [prompt for prompt in prompts if prompt.split == "train"]
    for held_out in (prompt for prompt in prompts if prompt.split == "test"):
        for other in train:
            ours, theirs = words[held_out.id], words[other.id]
            overlap = len(ours & theirs) / len(ours | theirs)
            assert overlap < 0.55, (held_out.messages[-1].content, other.messages[-1].content)


def test_prompts_do_not_force_a_sentiment(prompts, score) -> None:
    charged = {
        p.messages[-1].content: score("", p.messages[-1].content)
        for p in prompts
        if abs(score("", p.messages[-1].content)) > 0.65
    }
    assert charged == {}


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
