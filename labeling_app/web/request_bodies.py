"""Whose work a page may send, and what it is told of a request that cannot be used."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, ParamSpec

from starlette.responses import JSONResponse

from rlhf.endpoints.request_bodies import BodyError
from rlhf.errors import InputError

Arguments = ParamSpec("Arguments")


def json_errors(
    answer: Callable[Arguments, Awaitable[JSONResponse]],
) -> Callable[Arguments, Awaitable[JSONResponse]]:
    """Decorate a route that answers with JSON: its errors become an `error_reply`."""

    @wraps(answer)
    async def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> JSONResponse:
        try:
            return await answer(*args, **kwargs)
        except (BodyError, InputError) as error:
            return error_reply(error)

    return checked


def error_reply(error: BodyError | InputError) -> JSONResponse:
    """`{"error": what is wrong}`, with the status of a `BodyError`, or 400."""
    if isinstance(error, BodyError):
        return JSONResponse({"error": error.problem}, status_code=error.status)
    return JSONResponse({"error": f"{error.problem}. {error.remedy}"}, status_code=400)


def require_sender(payload: dict[str, Any], name: str) -> None:
    """Check that the page belongs to the person who is signed in, and remove its name.

    Positions on a page refer to the order that its person was shown.

    Raises:
        BodyError: the page is somebody else's.
    """
    page = payload.pop("annotator", name)
    if page != name:
        raise BodyError(
            403, f"This page was opened by {page}, but {name} is signed in now. Reload it."
        )
