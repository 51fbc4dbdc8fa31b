"""Which of two policies answers: drawn for each conversation, and the same until it ends."""

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.records.served import Variant

REMEMBERED = 100_000  # answers of conversations that may go on


@dataclass(frozen=True)
class Conversation:
    """A conversation: the id of its first answer, and who answers.

    `is_ambiguous`: another one had the same words so far, so this may be either of them. Its
    feedback is not compared.
    """

    id: str
    variant: Variant
    is_ambiguous: bool = False


class Split:
    """Draws who answers a conversation, and recognizes its later turns by what was said.

    Every conversation is drawn anew, whatever its first message and its user, so a comparison can
    take its thumbs as independent.

    Args:
        share: of conversations that `against` answers; 0 without a comparison.
        seed: of the draw.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        self._share = share
        self._random = random.Random(seed)
        self._known: OrderedDict[bytes, Conversation] = OrderedDict()

    def renewed(self) -> "Split":
        """The same split, which knows no conversation yet."""
        return Split(self._share)

    def draw(self, new_id: str, messages: Sequence[dict[str, Any]]) -> Conversation:
        """The conversation that these messages continue, or a new one.

        Args:
            new_id: of the answer that is wanted.
            messages: the conversation so far.
        """
        spoken = [
            index for index, message in enumerate(messages) if message.get("role") == "assistant"
        ]
        if spoken:
            known = self._known.get(_key(messages[: spoken[-1] + 1]))
            if known is not None:
                return known
        is_against = self._random.random() < self._share
        return Conversation(new_id, "against" if is_against else "policy")

    def remember(
        self, conversation: Conversation, messages: Sequence[dict[str, Any]], text: str
    ) -> None:
        """Recognize the conversation when it continues after this answer."""
        key = _key([*messages, {"role": "assistant", "content": text}])
        known = self._known.get(key, conversation)
        is_other = known.id != conversation.id
        self._known[key] = replace(conversation, is_ambiguous=True) if is_other else conversation
        self._known.move_to_end(key)  # the oldest are forgotten
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def _key(messages: Sequence[dict[str, Any]]) -> bytes:
    """A hash of what was said; apps may strip texts and add fields."""
    turns = [(message.get("role"), _stripped(message.get("content"))) for message in messages]
    return hashlib.sha256(json.dumps(turns).encode()).digest()


def _stripped(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content
