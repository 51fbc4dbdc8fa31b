"""A small server for chat completions and streams, with failures on demand."""

import json
import threading
from http.server import BaseHTTPRequestHandler

from tests.servers.local import LocalServer


class ChatServer(LocalServer):
    """Answers with `answers` in turn, word by word; `gate` holds answers back after a few words."""

    path = "/v1"

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(Handler)
        self.calls: list[dict] = []
        self.answers = ["one two three", "four **five** six"]
        self.failures: list[str] = []  # a status, "silent", "cut", "error" or "foreign"
        self.models = ["served-model"]
        self.streams = True
        self.ending = "stop"
        self.abandoned = 0  # streams whose client has gone away
        self.gate = threading.Event()
        self.gate.set()
        self.lock = threading.Lock()

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        super().__exit__()

    def answer(self, body: dict) -> str:
        """What to say to the next request."""
        return self.answers[len(self.calls) % len(self.answers)]

    def handle_error(self, *_: object) -> None:
        """A client has gone away."""
        self.abandoned += 1


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_json({"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: ChatServer = self.server
        with server.lock:
            answer = server.answer(body)
            server.calls.append({"path": self.path, "key": self.headers["Authorization"], **body})
            failure = server.failures.pop(0) if server.failures else ""
        if failure.isdigit():
            self.send_error(int(failure), "not now")
        elif failure == "foreign":
            self.send_json({"hello": "there"})
        elif not server.streams:
            message = {"message": {"content": answer}, "finish_reason": server.ending}
            self.send_json({"choices": [message]})
        else:
            self.stream(answer, failure)

    def stream(self, answer: str, failure: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        server: ChatServer = self.server
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number, piece in enumerate(answer.split(" ")):
            if number == 1:
                server.gate.wait(30)
                if failure == "silent":
                    return server.gate.wait(3) and None
                if failure == "error":
                    return self.event({"error": {"message": "out of memory"}})
                if failure == "cut":
                    return None
            self.event({"choices": [{"delta": {"content": " " * (number > 0) + piece}}]})
        self.event({"choices": [{"delta": {}, "finish_reason": server.ending}]})
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")
        return None

    def event(self, value: dict) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def send_json(self, value: dict) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass
