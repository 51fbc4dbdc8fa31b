"""Markdown written by models and strangers → sanitized HTML.

Two safeguards: markdown-it-py with HTML off leaves tags in the text as text, and nh3 keeps only a
short list of harmless tags. No images: loading one would be an outside request from the annotator's
browser.

Rendering can be slow: a second for a table of 50 kB. A text that takes too long is shown as plain
text. Results are cached, because several people see the same text.
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
MAX_SECONDS = 0.15  # processor time to parse one text: some 20 kB of nothing but table cells
MAX_CACHED_CHARACTERS = 16_000_000
BLOCKS = {"p", "br", "hr", "blockquote", "pre", "ul", "ol", "li"}
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
TABLES = {"table", "thead", "tbody", "tr", "th", "td"}
INLINE = {"strong", "em", "s", "code", "a"}
FOLDED = '<details class="thinking"><summary>Thinking</summary>{}</details>'


class _RenderTimeout(Exception):
    """A text takes too long to render."""


def _stop_block(state: StateBlock, *_: Any) -> bool:
    return _stop_late(state.env)


def _stop_inline(state: StateInline, *_: Any) -> bool:
    return _stop_late(state.env)


def _stop_late(env: Any) -> bool:
    """A rule that never matches; markdown-it calls it at every line, word and sign."""
    if time.thread_time() > env["stop_at"]:
        raise _RenderTimeout
    return False


_markdown = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(
    ["table", "strikethrough"]
)
_markdown.disable("image")
_INSIDE: RuleOptionsType = {"alt": ["paragraph", "reference", "blockquote", "list", "table"]}
_markdown.block.ruler.before("table", "stop_late", _stop_block, _INSIDE)
_markdown.inline.ruler.before("text", "stop_late", _stop_inline)


class _HtmlCache:
    """The HTML of recently rendered texts."""

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
            while self._characters > MAX_CACHED_CHARACTERS:
                old_text, old_html = self._html.popitem(last=False)
                self._characters -= len(old_text) + len(old_html)


_cache = _HtmlCache()


_cleaner = nh3.Cleaner(
    tags=BLOCKS | HEADINGS | TABLES | INLINE,
    attributes={"a": {"href"}, "ol": {"start"}},
    url_schemes={"http", "https"},
    link_rel="noopener noreferrer nofollow",
)


def to_html(text: str) -> str:
    """Render markdown to sanitized HTML.

    Text longer than 50,000 characters, or slower to parse than `MAX_SECONDS`, becomes plain text.
    """
    html = _cache.get(text)
    if html is None:
        html = _render(text)
        _cache.put(text, html)
    return html


def _render(text: str) -> str:
    if len(text) <= MAX_MARKDOWN_CHARACTERS:
        env = {"stop_at": time.thread_time() + MAX_SECONDS}
        try:
            return _cleaner.clean(_markdown.render(text, env))
        except _RenderTimeout:
            """Shown as plain text."""
    return f"<pre>{nh3.clean_text(text)}</pre>"


def is_cached(text: str) -> bool:
    """Whether the HTML of a text is in the cache."""
    return _cache.get(text) is not None


def response_to_html(text: str) -> str:
    """A response as sanitized HTML; the model's thinking is folded."""
    thinking, answer = split_thinking(text)
    if not thinking:
        return to_html(answer)
    return FOLDED.format(to_html(thinking)) + to_html(answer)


def html_of_turn(role: str, text: str) -> str:
    """A turn of a conversation as sanitized HTML."""
    return response_to_html(text) if role == "assistant" else to_html(text)


def conversation_to_html(messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Every turn of a prompt: its role and sanitized HTML."""
    return [{"role": m["role"], "html": html_of_turn(m["role"], m["content"])} for m in messages]
