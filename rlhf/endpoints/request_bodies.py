"""JSON bodies of requests, read within a limit."""

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from rlhf.records.jsonl import MAX_DEPTH, is_deep


class BodyError(Exception):
    """A request body that cannot be used.

    Args:
        status: the HTTP status of the answer.
        problem: what is wrong, in words.
    """

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        BodyError: it is too large, or the client disconnected before its end.
    """
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise BodyError(413, f"The body is larger than {max_bytes} bytes.")
    except ClientDisconnect:
        raise BodyError(400, "The body ended early.") from None
    return bytes(body)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        BodyError: too large, incomplete, not a JSON object, nested too deep, or not valid Unicode.
    """
    body = await read_body(request, max_bytes)
    try:
        value = json.loads(body)
        # Python reads NaN, 1e999 and half a surrogate pair, which no answer or file can hold.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise BodyError(400, f"The body is not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise BodyError(400, f"The body is a JSON {type(value).__name__}, not an object.")
    # Python can read deeper values here than it can write later, further down the stack.
    if is_deep(value):
        raise BodyError(400, f"The body is nested more than {MAX_DEPTH} deep.")
    return value
