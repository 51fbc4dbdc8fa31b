"""A judge model behind an OpenAI-compatible endpoint: requests, and verdicts from its answers.

Every pair of answers is judged in both orders; if the two verdicts disagree, it is a tie.
"""

import json
import re
from dataclasses import dataclass, replace
from http.client import BAD_REQUEST
from urllib.error import HTTPError

from rlhf.endpoints.chat_completions import open_completion, text_of
from rlhf.endpoints.retries import ask_with_retries
from rlhf.endpoints.urls import read_answer
from rlhf.errors import InputError

API_KEY = "RLHF_JUDGE_API_KEY"
MAX_TOKENS = 512
MAX_THINKING_TOKENS = 8192
THINKING_TIME = 5  # factor on the timeout for reasoning models
INSTRUCTION = (
    "Two assistants answered the same request. Judge which answer serves the person better. Length "
    "and the order of the answers must not count. Reason in at most three sentences, then end with "
    "one line that holds only [[A]], [[B]], or [[TIE]]."
)
VERDICT = re.compile(r"\[\[\s*(A|B|TIE|C)\s*\]\]", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address and name of the judge model."""

    url: str
    model: str
    timeout_seconds: float = 120.0  # for a complete answer
    first_pause_seconds: float = 1.0


def build_request(prompt: str, first: str, second: str, rubric: str) -> list[dict[str, str]]:
    """The messages that ask for one comparison."""
    instruction = f"{INSTRUCTION}\n\nJudge by this rubric:\n{rubric}" if rubric else INSTRUCTION
    answers = f"# Answer of assistant A\n{first}\n\n# Answer of assistant B\n{second}"
    return [{"role": "user", "content": f"{instruction}\n\n# Request\n{prompt}\n\n{answers}"}]


def read_verdict(answer: str) -> str:
    """`first`, `second` or `tie`, by the last [[…]] in an answer; `unclear` without one."""
    verdicts = VERDICT.findall(answer)
    if not verdicts:
        return "unclear"
    return {"A": "first", "B": "second"}.get(verdicts[-1].upper(), "tie")


def combine_verdicts(verdict: str, swapped: str) -> str | None:
    """One verdict from two: with the answers in order, and with the answers swapped.

    It is a tie if the two name different answers, and None if either is unclear.
    """
    if "unclear" in (verdict, swapped):
        return None
    same = {"first": "second", "second": "first", "tie": "tie"}[swapped]
    return verdict if verdict == same else "tie"


def complete(endpoint: Endpoint, messages: list[dict[str, str]]) -> str:
    """The endpoint's answer; a busy or absent server is retried, with growing pauses.

    Raises:
        InputError: the endpoint refuses the request or answers in another protocol.
        InterruptedRunError: it stays busy or absent.
    """
    content = ask_with_retries(
        lambda: _post(endpoint, messages),
        endpoint.url,
        when_refused="Check the judge's address and model name, and the key in "
        f"{API_KEY} if it wants one.",
        when_absent="Run the same command again when it does, an evaluation with --resume; "
        "judgments made so far are kept.",
        first_pause_seconds=endpoint.first_pause_seconds,
    )
    try:
        return text_of(json.loads(content)["choices"][0]["message"]["content"])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise InputError(
            f"{endpoint.url} does not follow the chat completions protocol: {content[:200]!r}",
            "Give the address that ends in /v1.",
        ) from None


def _post(endpoint: Endpoint, messages: list[dict[str, str]]) -> bytes:
    """Ask for a short greedy answer; if that is refused, ask as reasoning models require."""
    plain: dict[str, int] = {"temperature": 0, "max_tokens": MAX_TOKENS}
    try:
        return _send(endpoint, messages, plain)
    except HTTPError as error:
        body, refusal = error.read(), error
        refusal.seek(0)
        if error.code != BAD_REQUEST or not any(name.encode() in body for name in plain):
            raise
    slower = replace(endpoint, timeout_seconds=THINKING_TIME * endpoint.timeout_seconds)
    try:
        return _send(slower, messages, {"max_completion_tokens": MAX_THINKING_TOKENS})
    except HTTPError as error:
        raise (refusal if error.code == BAD_REQUEST else error) from None


def _send(endpoint: Endpoint, messages: list[dict[str, str]], settings: dict[str, int]) -> bytes:
    body = {"model": endpoint.model, "messages": messages, "stream": False, **settings}
    with open_completion(
        endpoint.url, body, key_variable=API_KEY, timeout_seconds=endpoint.timeout_seconds
    ) as answer:
        return read_answer(answer)
