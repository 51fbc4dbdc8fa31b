"""Text written by models and strangers → HTML that can only be looked at.

Two locks: markdown-it-py with HTML off, so that tags in the text stay text, and then nh3, which
keeps a short list of harmless tags. No images: a picture's address would be an outside request
from the annotator's browser.
"""

from collections.abc import Sequence

import nh3
from markdown_it import MarkdownIt

from rlhf.thinking import split_thinking

MAX_MARKDOWN_CHARACTERS = 50_000
BLOCKS = {"p", "br", "hr", "blockquote", "pre", "ul", "ol", "li"}
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
TABLES = {"table", "thead", "tbody", "tr", "th", "td"}
INLINE = {"strong", "em", "s", "code", "a"}
FOLDED = '<details class="thinking"><summary>Thinking</summary>{}</details>'

_markdown = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(
    ["table", "strikethrough"]
)
_markdown.disable("image")


_cleaner = nh3.Cleaner(
    tags=BLOCKS | HEADINGS | TABLES | INLINE,
    attributes={"a": {"href"}, "ol": {"start"}},
    url_schemes={"http", "https"},
    link_rel="noopener noreferrer nofollow",
)


def to_html(text: str) -> str:
    """Render markdown to sanitised HTML; beyond 50,000 characters the text is shown as it is."""
    if len(text) > MAX_MARKDOWN_CHARACTERS:
        return f"<pre>{nh3.clean_text(text)}</pre>"
    return _cleaner.clean(_markdown.render(text))


def response_to_html(text: str) -> str:
    """A response as sanitised HTML; what a model thought before it answered is folded."""
    thinking, answer = split_thinking(text)
    if not thinking:
        return to_html(answer)
    return FOLDED.format(to_html(thinking)) + to_html(answer)


def conversation_to_html(messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Every turn of a prompt as its role and sanitised HTML."""
    by_role = {"assistant": response_to_html}
    return [
        {"role": m["role"], "html": by_role.get(m["role"], to_html)(m["content"])} for m in messages
    ]
