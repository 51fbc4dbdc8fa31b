"""What `rlhf serve` keeps of an answer to an app, until people have judged it."""

from dataclasses import dataclass
from typing import Any, Literal, Self

from rlhf.errors import InputError
from rlhf.records.schema import Prompt, Response

Variant = Literal["policy", "against"]


class NotKeptError(InputError):
    """Feedback on a response that was not kept, or is no longer."""


@dataclass(frozen=True, kw_only=True)
class ServedResponse:
    """One answer to an app.

    `id` is the id that the app got. `conversation` is the id of the conversation's first answer;
    `variant` says which of two compared policies answered.
    """

    id: str
    conversation: str
    variant: Variant
    prompt: Prompt
    response: Response
    comparison: int | None = None

    @property
    def content(self) -> dict[str, Any]:
        """Prompt and response as a JSON object."""
        return {"prompt": self.prompt.to_json(), "response": self.response.to_json()}

    @classmethod
    def from_content(cls, content: dict[str, Any], **fields: Any) -> Self:
        """Read what `content` gave.

        Args:
            content: prompt and response.
            fields: the other fields.
        """
        return cls(
            prompt=Prompt.from_json(content["prompt"]),
            response=Response.from_json(content["response"]),
            **fields,
        )
