"""Opening a URL; a server that refuses keeps no connection of ours open."""

import urllib.request
from http.client import HTTPResponse
from io import BytesIO
from urllib.error import HTTPError

MAX_REFUSAL_BYTES = 10_000


def open_url(request: urllib.request.Request, *, timeout_seconds: float) -> HTTPResponse:
    """The server's answer, open to be read, for a `with` block.

    Args:
        request: the address, with what is sent there.
        timeout_seconds: of silence.

    Raises:
        HTTPError: the server refuses; its words, up to `MAX_REFUSAL_BYTES`, can be read from the
            error, and its connection is closed.
        URLError, TimeoutError, ConnectionError, HTTPException: as urllib does.
    """
    try:
        opened: HTTPResponse = urllib.request.urlopen(request, timeout=timeout_seconds)
    except HTTPError as error:
        with error:
            words = BytesIO(error.read(MAX_REFUSAL_BYTES))
        raise HTTPError(error.url, error.code, error.msg, error.headers, words) from None
    return opened
