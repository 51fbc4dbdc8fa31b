"""Requests to a server that may be busy or briefly absent, retried with growing pauses."""

import math
import time
from collections.abc import Callable
from http.client import HTTPException
from urllib.error import HTTPError, URLError

from rlhf.endpoints.urls import DeadlineError, stop_event
from rlhf.errors import InputError, InterruptedRunError

ATTEMPTS = 5
MAX_ERROR_BYTES = 300
CHECK_SECONDS = 0.1  # how often a pause checks whether the pool was interrupted


def ask_with_retries(
    ask: Callable[[], bytes],
    url: str,
    *,
    when_refused: str,
    when_absent: str,
    first_pause_seconds: float = 1.0,
) -> bytes:
    """The whole answer to the request that `ask` sends; each pause is twice as long as the last.

    `when_refused` and `when_absent` are the remedies in the errors.

    Raises:
        InputError: the server refuses the request.
        InterruptedRunError: it stays busy or absent, or drops every connection.
    """
    problem = ""
    for attempt in range(ATTEMPTS):
        try:
            if attempt:
                _pause(first_pause_seconds * 2 ** (attempt - 1))
            return ask()
        except HTTPError as error:
            problem = f"status {error.code}"
            if error.code != 429 and error.code < 500:
                text = error.read(MAX_ERROR_BYTES).decode(errors="replace")
                elsewhere = error.headers.get("Location", "") if error.code < 400 else ""
                if elsewhere:
                    text = f"it redirects to {elsewhere[:MAX_ERROR_BYTES]}, which is not followed"
                raise InputError(
                    f"{url} refused the request (status {error.code}): {text}", when_refused
                ) from None
        except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
            problem = str(error)
    raise InterruptedRunError(
        f"{url} does not answer after {ATTEMPTS} attempts ({problem})", when_absent
    )


def _pause(seconds: float) -> None:
    """Wait before asking again.

    Raises:
        DeadlineError: the pool of this thread was interrupted.
    """
    stopped = stop_event()
    if stopped is None:
        time.sleep(seconds)
        return
    for _ in range(math.ceil(seconds / CHECK_SECONDS)):
        if stopped.is_set():
            raise DeadlineError("stopped")
        time.sleep(CHECK_SECONDS)
