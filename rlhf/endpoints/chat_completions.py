"""Requests to a server with OpenAI's chat completions protocol."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from http.client import HTTPResponse
from typing import Any
from urllib.request import Request

from rlhf.endpoints.urls import open_url
from rlhf.errors import InputError
from rlhf.records.schema import Message


def open_completion(
    url: str,
    body: dict[str, Any],
    *,
    key_variable: str,
    timeout_seconds: float,
    total_seconds: float | None = None,
) -> AbstractContextManager[HTTPResponse]:
    """Send a request and return the open answer, to be read whole or as a stream.

    Args:
        url: the address that ends in /v1.
        body: model, messages and settings.
        key_variable: the environment variable with the API key, if the server needs one.
        timeout_seconds: longest pause in the answer.
        total_seconds: limit for the whole answer; by default `timeout_seconds`.

    Raises:
        InputError: the key is not valid in a header.
        HTTPError, URLError, TimeoutError, ConnectionError, HTTPException: as `open_url`.
    """
    headers = {"Content-Type": "application/json", **key_header(key_variable)}
    address = url.rstrip("/") + "/chat/completions"
    request = Request(address, json.dumps(body).encode(), headers)
    return open_url(request, timeout_seconds=timeout_seconds, total_seconds=total_seconds)


def text_of(content: Any) -> str:
    """The text of an answer, "" for None; lone surrogates, which JSON can hold, are replaced.

    Raises:
        TypeError: it is not text.
    """
    if not isinstance(content, str | None):
        raise TypeError(f"a {type(content).__name__} in the place of text")
    return (content or "").encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_messages(messages: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages of a request as text.

    Raises:
        InputError: one has no text alone, such as a picture or the call of a tool.
    """
    return tuple(
        Message.from_json({**message, "content": _text_content(message)}) for message in messages
    )


def _text_content(message: Mapping[str, Any]) -> Any:
    """The content of a message, its parts of text joined by lines; None if any is not text."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "\n".join(map(str, texts)) if is_text else None


def key_header(variable: str) -> dict[str, str]:
    """The header with the API key in an environment variable; empty if it is not set.

    Raises:
        InputError: the key is not valid in a header; the message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    if not key.isascii() or not key.isprintable():
        raise InputError(
            f"The key in {variable} has characters that no HTTP header takes",
            "Set it to the key alone: one line, without quotation marks or comments.",
        )
    return {"Authorization": f"Bearer {key}"} if key else {}
