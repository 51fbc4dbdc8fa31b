"""JSON bodies of requests, read within a limit."""

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request


class BodyError(Exception):
    """A body that cannot be used.

    Args:
        status: the HTTP status that says so.
        problem: the same in words.
    """

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        BodyError: it is too large, or the client went away before its end.
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
        BodyError: too large, not whole, not JSON, not an object, or text that is no Unicode.
    """
    body = await read_body(request, max_bytes)
    try:
        value = json.loads(body)
        # JSON may hold half of a surrogate pair, which no file and no database takes.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BodyError(400, f"The body is not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise BodyError(400, f"The body is a JSON {type(value).__name__}, not an object.")
    return value


def require_sender(payload: dict[str, Any], name: str) -> None:
    """Take out whose page sent this; positions on it mean nothing in the order of somebody else.

    Raises:
        BodyError: it is the page of another person than the one who is signed in.
    """
    page = payload.pop("annotator", name)
    if page != name:
        raise BodyError(403, f"This page is {page}'s, and {name} is signed in now: reload it.")
