"""Server-sent events of a chat completion: read, given our id, and written again."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlhf.endpoints.chat_completions import text_of

DONE = b"data: [DONE]\n\n"
MAX_LINE_BYTES = 2**22
MAX_TEXT = 2**20  # characters; a longer response is passed on and not kept


class BrokenStreamError(Exception):
    """The server sent something that is no event of a chat completion, or reports a failure."""


@dataclass
class Completion:
    """A response as far as it has arrived.

    Worked example: after the events of "Hel" and "lo!" and one with the finish reason "stop",
    `text` is "Hello!" and `finish` is "stop".
    """

    pieces: list[str] = field(default_factory=list)
    finish: str | None = None
    completion_tokens: int = 0
    has_other_content: bool = False
    """Such as calls of tools, which nobody can judge as a text."""
    num_characters: int = 0

    @property
    def text(self) -> str:
        """All text so far, at most `MAX_TEXT` characters and one piece.

        A server may split a character that UTF-16 writes as a pair; half of one is replaced.
        """
        return text_of("".join(self.pieces))

    def add(self, message: dict[str, Any], finish: str | None) -> None:
        """Add the message of a choice, or the part of one."""
        content = message.get("content")
        if isinstance(content, str) and self.num_characters <= MAX_TEXT:
            self.pieces.append(content)
            self.num_characters += len(content)
        if message.get("tool_calls") or message.get("function_call") or message.get("audio"):
            self.has_other_content = True
        self.finish = finish or self.finish

    def count(self, usage: Any) -> None:
        """Count the tokens that the server reports."""
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(tokens, int):
            self.completion_tokens = tokens


class EventReader:
    """Turns the bytes of a stream into those for the app; `completion` is what they say.

    Args:
        names: fields of every event that are replaced: its id and the model's name.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self.completion = Completion()
        self.is_done = False
        self._names = names
        self._rest = b""

    def feed(self, content: bytes) -> bytes:
        """The events that are complete with this content; the end of the stream is left out.

        Raises:
            BrokenStreamError: the server sent no event of a chat completion, or reports a failure.
        """
        *lines, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise BrokenStreamError("a line is too long")
        return b"".join(self._events(lines))

    def close(self) -> None:
        """The stream has ended.

        Raises:
            BrokenStreamError: in the middle of a response.
        """
        if not self.is_done and self.completion.finish is None:
            raise BrokenStreamError("it ended in the middle of a response")

    def _events(self, lines: list[bytes]) -> Iterator[bytes]:
        for line in lines:
            if not line.startswith(b"data:") or self.is_done:
                continue  # comments and blank lines
            data = line[5:].strip()
            if data == b"[DONE]":
                self.is_done = True
            else:
                yield self._event(data)

    def _event(self, data: bytes) -> bytes:
        try:
            event = json.loads(data)
            if not isinstance(event, dict) or event.get("error"):
                raise BrokenStreamError(f"it reports: {data[:300].decode(errors='replace')}")
            for choice in event["choices"]:
                self.completion.add(choice.get("delta") or {}, choice.get("finish_reason"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BrokenStreamError(f"no chat completion: {error!r}") from None
        self.completion.count(event.get("usage"))
        return event_of({**event, **self._names})


def event_of(value: dict[str, Any]) -> bytes:
    """One event with a JSON object."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def read_completion(body: dict[str, Any]) -> Completion:
    """Read a completion that was not streamed.

    Raises:
        BrokenStreamError: this is no chat completion.
    """
    read = Completion()
    try:
        [choice] = body["choices"]
        read.add(choice["message"], choice.get("finish_reason") or "stop")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenStreamError(f"no chat completion: {error!r}") from None
    read.count(body.get("usage"))
    return read


def completion_events(body: dict[str, Any]) -> Iterator[bytes]:
    """A whole completion as the events of a stream, without the end."""
    [choice] = body["choices"]
    shared: dict[str, Any] = {
        name: body[name] for name in ("id", "created", "model") if name in body
    }
    shared["object"] = "chat.completion.chunk"
    delta = {**choice["message"], "role": "assistant"}
    yield event_of({**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    end: dict[str, Any] = {
        "index": 0,
        "delta": {},
        "finish_reason": choice.get("finish_reason") or "stop",
    }
    usage = {"usage": body["usage"]} if body.get("usage") else {}
    yield event_of({**shared, "choices": [end], **usage})
