"""Rankings by a judge model behind an OpenAI-compatible endpoint; their kind is `ai`, never human.

Every pair of responses is asked in both orders; when the two answers disagree, the pair is a tie.
Pairs that fit one order become one ranking, the rest stay rankings of two (as in imports). Every
call is stored with what was asked and what came back, so an interrupted run goes on where it was.
"""

import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from itertools import combinations
from typing import Any
from urllib.error import HTTPError, URLError

from labeling_app.agreement import mean_interval, pair_agreement
from labeling_app.formats import judgements_of_pairs
from labeling_app.judge_log import JudgeLog
from labeling_app.store import Store
from rlhf.errors import InputError, InterruptedRunError
from rlhf.records import RankedPrompt, Ranking, content_id

API_KEY = "RLHF_JUDGE_API_KEY"
RETRIES = 5
MAX_TOKENS = 512
INSTRUCTION = (
    "Two assistants answered the same request. Judge which answer serves the person better. Length "
    "and the order of the answers must not count. Reason in at most three sentences, then end with "
    "one line that holds only [[A]], [[B]], or [[TIE]]."
)
VERDICT = re.compile(r"\[\[\s*(A|B|TIE|C)\s*\]\]", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the judge answers."""

    url: str
    model: str
    timeout_seconds: float = 120.0
    first_pause_seconds: float = 1.0


def build_request(prompt: str, first: str, second: str, rubric: str) -> list[dict[str, str]]:
    """The messages that ask for one comparison."""
    asked = f"{INSTRUCTION}\n\nJudge by this rubric:\n{rubric}" if rubric else INSTRUCTION
    answers = f"# Answer of assistant A\n{first}\n\n# Answer of assistant B\n{second}"
    return [{"role": "user", "content": f"{asked}\n\n# Request\n{prompt}\n\n{answers}"}]


def read_verdict(answer: str) -> str:
    """`first`, `second` or `tie`, by the last [[…]] in an answer; `unclear` when there is none."""
    found = VERDICT.findall(answer)
    if not found:
        return "unclear"
    return {"A": "first", "B": "second"}.get(found[-1].upper(), "tie")


def combine(there: str, back: str) -> str | None:
    """One verdict of two: asked in the order shown, and with the two answers swapped.

    They agree when the swapped one names the other side. Otherwise it is a tie; None when either
    was unclear, for then nobody knows what the judge meant.
    """
    if "unclear" in (there, back):
        return None
    swapped = {"first": "second", "second": "first", "tie": "tie"}[back]
    return there if there == swapped else "tie"


def annotate_with_judge(
    store: Store, endpoint: Endpoint, *, name: str, rubric: str, parallel: int
) -> dict[str, Any]:
    """Rank the responses of every prompt by a judge model; what it has ranked is left alone.

    Returns:
        Counts, and the judge's agreement with people and with gold answers.

    Raises:
        InputError: nothing to rank, or the endpoint refuses the request.
        InterruptedRunError: the endpoint does not answer; what was asked so far is kept.
    """
    if not store.counts()["responses"]:
        raise InputError(
            "The database holds no responses to rank",
            "Sample some first: rlhf generate --db DB --model MODEL",
        )
    counts = {"ranked": 0, "ranked_before": 0, "too_few_responses": 0, "unclear_pairs": 0}
    log = JudgeLog(store, name, store.add_rubric(rubric) if rubric else "")
    with ThreadPoolExecutor(parallel) as pool:
        for record in store.ranked_prompts(annotators=[name]):
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
    pool: ThreadPoolExecutor,
    record: RankedPrompt,
    answer_to: Callable[[list[dict[str, str]]], str],
    rubric: str,
) -> int:
    """Judge one prompt and store its rankings. Returns how many pairs were unclear."""
    responses = record.responses
    places = list(combinations(range(len(responses)), 2))

    def ask(pair: tuple[int, int]) -> str:
        first, second = responses[pair[0]], responses[pair[1]]
        known = log.verdict(first.id, second.id)
        if known is not None:
            return known
        request = build_request(record.prompt.text, first.text, second.text, rubric)
        answer = answer_to(request)
        verdict = read_verdict(answer)
        text = json.dumps(request, ensure_ascii=False)
        log.add(first.id, second.id, text, answer, verdict)
        return verdict

    orders = [*places, *((j, i) for i, j in places)]
    said = dict(zip(orders, pool.map(ask, orders), strict=True))
    verdicts = {(i, j): combine(said[i, j], said[j, i]) for i, j in places}
    pairs = [[i, j, verdict] for (i, j), verdict in verdicts.items() if verdict]
    rankings = []
    for judgement in judgements_of_pairs(pairs, len(responses)) if pairs else []:
        tiers = tuple(tuple(responses[i].id for i in tier) for tier in judgement)
        ranking = Ranking(
            id=content_id("judge", log.name, log.rubric_version, record.prompt.id, tiers),
            prompt_id=record.prompt.id,
            annotator=log.name,
            kind="ai",
            tiers=tiers,
        )
        rankings.append(ranking)
    with store.connections.write():
        log.finish(record.prompt.id, [response.id for response in responses])
        store.add_rankings(rankings)
    return sum(verdict is None for verdict in verdicts.values())


def complete(endpoint: Endpoint, messages: list[dict[str, str]]) -> str:
    """The endpoint's answer; a busy or absent server is asked again, with growing pauses.

    Raises:
        InputError: the endpoint refuses the request or answers in another protocol.
        InterruptedRunError: it stays busy or absent.
    """
    problem = ""
    for attempt in range(RETRIES):
        if attempt:
            time.sleep(endpoint.first_pause_seconds * 2 ** (attempt - 1))
        try:
            return _post(endpoint, messages)
        except HTTPError as error:
            problem = f"status {error.code}"
            if error.code != 429 and error.code < 500:
                text = error.read(300).decode(errors="replace")
                raise InputError(
                    f"{endpoint.url} refused the request (status {error.code}): {text}",
                    f"Check --endpoint and --model, and the key in {API_KEY} if it wants one.",
                ) from None
        except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
            problem = str(error)
    raise InterruptedRunError(
        f"{endpoint.url} does not answer after {RETRIES} attempts ({problem})",
        "Start the same command again when it does; what was judged so far is kept.",
    )


def _post(endpoint: Endpoint, messages: list[dict[str, str]]) -> str:
    body = {
        "model": endpoint.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": False,
    }
    headers = {"Content-Type": "application/json"}
    if os.environ.get(API_KEY):
        headers["Authorization"] = f"Bearer {os.environ[API_KEY]}"
    url = endpoint.url.rstrip("/") + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=endpoint.timeout_seconds) as answer:
        content = answer.read()
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise InputError(
            f"{url} does not speak the chat completions protocol: {content[:200]!r}",
            "Give --endpoint the address that ends in /v1.",
        ) from None
    return str(text or "")


def calibration(store: Store, log: JudgeLog) -> dict[str, Any]:
    """Mean agreement of a judge with people and with gold answers, with 95 % intervals."""
    against: dict[str, list[float]] = {"people": [], "gold": list(_with_gold(log))}
    for record in store.ranked_prompts():
        own = [r for r in record.rankings if r.annotator == log.name]
        people = [r for r in record.rankings if r.kind == "human"]
        found = [pair_agreement(a.tiers, b.tiers) for a in own for b in people]
        known = [value for value in found if value is not None]
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
