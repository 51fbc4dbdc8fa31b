"""A judge model that is asked many questions at once, and fails in the middle of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from policies.evaluate.judges import AIJudge, score_with_gold, score_with_reward
from policies.evaluate.responses import ModelResponses
from policies.rewards import load_reward
from policies.sampling.generate import Sample
from reward.scoring.texts import load_text_reward
from rlhf.endpoints.judge import Endpoint
from rlhf.errors import InterruptedRunError
from rlhf.parallel.distributed import start
from rlhf.records.schema import Message, Prompt, Sampling
from tests.policies.stores import MODEL, build_row
from tests.servers.judge import JudgeServer

NUM_PROMPTS = 6


def answers(text: str) -> ModelResponses:
    rows = range(NUM_PROMPTS)
    return ModelResponses(
        {}, [[Sample([7], True)] for _ in rows], [[f"{text} {n}"] for n in rows], Sampling()
    )


def test_a_question_that_fails_takes_no_answered_one_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.endpoints.retries.time.sleep", lambda seconds: None)
    messages = [(Message(role="user", content=f"Question {n}?"),) for n in range(NUM_PROMPTS)]
    prompts = [Prompt.create(one, "test", "") for one in messages]
    log = tmp_path / "judge.jsonl"
    with JudgeServer() as server:
        endpoint = Endpoint(url=server.url, model="m")
        judge = AIJudge(endpoint=endpoint, rubric="", parallel=3, log=log)
        # asked in two orders, it keeps two workers waiting until the third has done the rest
        server.absent_to, server.absent_after = "Question 0?", 2 * NUM_PROMPTS - 2
        with pytest.raises(InterruptedRunError):
            judge.wins(prompts, answers("a long answer"), answers("short"))
        asked = [json.loads(line)["request"][0]["content"] for line in log.read_text().splitlines()]
        assert len(asked) == 2 * NUM_PROMPTS - 2
        assert not any("Question 0?" in words for words in asked)
        server.absent_to, server.calls = "", []
        wins = judge.wins(prompts, answers("a long answer"), answers("short"))
        assert wins.tolist() == [1.0] * NUM_PROMPTS
        assert len(server.calls) == 2


def test_a_judge_is_told_what_the_system_turn_says(tmp_path: Path) -> None:
    turns = (Message(role="system", content="Be brief."), Message(role="user", content="Why?"))
    with JudgeServer() as server:
        endpoint = Endpoint(url=server.url, model="m")
        judge = AIJudge(endpoint=endpoint, rubric="", parallel=1, log=tmp_path / "judge.jsonl")
        prompts = [Prompt.create(turns, "test", "")] * NUM_PROMPTS
        judge.wins(prompts, answers("long"), answers("short"))
    lines = (tmp_path / "judge.jsonl").read_text().splitlines()
    asked = [json.loads(line)["request"][0]["content"] for line in lines]
    assert all("# Request\nBe brief.\n\nWhy?" in words for words in asked)


def test_the_same_answer_of_two_models_is_an_exact_tie() -> None:
    """The function gives every call another number: a response that is asked twice would differ."""
    name = "signal:tests.pipeline.signals:count_calls"
    accelerator = start("fp32", 0)
    rows = [build_row(number, 0, "test") for number in range(40)]
    same, other = answers("the same"), answers("another")

    def of_rows(*by_sample: ModelResponses) -> ModelResponses:
        samples = [[one.samples[0][0] for one in by_sample] for _ in rows]
        texts = [[f"{one.texts[0][0]} {row.text}" for one in by_sample] for row in rows]
        return ModelResponses(MODEL, samples, texts, Sampling())

    by_model = {"reference": of_rows(same, other), "policy": of_rows(other, other)}
    by_reward = score_with_reward(
        [(row,) for row in rows], by_model, load_reward([name], accelerator), 0
    )
    gold = load_text_reward(name, accelerator, 100)
    by_gold = score_with_gold([row.prompt for row in rows], by_model, gold)
    for scores in (by_reward, by_gold):
        shapes = {model: found.shape for model, found in scores.items()}
        assert shapes == {"reference": (40, 2), "policy": (40, 2)}
        first, second = scores["reference"].T
        # two calls for each prompt, one prompt after the other
        assert second.tolist() == (first + 1).tolist()
        assert first.tolist() == (first[0] + 2 * np.arange(40)).tolist()
        assert (scores["policy"] == second[:, None]).all()


def test_stored_rewards_are_not_computed_again() -> None:
    """The function gives its number of calls: only the policy's own answer may ask it."""
    reward = load_reward(["signal:tests.pipeline.signals:count_calls"], start("fp32", 0))
    groups = [(build_row(number, 0, "test", reward=-1.5),) for number in range(40)]
    samples = [[Sample(group[0].response_ids, True)] for group in groups]
    stored = [[group[0].text] for group in groups]
    texts = [stored[0], *([f"new {number}"] for number in range(1, 40))]
    by_model = {
        "reference": ModelResponses(MODEL, samples, stored, Sampling()),
        "policy": ModelResponses(MODEL, samples, texts, Sampling()),
    }
    scores = score_with_reward(groups, by_model, reward, 0, is_stored=True)
    assert (scores["reference"] == -1.5).all()
    first, *others = scores["policy"][:, 0].tolist()
    assert first == -1.5  # the stored answer word for word
    assert others == [others[0] + turn for turn in range(39)]
