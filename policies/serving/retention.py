"""Which responses are kept, what the redaction leaves of them, and their ids."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from policies.serving.servers.events import MAX_TEXT, Completion
from policies.serving.split import Conversation
from rlhf.endpoints.chat_completions import read_messages
from rlhf.errors import InputError
from rlhf.records.schema import Prompt, Response, content_id
from rlhf.records.served import ServedResponse

SOURCE = "served"
REDACTED = ("note", "text")  # of feedback
Redact = Callable[[str], str]


class Records(Protocol):
    """Where responses and feedback are kept; each is on the disk when a method returns."""

    async def keep(self, served: ServedResponse) -> None:
        """Keep a response."""

    async def add_feedback(self, program: str, payload: dict[str, Any]) -> bool:
        """Store feedback; False if the program said the same before."""

    async def owner(self, token: str) -> str | None:
        """The program that a token belongs to."""

    async def count_thumbs(self, comparison: int) -> Mapping[str, tuple[int, int]]:
        """Thumbs up and down of both policies."""

    async def forget(self, before: float) -> int:
        """Delete what was kept before a time; returns how many responses."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which responses are kept, for how long, and what of their texts.

    Attributes:
        records: where they are kept.
        share: of the conversations.
        days: after which responses are deleted; None keeps them.
        redact: makes of a text what is kept of it.
        comparison: number of the comparison that they belong to, if there is one.
    """

    records: Records
    share: float = 1.0
    days: int | None = None
    redact: Redact | None = None
    comparison: int | None = None

    def keeps(self, conversation: Conversation) -> bool:
        """Whether responses of this conversation are kept: the same for all of them."""
        drawn = hashlib.sha256(f"keep {conversation.id}".encode()).digest()
        return int.from_bytes(drawn[:6], "big") < self.share * 2**48

    def clean(self, text: str) -> str:
        """Return what is kept of a text.

        Raises:
            InputError: the redaction fails.
        """
        return text if self.redact is None else self.redact(text)

    def clean_feedback(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Feedback with what is kept of its texts.

        Raises:
            InputError: the redaction fails.
        """
        texts = {n: payload[n] for n in REDACTED if isinstance(payload.get(n), str)}
        return {**payload, **{name: self.clean(text) for name, text in texts.items()}}


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request for a completion: its id, its body and its conversation."""

    id: str
    body: dict[str, Any]
    conversation: Conversation

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        messages: list[dict[str, Any]] = self.body["messages"]
        return messages


def served_response(
    retention: Retention, request: ChatRequest, completion: Completion, model: Mapping[str, str]
) -> ServedResponse | None:
    """Return what is kept of a completion; None where a person could judge nothing.

    It has no sampling settings: a request does not say what the server's defaults cut off, and the
    best of several is no sample, so it must not be taken for the model's full distribution.

    Args:
        retention: what is kept.
        request: the request.
        completion: the whole of it.
        model: path and, where it is known, hash of the model.

    Raises:
        InputError: the redaction fails.
    """
    if (
        completion.has_other_content
        or not completion.text.strip()
        or completion.num_characters > MAX_TEXT
    ):
        return None
    prompt = _prompt(request.messages, retention)
    if prompt is None:
        return None
    response = Response(
        id=content_id(SOURCE, request.id),
        prompt_id=prompt.id,
        text=retention.clean(completion.text),
        model=model["path"],
        model_fingerprint=model.get("hash"),
        finished={"stop": True, "length": False}.get(completion.finish or ""),
    )
    return ServedResponse(
        id=request.id,
        conversation=request.conversation.id,
        variant=request.conversation.variant,
        prompt=prompt,
        response=response,
        comparison=None if request.conversation.is_ambiguous else retention.comparison,
    )


def _prompt(messages: list[dict[str, Any]], retention: Retention) -> Prompt | None:
    """The conversation as a prompt; None with pictures, tools or a response to continue."""
    try:
        read = read_messages(messages)
    except InputError:
        return None
    cleaned = tuple(replace(message, content=retention.clean(message.content)) for message in read)
    try:
        return Prompt.create(cleaned, "train", SOURCE)
    except InputError:
        return None
