"""What `--notify` tells, heard behind a real HTTP server."""

import json
from http.server import BaseHTTPRequestHandler

from tests.servers.local import LocalServer


class Listener(LocalServer):
    """Keeps in `heard` what is posted to `url`."""

    path = "/hook"

    def __init__(self) -> None:
        super().__init__(Handler)
        self.heard: list[dict[str, str]] = []


class Handler(BaseHTTPRequestHandler):
    server: Listener

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.heard.append(json.loads(content))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""
