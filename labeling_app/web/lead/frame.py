"""The frame of the pages for leads and admins: navigation, shared files, templates.

A page is a module with routes below `/lead/`, which the middleware keeps annotators out of, and a
template that extends `lead/frame.html`:

    def add_people_page(app: FastAPI, frame: LeadFrame, store: Store) -> None:
        frame.add_to_navigation("People", "/lead/people")

        @app.get("/lead/people")
        def people(request: Request) -> HTMLResponse:
            return frame.page(request, "lead/people.html", people=...)

`lead.js` sends each form that has `data-post` to that address as JSON, shows the `say` or `error`
of the answer, and then renews the page in place.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse

from labeling_app.annotators.users import User
from labeling_app.web.access.content_policy import html_page
from labeling_app.web.access.middleware import USER
from labeling_app.web.lead.templates import PAGES, load_templates
from labeling_app.web.request_bodies import json_errors
from rlhf.endpoints.request_bodies import read_body, read_json
from rlhf.errors import InputError

BROKEN = "lead/broken.html"
MAX_BODY_BYTES = 300_000
Filter = Callable[..., str]
SHARED_FILES = {name: PAGES / "lead" / name for name in ("lead.css", "lead.js")}


class Link(NamedTuple):
    """An entry of the navigation."""

    title: str
    path: str


class LeadFrame:
    """What all of the lead's pages share.

    Args:
        has_sign_in: whether people sign in, and so can sign out.
    """

    def __init__(self, *, has_sign_in: bool = False) -> None:
        self.links: list[Link] = []
        self.files = dict(SHARED_FILES)
        self.templates = load_templates()
        self._has_sign_in = has_sign_in

    def add_to_navigation(self, title: str, path: str) -> None:
        """List a page, after those that are listed already."""
        self.links.append(Link(title, path))

    def add_files(self, *paths: Path) -> None:
        """Serve scripts and styles as `/lead/files/NAME`."""
        self.files |= {path.name: path for path in paths}

    def add_filters(self, **filters: Filter) -> None:
        """Let the templates of all pages use these filters.

        Raises:
            ValueError: another page has added one of this name.
        """
        if taken := filters.keys() & self.templates.filters.keys():
            raise ValueError(f"Two pages have a filter of the name {', '.join(sorted(taken))}")
        self.templates.filters |= filters

    def page(
        self, request: Request, template: str, *, status_code: int = 200, **values: Any
    ) -> HTMLResponse:
        """A page for whoever sends the request, from a template in `pages/`."""
        text = self.render(template, sender_of(request), request.scope["path"], **values)
        return html_page(text, status_code)

    def broken_page(
        self, request: Request, title: str, error: InputError, *, status_code: int = 500
    ) -> HTMLResponse:
        """A page that says which file of the server is broken, and what to do."""
        values = {"title": title, "error": error}
        return self.page(request, BROKEN, status_code=status_code, **values)

    def render(self, template: str, sender: User, path: str, **values: Any) -> str:
        """The HTML of a page; every value is escaped."""
        return self.templates.get_template(template).render(
            links=self.links,
            path=path,
            sender=sender,
            has_sign_in=self._has_sign_in,
            **values,
        )


def add_frame(app: FastAPI, frame: LeadFrame) -> None:
    """Serve `/lead`, which leads to the first page, and the files of the pages."""

    @app.get("/lead")
    def first_page() -> RedirectResponse:
        return RedirectResponse(frame.links[0].path, status_code=303)

    @app.get("/lead/files/{name}")
    def file(name: str) -> FileResponse:
        if name not in frame.files:
            raise HTTPException(status_code=404)
        return FileResponse(frame.files[name])


def answer_json(
    app: FastAPI, path: str, operation: Callable[[User, dict[str, Any]], Awaitable[dict[str, Any]]]
) -> None:
    """Serve an operation of a page, as a form with `data-post` calls it.

    Args:
        app: gets the route.
        path: below `/lead/`.
        operation: from the sender and the fields to what the page says: `say`, or `error`.
    """

    @json_errors
    async def answer(request: Request) -> JSONResponse:
        payload = await read_json(request, MAX_BODY_BYTES)
        outcome = await operation(sender_of(request), payload)
        return JSONResponse(outcome, status_code=400 if "error" in outcome else 200)

    app.add_api_route(path, answer, methods=["POST"], response_model=None)


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a plain HTML form.

    Raises:
        BodyError: it is too large, or ended early.
    """
    body = await read_body(request, MAX_BODY_BYTES)
    return dict(parse_qsl(body.decode("utf-8", errors="replace")))


def sender_of(request: Request) -> User:
    """Who sends a request, as the middleware found it."""
    user: User = request.scope[USER]
    return user
