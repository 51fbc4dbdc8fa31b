"""The judges of an evaluation: a reward model, a function, another language model.

Every judge gives each prompt the fraction of comparisons that the policy won against another model.
Letters: P prompts, N responses of one model to each.
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
TextAndIds = tuple[str, tuple[int, ...]]  # of a response
PROMPTS_AT_ONCE = 32  # whose responses are scored before the bar moves
POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}


def score_with_reward(
    groups: Sequence[Sequence[ReferenceRow]],
    by_model: Mapping[str, ModelResponses],
    reward: Reward,
    pad_id: int,
    *,
    is_stored: bool = False,
) -> dict[str, Scores]:
    """Scores of every model's responses by the reward that the policy was trained against.

    All models' responses to a prompt are scored together, equal ones once: they are exact ties.

    Args:
        groups: the stored rows of each prompt.
        by_model: the responses.
        reward: scores those whose score is not known.
        pad_id: of the policy's tokenizer.
        is_stored: whether the stored rows have their scores by this reward already.
    """
    score_of = [_stored_scores(group) if is_stored else {} for group in groups]
    unscored = [
        [
            text_and_ids
            for text_and_ids in _distinct(by_model, index)
            if text_and_ids not in score_of[index]
        ]
        for index in range(len(groups))
    ]
    with progress("scoring responses", sum(map(len, unscored))) as bar:
        for first in range(0, len(groups), PROMPTS_AT_ONCE):
            batch = [
                (index, text_and_ids)
                for index in range(first, min(first + PROMPTS_AT_ONCE, len(groups)))
                for text_and_ids in unscored[index]
            ]
            if not batch:
                continue
            rows = [groups[index][0] for index, _ in batch]
            texts = [text for _, (text, _) in batch]
            pairs = zip(rows, batch, strict=True)
            ids = [[*row.prompt_ids, *token_ids] for row, (_, (_, token_ids)) in pairs]
            scores = reward([row.prompt for row in rows], texts, pad_right(ids, pad_id)).tolist()
            for (index, text_and_ids), value in zip(batch, scores, strict=True):
                score_of[index][text_and_ids] = value
            bar.advance(len(batch))
    return _by_model(by_model, score_of)


def _stored_scores(group: Sequence[ReferenceRow]) -> dict[TextAndIds, float]:
    scored = [(row, row.reward) for row in group]
    return {(row.text, tuple(row.response_ids)): r for row, r in scored if r is not None}


def score_with_gold(
    prompts: Sequence[Prompt], by_model: Mapping[str, ModelResponses], reward: TextReward
) -> dict[str, Scores]:
    """Scores of every model's responses by a judge that the policy was not trained against.

    All models' responses to a prompt are scored together, equal ones once.
    """
    distinct: list[dict[TextAndIds, Response]] = [{} for _ in prompts]
    for model in by_model.values():
        for index, responses in enumerate(model.responses(prompts)):
            for text_and_ids, response in zip(_texts_and_ids(model, index), responses, strict=True):
                distinct[index].setdefault(text_and_ids, replace(response, text=text_and_ids[0]))
    scores = reward(
        [(prompt, tuple(of.values())) for prompt, of in zip(prompts, distinct, strict=True)]
    )
    score_of = [dict(zip(*both, strict=True)) for both in zip(distinct, scores, strict=True)]
    return _by_model(by_model, score_of)


def _texts_and_ids(model: ModelResponses, index: int) -> list[TextAndIds]:
    both = zip(model.texts[index], model.samples[index], strict=True)
    return [(text, tuple(sample.token_ids)) for text, sample in both]


def _distinct(by_model: Mapping[str, ModelResponses], index: int) -> list[TextAndIds]:
    every = [pair for model in by_model.values() for pair in _texts_and_ids(model, index)]
    return list(dict.fromkeys(every))


def _by_model(
    by_model: Mapping[str, ModelResponses], score_of: Sequence[Mapping[TextAndIds, float]]
) -> dict[str, Scores]:
    """The scores of each model's responses, given for each prompt the score of every response."""
    return {
        name: np.array(
            [
                [scores[text_and_ids] for text_and_ids in _texts_and_ids(model, index)]
                for index, scores in enumerate(score_of)
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
            (whole_text(prompt), our_texts[0], their_texts[0])
            for prompt, our_texts, their_texts in zip(
                prompts, ours.texts, theirs.texts, strict=True
            )
        ]
        orders = [
            *pairs,
            *((prompt, their_text, our_text) for prompt, our_text, their_text in pairs),
        ]
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
            futures = [pool.submit(ask, *question) for question in todo.items()]
            for future in as_completed(futures):
                future.result()
                bar.advance()
        return [answers[key] for key in keys]
