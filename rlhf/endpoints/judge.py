"""A judge model behind an OpenAI-compatible endpoint: what it is asked, and what its answer means.

Every pair of answers is asked about in both orders; when the two verdicts disagree, it is a tie.
"""

import json
import re
from dataclasses import dataclass, replace
from http.client import BAD_REQUEST
from urllib.error import HTTPError

from rlhf.endpoints.chat_completions import open_completion, text_of
from rlhf.endpoints.retries import ask_patiently
from rlhf.endpoints.urls import read_answer
from rlhf.errors import InputError

API_KEY = "RLHF_JUDGE_API_KEY"
MAX_TOKENS = 512
MAX_THINKING_TOKENS = 8192
THINKING_TIME = 5  # times as long until an answer is given up
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
    timeout_seconds: float = 120.0  # until an answer is whole
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


def complete(endpoint: Endpoint, messages: list[dict[str, str]]) -> str:
    """The endpoint's answer; a busy or absent server is asked again, with growing pauses.

    Raises:
        InputError: the endpoint refuses the request or answers in another protocol.
        InterruptedRunError: it stays busy or absent.
    """
    content = ask_patiently(
        lambda: _post(endpoint, messages),
        endpoint.url,
        when_refused="Check the judge's address and model name, and the key in "
        f"{API_KEY} if it wants one.",
        when_absent="Start the same command again when it does, an evaluation with --resume; what "
        "was judged so far is kept.",
        first_pause_seconds=endpoint.first_pause_seconds,
    )
    try:
        return text_of(json.loads(content)["choices"][0]["message"]["content"])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise InputError(
            f"{endpoint.url} does not speak the chat completions protocol: {content[:200]!r}",
            "Give the address that ends in /v1.",
        ) from None


def _post(endpoint: Endpoint, messages: list[dict[str, str]]) -> bytes:
    """Ask greedily and for little; where that is refused, as models are asked that think first."""
    plain: dict[str, int] = {"temperature": 0, "max_tokens": MAX_TOKENS}
    try:
        return _send(endpoint, messages, plain)
    except HTTPError as error:
        words, refusal = error.read(), error
        refusal.seek(0)
        if error.code != BAD_REQUEST or not any(name.encode() in words for name in plain):
            raise
    patient = replace(endpoint, timeout_seconds=THINKING_TIME * endpoint.timeout_seconds)
    try:
        return _send(patient, messages, {"max_completion_tokens": MAX_THINKING_TOKENS})
    except HTTPError as error:
        raise (refusal if error.code == BAD_REQUEST else error) from None


def _send(endpoint: Endpoint, messages: list[dict[str, str]], settings: dict[str, int]) -> bytes:
    body = {"model": endpoint.model, "messages": messages, "stream": False, **settings}
    with open_completion(
        endpoint.url, body, key_variable=API_KEY, timeout_seconds=endpoint.timeout_seconds
    ) as answer:
        return read_answer(answer)
