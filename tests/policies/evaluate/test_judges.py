"""A judge model that is asked many questions at once, and fails in the middle of them."""

import json
from pathlib import Path

import pytest

from policies.evaluate.answers import ModelAnswers
from policies.evaluate.judges import AIJudge
from policies.sampling.generate import Sample
from rlhf.endpoints.judge import Endpoint
from rlhf.errors import InterruptedRunError
from rlhf.records.schema import Message, Prompt, Sampling
from tests.servers.judge import JudgeServer

NUM_PROMPTS = 6


def answers(text: str) -> ModelAnswers:
    rows = range(NUM_PROMPTS)
    return ModelAnswers(
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
