"""The routes of `rlhf serve --reward`: rewards, health and metrics.

POST takes {"items": [{"messages": [...], "response": "..."}, ...]} and answers
{"rewards": [number, ...]}, which is what `--reward http://...` asks and expects.
"""

import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from reward.scoring.texts import PromptResponses
from reward.serving.batches import QueueFullError, RequestCounts, SharedBatches
from rlhf.endpoints.request_bodies import BodyError, read_json
from rlhf.errors import InputError
from rlhf.records.schema import Message, Prompt
from rlhf.records.schema import Response as ResponseRecord

MAX_BODY_BYTES = 2**24
RETRY_SECONDS = 1
METRICS = (
    ("requests", "requests_total", "counter", "Requests answered with rewards."),
    ("items", "items_total", "counter", "Responses scored."),
    ("tokens", "tokens_total", "counter", "Tokens of these responses and their prompts."),
    ("batches", "batches_total", "counter", "Shared batches scored."),
    ("scoring_seconds", "scoring_seconds_total", "counter", "Seconds spent scoring."),
    ("waiting_items", "queue_items", "gauge", "Responses accepted and not answered yet."),
)


def build_app(batches: SharedBatches, description: dict[str, str]) -> Starlette:
    """The web application.

    Args:
        batches: scores the requests.
        description: path and hash of the reward model.
    """
    began = time.monotonic()

    async def score(request: Request) -> Response:
        try:
            answers = _read_items(await read_json(request, MAX_BODY_BYTES))
            rewards = await batches.rewards(answers)
        except BodyError as error:
            return _refusal(error.status, error.problem)
        except InputError as error:
            return _refusal(400, f"{error.problem}. {error.remedy}")
        except QueueFullError:
            problem = f"{batches.counts.waiting_items} responses wait already. Ask again."
            return _refusal(503, problem, {"Retry-After": str(RETRY_SECONDS)})
        batches.counts.requests += 1
        batches.counts.items += len(rewards)
        return JSONResponse({"rewards": rewards})

    async def health(request: Request) -> Response:
        uptime = round(time.monotonic() - began, 3)
        reward = {"path": description["path"], "hash": description["hash"]}
        return JSONResponse({"status": "ready", "reward": reward, "uptime_seconds": uptime})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(write_metrics(batches.counts), media_type="text/plain")

    return Starlette(
        routes=[
            Route("/", score, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
        ]
    )


def write_metrics(counts: RequestCounts) -> str:
    """The counts in Prometheus' text format."""
    lines = []
    for field, name, kind, help_text in METRICS:
        name = f"rlhf_reward_{name}"
        value = getattr(counts, field)
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {value}"]
    return "\n".join(lines) + "\n"


def _refusal(status: int, problem: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": problem}, status, headers)


def _read_items(value: dict[str, Any]) -> list[PromptResponses]:
    items = value.get("items")
    if not isinstance(items, list):
        raise BodyError(
            400, 'The body must be {"items": [{"messages": [...], "response": "..."}, ...]}.'
        )
    return [_read_item(number, item) for number, item in enumerate(items)]


def _read_item(number: int, item: Any) -> PromptResponses:
    messages = item.get("messages") if isinstance(item, dict) else None
    text = item.get("response") if isinstance(item, dict) else None
    if not isinstance(messages, list) or not isinstance(text, str):
        raise BodyError(400, f"Item {number} must have 'messages', a list, and 'response', a text.")
    if not all(isinstance(turn, dict) for turn in messages):
        raise BodyError(400, f"Item {number} has a message that is not an object.")
    try:
        prompt = Prompt.create(tuple(map(Message.from_json, messages)), "test", "")
    except InputError as error:
        raise BodyError(400, f"Item {number}: {error.problem}. {error.remedy}") from None
    return prompt, (ResponseRecord(id="", prompt_id=prompt.id, text=text, model=""),)
