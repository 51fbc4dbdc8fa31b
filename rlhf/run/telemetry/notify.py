"""`--notify`: posts how a run ended to a chat or pager, as a JSON object that Slack accepts."""

import json
import sys
from http.client import HTTPException
from urllib.parse import urlsplit
from urllib.request import Request

from rlhf.endpoints.urls import open_url

TIMEOUT_SECONDS = 10


def notify(url: str | None, run: str, status: str, details: str = "") -> None:
    """Post the stage's folder and its status (done, failed, interrupted, stalled or waiting).

    If the URL does not answer, only print a warning.
    """
    if not url:
        return
    text = f"{run}: {status}" + (f"\n{details}" if details else "")
    content = json.dumps({"text": text, "run": run, "status": status}).encode()
    try:
        request = Request(url, content, {"Content-Type": "application/json"})
        with open_url(request, timeout_seconds=TIMEOUT_SECONDS):
            pass
    except (OSError, HTTPException, ValueError) as error:
        host = urlsplit(url).hostname  # the rest of the address is a secret
        sys.stderr.write(f"--notify: {host} does not answer ({error})\n")
