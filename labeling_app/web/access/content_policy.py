"""Content-Security-Policy: what a browser may load, run and send on each of our pages.

Scripts and styles inside our pages are allowed by their hash. Injected markup therefore neither
runs nor styles anything.
"""

import base64
import hashlib
import re

from starlette.datastructures import MutableHeaders
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "content-security-policy"
NONE = "'none'"
_INLINE = re.compile(r"<(script|style)\b([^>]*)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_COMMON = "connect-src 'self'; form-action 'self'; frame-ancestors 'none'"
# For everything that is not a page: JSON, files, redirects.
NOTHING = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"


def policy_of(page: str) -> str:
    """The policy of one of our pages: our own files, and the scripts and styles inside the page."""
    return (
        f"default-src 'none'; script-src {_sources(page, 'script')}; "
        f"style-src {_sources(page, 'style')}; img-src data:; base-uri 'none'; {_COMMON}"
    )


def policy_of_gradio(page: str) -> str:
    """The policy of the board: Gradio needs eval for its templates, and sets inline styles."""
    return (
        f"default-src 'none'; script-src {_sources(page, 'script')} 'unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; "
        f"base-uri 'self'; {_COMMON}"
    )


def policy_of_report(page: str) -> str:
    """The policy of a report of a run: its own scripts and pictures, and no access to the app."""
    own = [source for source in _sources(page, "script").split(" ") if source != "'self'"]
    return (
        f"default-src 'none'; script-src {' '.join(own) or NONE}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "sandbox allow-scripts"
    )


def html_page(page: str, status_code: int = 200) -> HTMLResponse:
    """One of our pages with its policy."""
    return HTMLResponse(page, status_code=status_code, headers={HEADER: policy_of(page)})


def _sources(page: str, tag: str) -> str:
    matches = _INLINE.finditer(page)
    blocks = [match[3] for match in matches if match[1].lower() == tag and "src=" not in match[2]]
    digests = (hashlib.sha256(block.encode()).digest() for block in blocks)
    return " ".join(["'self'", *(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)])


class GradioPolicy:
    """ASGI middleware that gives Gradio's page its policy; the page differs between requests."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers of an HTML answer only once its body is known."""
        head: Message | None = None
        body = b""

        async def send_with_policy(message: Message) -> None:
            nonlocal head, body
            if message["type"] == "http.response.start" and _is_html(message):
                head = message
                return
            if head is None:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                policy = policy_of_gradio(body.decode("utf-8", errors="replace"))
                MutableHeaders(scope=head)[HEADER] = policy
                await send(head)
                await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, send_with_policy)


def _is_html(message: Message) -> bool:
    return MutableHeaders(scope=message).get("content-type", "").startswith("text/html")
