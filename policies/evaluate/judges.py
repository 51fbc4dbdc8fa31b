"""The judges of an evaluation: a reward model, a function, another language model.

Every judge gives each prompt the fraction of comparisons that the policy won against another model.
Letters: P prompts, N answers of one model to each.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from policies.evaluate.answers import ModelAnswers
from policies.reference.store import ReferenceRow
from policies.rewards import Reward
from reward.scoring.texts import TextReward
from rlhf.endpoints.judge import Endpoint, build_request, combine_verdicts, complete, read_verdict
from rlhf.endpoints.urls import RequestPool
from rlhf.modeling.tokens import pad_right
from rlhf.records.fingerprints import text_hash
from rlhf.records.jsonl import write_jsonl
from rlhf.records.schema import Prompt
from rlhf.run.metrics import append_metrics, progress, read_metrics

Scores = Float[ndarray, "P N"]
Messages = list[dict[str, str]]
POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}


def score_with_reward(
    rows: Sequence[ReferenceRow], by_model: Mapping[str, ModelAnswers], reward: Reward, pad_id: int
) -> dict[str, Scores]:
    """Scores of every model's answers by the reward that the policy was trained against."""
    scores = {}
    total = sum(len(texts) for model in by_model.values() for texts in model.texts)
    with progress("scoring answers", total) as bar:
        for name, model in by_model.items():
            answers = [
                (row.prompt, text, row.prompt_ids + sample.token_ids)
                for row, texts, samples in zip(rows, model.texts, model.samples, strict=True)
                for text, sample in zip(texts, samples, strict=True)
            ]
            prompts, texts, ids = zip(*answers, strict=True)
            flat = reward(prompts, texts, pad_right(ids, pad_id)).tolist()
            scores[name] = np.array(flat).reshape(len(rows), -1)
            bar.advance(len(answers))
    return scores


def score_with_gold(
    prompts: Sequence[Prompt], by_model: Mapping[str, ModelAnswers], reward: TextReward
) -> dict[str, Scores]:
    """Scores of every model's answers by a judge that the policy was not trained against."""
    scores = {}
    for name, model in by_model.items():
        answers = [
            (prompt, tuple(replace(r, text=t) for r, t in zip(responses, texts, strict=True)))
            for prompt, responses, texts in zip(
                prompts, model.responses(prompts), model.texts, strict=True
            )
        ]
        scores[name] = np.array(reward(answers))
    return scores


def try_judge(endpoint: Endpoint) -> None:
    """Send one test request, so that a broken endpoint fails before hours of sampling.

    Raises:
        InputError: the endpoint refuses it or answers in another protocol.
        InterruptedRunError: nobody answers.
    """
    complete(endpoint, build_request("Which is a fruit?", "An apple.", "A stone.", rubric=""))


@dataclass(frozen=True, kw_only=True)
class AIJudge:
    """A judge model that is asked about the first answers of two models, in both orders.

    `log` stores every request with its answer; logged requests are not sent again.
    """

    endpoint: Endpoint
    rubric: str
    parallel: int
    log: Path

    def wins(
        self, prompts: Sequence[Prompt], ours: ModelAnswers, theirs: ModelAnswers
    ) -> Float[ndarray, " P"]:
        """1, ½ or 0 for each prompt; NaN where the judge was unclear.

        Raises:
            InputError: the endpoint refuses the request.
            InterruptedRunError: it does not answer; what was asked so far is kept.
        """
        pairs = [
            (prompt.text, mine[0], other[0])
            for prompt, mine, other in zip(prompts, ours.texts, theirs.texts, strict=True)
        ]
        orders = [*pairs, *((prompt, other, mine) for prompt, mine, other in pairs)]
        requests = [build_request(*order, self.rubric) for order in orders]
        verdicts = [read_verdict(answer) for answer in self._ask(requests)]
        both = zip(verdicts[: len(pairs)], verdicts[len(pairs) :], strict=True)
        combined = [combine_verdicts(there, back) for there, back in both]
        return np.array([POINTS[verdict] if verdict else np.nan for verdict in combined])

    def _ask(self, requests: Sequence[Messages]) -> list[str]:
        """The judge's answer to every request, in the order of the requests."""
        calls = read_metrics(self.log)
        write_jsonl(self.log, calls)  # a kill may have cut the last line
        answers = {call["key"]: call["answer"] for call in calls}
        keys = [text_hash(f"{self.endpoint.model}\n{json.dumps(r)}") for r in requests]
        todo = {k: r for k, r in zip(keys, requests, strict=True) if k not in answers}
        writing = Lock()

        def ask(key: str, request: Messages) -> None:
            answer = complete(self.endpoint, request)
            call = {"key": key, "model": self.endpoint.model, "request": request}
            with (
                writing
            ):  # write at once, so that a failed or hanging request loses no other answer
                answers[key] = answer
                append_metrics(self.log, {**call, "answer": answer})

        with RequestPool(self.parallel) as pool, progress("asking the judge", len(todo)) as bar:
            asked = [pool.submit(ask, *question) for question in todo.items()]
            for one in as_completed(asked):
                one.result()
                bar.advance()
        return [answers[key] for key in keys]
