"""Text written by models and strangers → HTML that can only be looked at.

Two locks: markdown-it-py with HTML off, so that tags in the text stay text, and then nh3, which
keeps a short list of harmless tags. No images: a picture's address would be an outside request
from the annotator's browser.

Markdown can take long: a second for a table of 50 kB. Each text has a time after which it is shown
as it is, and what was rendered is kept, for a text is shown to several people.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import nh3
from markdown_it import MarkdownIt
from markdown_it.ruler import RuleOptionsType
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

from rlhf.modeling.thinking import split_thinking

MAX_MARKDOWN_CHARACTERS = 50_000
MAX_SECONDS = 0.15  # of a processor, to parse one text: some 20 kB of nothing but table cells
MAX_KEPT_CHARACTERS = 16_000_000
BLOCKS = {"p", "br", "hr", "blockquote", "pre", "ul", "ol", "li"}
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
TABLES = {"table", "thead", "tbody", "tr", "th", "td"}
INLINE = {"strong", "em", "s", "code", "a"}
FOLDED = '<details class="thinking"><summary>Thinking</summary>{}</details>'


class _TooSlow(Exception):
    """A text has used up its time."""


def _stop_block(state: StateBlock, *_: Any) -> bool:
    return _stop_late(state.env)


def _stop_inline(state: StateInline, *_: Any) -> bool:
    return _stop_late(state.env)


def _stop_late(env: Any) -> bool:
    """A rule that never matches: markdown-it asks it at every line and at every word or sign."""
    if time.thread_time() > env["stop_at"]:
        raise _TooSlow
    return False


_markdown = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(
    ["table", "strikethrough"]
)
_markdown.disable("image")
_INSIDE: RuleOptionsType = {"alt": ["paragraph", "reference", "blockquote", "list", "table"]}
_markdown.block.ruler.before("table", "stop_late", _stop_block, _INSIDE)
_markdown.inline.ruler.before("text", "stop_late", _stop_inline)


class _Kept:
    """The HTML of texts that were rendered lately."""

    def __init__(self) -> None:
        self._html: OrderedDict[str, str] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def get(self, text: str) -> str | None:
        with self._lock:
            if text in self._html:
                self._html.move_to_end(text)
            return self._html.get(text)

    def put(self, text: str, html: str) -> None:
        with self._lock:
            if text not in self._html:
                self._html[text] = html
                self._characters += len(text) + len(html)
            while self._characters > MAX_KEPT_CHARACTERS:
                old_text, old_html = self._html.popitem(last=False)
                self._characters -= len(old_text) + len(old_html)


_kept = _Kept()


_cleaner = nh3.Cleaner(
    tags=BLOCKS | HEADINGS | TABLES | INLINE,
    attributes={"a": {"href"}, "ol": {"start"}},
    url_schemes={"http", "https"},
    link_rel="noopener noreferrer nofollow",
)


def to_html(text: str) -> str:
    """Render markdown to sanitised HTML.

    Beyond 50,000 characters, or where parsing takes longer than `MAX_SECONDS`, the text is shown as
    it is.
    """
    html = _kept.get(text)
    if html is None:
        html = _render(text)
        _kept.put(text, html)
    return html


def _render(text: str) -> str:
    if len(text) <= MAX_MARKDOWN_CHARACTERS:
        env = {"stop_at": time.thread_time() + MAX_SECONDS}
        try:
            return _cleaner.clean(_markdown.render(text, env))
        except _TooSlow:
            """Shown as it is."""
    return f"<pre>{nh3.clean_text(text)}</pre>"


def is_at_hand(text: str) -> bool:
    """Whether the HTML of a text is kept."""
    return _kept.get(text) is not None


def response_to_html(text: str) -> str:
    """A response as sanitised HTML; what a model thought before it answered is folded."""
    thinking, answer = split_thinking(text)
    if not thinking:
        return to_html(answer)
    return FOLDED.format(to_html(thinking)) + to_html(answer)


def html_of_turn(role: str, text: str) -> str:
    """A turn of a conversation as sanitised HTML."""
    return response_to_html(text) if role == "assistant" else to_html(text)


def conversation_to_html(messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Every turn of a prompt as its role and sanitised HTML."""
    return [{"role": m["role"], "html": html_of_turn(m["role"], m["content"])} for m in messages]
