"""A reward behind a real HTTP server, with failures on demand."""

import json
import os
import socket
import struct
from http.server import BaseHTTPRequestHandler

from tests.servers.local import LocalServer


class RewardServer(LocalServer):
    """Every response is worth its length, unless `answer` says otherwise."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.requests: list[list[dict]] = []
        self.answer: object = None  # JSON, or bytes as they are
        self.failures: list[str] = []  # a status, or a connection that is closed, reset or cut


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: RewardServer = self.server
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        server.requests.append(items)
        failure = server.failures.pop(0) if server.failures else ""
        if failure.isdigit():
            self.send_error(int(failure), "not now")
        elif failure == "reset":
            at_once = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            os.close(self.connection.detach())
        elif failure != "closed":
            rewards = {"rewards": [len(item["response"]) for item in items]}
            answer = rewards if server.answer is None else server.answer
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: 5 if failure == "cut" else None])

    def log_message(self, *_: object) -> None:
        pass
