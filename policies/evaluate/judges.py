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

from policies.evaluate.responses import ModelResponses
from policies.reference.store import ReferenceRow
from policies.rewards import Reward
from reward.scoring.texts import TextReward
from rlhf.endpoints.judge import Endpoint, build_request, combine_verdicts, complete, read_verdict
from rlhf.endpoints.urls import RequestPool
from rlhf.modeling.tokens import pad_right
from rlhf.records.fingerprints import text_hash
from rlhf.records.jsonl import write_jsonl
from rlhf.records.schema import Prompt, Response
from rlhf.records.wording import whole_text
from rlhf.run.metrics import append_metrics, progress, read_metrics

Scores = Float[ndarray, "P N"]
Messages = list[dict[str, str]]
Answer = tuple[str, tuple[int, ...]]  # its text and token ids
PROMPTS_AT_ONCE = 32  # whose answers are scored before the bar moves
POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}


def score_with_reward(
    groups: Sequence[Sequence[ReferenceRow]],
    by_model: Mapping[str, ModelResponses],
    reward: Reward,
    pad_id: int,
    *,
    is_stored: bool = False,
) -> dict[str, Scores]:
    """Scores of every model's answers by the reward that the policy was trained against.

    All models' answers to a prompt are scored together, equal ones once: they are exact ties.

    Args:
        groups: the stored rows of each prompt.
        by_model: the answers.
        reward: scores those whose score is not known.
        pad_id: of the policy's tokenizer.
        is_stored: whether the stored rows have their scores by this reward already.
    """
    score_of = [_stored_scores(group) if is_stored else {} for group in groups]
    answers = [
        [one for one in _distinct(by_model, place) if one not in score_of[place]]
        for place in range(len(groups))
    ]
    with progress("scoring responses", sum(map(len, answers))) as bar:
        for first in range(0, len(groups), PROMPTS_AT_ONCE):
            asked = [
                (place, answer)
                for place in range(first, min(first + PROMPTS_AT_ONCE, len(groups)))
                for answer in answers[place]
            ]
            if not asked:
                continue
            rows = [groups[place][0] for place, _ in asked]
            texts = [text for _, (text, _) in asked]
            pairs = zip(rows, asked, strict=True)
            ids = [[*row.prompt_ids, *token_ids] for row, (_, (_, token_ids)) in pairs]
            scores = reward([row.prompt for row in rows], texts, pad_right(ids, pad_id)).tolist()
            for (place, answer), value in zip(asked, scores, strict=True):
                score_of[place][answer] = value
            bar.advance(len(asked))
    return _by_model(by_model, score_of)


def _stored_scores(group: Sequence[ReferenceRow]) -> dict[Answer, float]:
    scored = [(row, row.reward) for row in group]
    return {(row.text, tuple(row.response_ids)): r for row, r in scored if r is not None}


def score_with_gold(
    prompts: Sequence[Prompt], by_model: Mapping[str, ModelResponses], reward: TextReward
) -> dict[str, Scores]:
    """Scores of every model's answers by a judge that the policy was not trained against.

    All models' answers to a prompt are scored together, equal ones once.
    """
    asked: list[dict[Answer, Response]] = [{} for _ in prompts]
    for model in by_model.values():
        for place, responses in enumerate(model.responses(prompts)):
            for answer, response in zip(_answers(model, place), responses, strict=True):
                asked[place].setdefault(answer, replace(response, text=answer[0]))
    scores = reward(
        [(prompt, tuple(of.values())) for prompt, of in zip(prompts, asked, strict=True)]
    )
    score_of = [dict(zip(*both, strict=True)) for both in zip(asked, scores, strict=True)]
    return _by_model(by_model, score_of)


def _answers(model: ModelResponses, place: int) -> list[Answer]:
    both = zip(model.texts[place], model.samples[place], strict=True)
    return [(text, tuple(sample.token_ids)) for text, sample in both]


def _distinct(by_model: Mapping[str, ModelResponses], place: int) -> list[Answer]:
    answers = [one for model in by_model.values() for one in _answers(model, place)]
    return list(dict.fromkeys(answers))


def _by_model(
    by_model: Mapping[str, ModelResponses], score_of: Sequence[Mapping[Answer, float]]
) -> dict[str, Scores]:
    """The scores of each model's answers, given for each prompt the score of every answer."""
    return {
        name: np.array(
            [
                [scores[answer] for answer in _answers(model, place)]
                for place, scores in enumerate(score_of)
            ]
        )
        for name, model in by_model.items()
    }


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
        self, prompts: Sequence[Prompt], ours: ModelResponses, theirs: ModelResponses
    ) -> Float[ndarray, " P"]:
        """1, ½ or 0 for each prompt; NaN where the judge was unclear.

        Raises:
            InputError: the endpoint refuses the request.
            InterruptedRunError: it does not answer; what was asked so far is kept.
        """
        pairs = [
            (whole_text(prompt), mine[0], other[0])
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
