"""A reward behind a real HTTP server, with failures on demand."""

import json
import os
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RewardServer(ThreadingHTTPServer):
    """Every response is worth its length, unless `answer` says otherwise."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[list[dict]] = []
        self.answer: dict | None = None
        self.failures: list[str] = []  # a status, or a connection that is closed, reset or cut

    def __enter__(self) -> "RewardServer":
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


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
            content = json.dumps(server.answer or rewards).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: 5 if failure == "cut" else None])

    def log_message(self, *_: object) -> None:
        pass
