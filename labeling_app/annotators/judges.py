"""Rankings by a judge model behind an OpenAI-compatible endpoint; their kind is `ai`, never human.

Every pair of responses is asked in both orders; when the two answers disagree, the pair is a tie.
Pairs that fit one order become one ranking, the rest stay rankings of two (as in imports). Every
call is stored with its request and answer, so an interrupted run resumes where it stopped.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from itertools import combinations
from typing import Any

from labeling_app.annotators.signals import records_of
from labeling_app.db.judge_log import JudgeLog
from labeling_app.db.store import Store
from labeling_app.rankings.agreement import mean_interval, pair_agreement
from labeling_app.rankings.tiers import judgments_of_pairs
from rlhf.endpoints.judge import Endpoint, build_request, combine_verdicts, complete, read_verdict
from rlhf.endpoints.urls import RequestPool
from rlhf.records.schema import RankedPrompt, Ranking, content_id
from rlhf.records.wording import whole_text


def annotate_with_judge(
    store: Store, endpoint: Endpoint, *, name: str, rubric: str, parallel: int
) -> dict[str, Any]:
    """Rank the responses of every prompt by a judge model, except those it has ranked before.

    Returns:
        Counts, and the judge's agreement with people and with gold answers.

    Raises:
        InputError: nothing to rank, or the endpoint refuses the request.
        InterruptedRunError: the endpoint does not answer; what was asked so far is kept.
    """
    counts = {"ranked": 0, "ranked_before": 0, "too_few_responses": 0, "unclear_pairs": 0}
    log = JudgeLog(store, name, store.add_rubric(rubric) if rubric else "")
    with RequestPool(parallel) as pool:
        for record in records_of(store, name):
            ids = {response.id for response in record.responses}
            if len(ids) < 2:
                counts["too_few_responses"] += 1
            elif log.is_finished(ids):
                counts["ranked_before"] += 1
            else:
                unclear = _judge(store, log, pool, record, lambda m: complete(endpoint, m), rubric)
                counts["ranked"] += 1
                counts["unclear_pairs"] += unclear
    return {**counts, "calibration": calibration(store, log)}


def _judge(
    store: Store,
    log: JudgeLog,
    pool: Executor,
    record: RankedPrompt,
    answer_to: Callable[[list[dict[str, str]]], str],
    rubric: str,
) -> int:
    """Judge one prompt and store its rankings. Returns how many pairs were unclear."""
    responses = record.responses
    index_pairs = list(combinations(range(len(responses)), 2))

    def ask(pair: tuple[int, int]) -> str:
        first, second = responses[pair[0]], responses[pair[1]]
        known = log.verdict(first.id, second.id)
        if known is not None:
            return known
        request = build_request(whole_text(record.prompt), first.text, second.text, rubric)
        answer = answer_to(request)
        verdict = read_verdict(answer)
        text = json.dumps(request, ensure_ascii=False)
        log.add(first.id, second.id, text, answer, verdict)
        return verdict

    orders = [*index_pairs, *((j, i) for i, j in index_pairs)]
    verdict_of = dict(zip(orders, pool.map(ask, orders), strict=True))
    verdicts = {
        (i, j): combine_verdicts(verdict_of[i, j], verdict_of[j, i]) for i, j in index_pairs
    }
    pairs = [[i, j, verdict] for (i, j), verdict in verdicts.items() if verdict]
    rankings = []
    for judgment in judgments_of_pairs(pairs, len(responses)) if pairs else []:
        tiers = tuple(tuple(responses[i].id for i in tier) for tier in judgment)
        ranking = Ranking(
            id=content_id("judge", log.name, log.rubric_version, record.prompt.id, tiers),
            prompt_id=record.prompt.id,
            annotator=log.name,
            kind="ai",
            tiers=tiers,
        )
        rankings.append(ranking)
    with store.connections.write():
        store.add_rankings(rankings, rubric=log.rubric_version)
        ids = [response.id for response in responses]
        log.finish(record.prompt.id, ids, [ranking.id for ranking in rankings])
    return sum(verdict is None for verdict in verdicts.values())


def calibration(store: Store, log: JudgeLog) -> dict[str, Any]:
    """Mean agreement of a judge with people and with gold answers, with 95 % intervals."""
    against: dict[str, list[float]] = {"people": [], "gold": list(_with_gold(log))}
    for record in store.ranked_prompts():
        own = [r for r in record.rankings if r.annotator == log.name]
        people = [r for r in record.rankings if r.kind == "human"]
        agreements = [pair_agreement(a.tiers, b.tiers) for a in own for b in people]
        known = [value for value in agreements if value is not None]
        if known:
            against["people"].append(sum(known) / len(known))
    measured: dict[str, Any] = {}
    for whom, values in against.items():
        interval = mean_interval(values)
        if interval:
            mean, low, high = interval
            measured[whom] = {"value": mean, "low": low, "high": high, "n": len(values)}
    return measured


def _with_gold(log: JudgeLog) -> Iterator[float]:
    for answer, tiers in log.against_gold():
        value = pair_agreement(answer, tiers)
        if value is not None:
            yield value
