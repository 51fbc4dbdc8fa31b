"""The texts of a screen, rendered after the database transaction.

During the transaction nobody else can write, and rendering can be slow. The board's answer
therefore holds `Unrendered` texts until the transaction is over. Short ones are then rendered at
once; the rest go to a separate thread, so that one person's long tables delay nobody else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from labeling_app.web.board.rendering import html_of_turn, is_cached

QUICK_CHARACTERS = 10_000
Payload = dict[str, Any]


@dataclass(frozen=True)
class Unrendered:
    """A text that a screen will show as HTML.

    Args:
        text: markdown.
        role: who says it: user or assistant.
    """

    text: str
    role: str = "user"


def render(screen: Payload) -> Payload:
    """Replace every text that is not rendered yet by its HTML."""
    for holder, name in _unrendered(screen):
        holder[name] = html_of_turn(holder[name].role, holder[name].text)
    return screen


def render_quick(screen: Payload) -> Payload:
    """The same, unless it might be slow."""
    texts = [holder[name].text for holder, name in _unrendered(screen)]
    if sum(map(len, texts)) > QUICK_CHARACTERS:
        texts = [text for text in texts if not is_cached(text)]
    return render(screen) if sum(map(len, texts)) <= QUICK_CHARACTERS else screen


class ScreenRenderer:
    """Renders what `render_quick` has left, one screen at a time."""

    def __init__(self) -> None:
        self._threads = CapacityLimiter(1)

    async def render(self, screen: Payload) -> Payload:
        """Replace every text that is not rendered yet by its HTML."""
        if next(_unrendered(screen), None) is not None:
            await run_sync(render, screen, limiter=self._threads)
        return screen


def _unrendered(screen: Payload) -> Iterator[tuple[Payload, str]]:
    """The fields with texts: the prompt's turns, the responses, a training task's explanation."""
    task = screen.get("task") or {"prompt": [], "cards": []}
    fields = [(holder, "html") for holder in (*task["prompt"], *task["cards"])]
    if screen.get("feedback"):
        fields.append((screen["feedback"], "explanation"))
    return ((holder, name) for holder, name in fields if isinstance(holder[name], Unrendered))
