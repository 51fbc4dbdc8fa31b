"""A judge behind a real HTTP server."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler

from tests.servers.local import LocalServer

ANSWERS = re.compile(r"# Answer of assistant A\n(.*)\n\n# Answer of assistant B\n(.*)$", re.DOTALL)


class JudgeServer(LocalServer):
    """Speaks chat completions; the longer answer wins, and "biased" texts always win as A."""

    path = "/v1"

    def __init__(self) -> None:
        super().__init__(Handler)
        self.calls: list[dict] = []
        self.failures: list[int] = []  # statuses to answer with, 0 is a good answer
        self.unclear = False
        self.refuses: set[str] = set()  # settings not for this model, which thinks first …
        self.thinking_seconds = 0.0  # … so long, where it may
        self.is_first_better = lambda first, second: "biased" in first or len(first) > len(second)
        self.absent_to = ""  # questions with these words find nobody there …
        self.absent_after = 0  # … once so many others were answered
        self.answered = 0
        self.pause = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: JudgeServer = self.server
        server.calls.append({"path": self.path, "key": self.headers["Authorization"], **body})
        status = server.failures.pop(0) if server.failures else 0
        if server.absent_to and server.absent_to in body["messages"][0]["content"]:
            while server.answered < server.absent_after:
                server.pause.wait(0.01)  # tests take time.sleep away
            status = 503
        if refused := server.refuses & set(body):
            self.send_error(400, f"Not here: {sorted(refused)}")
            return
        if "max_completion_tokens" in body:
            server.pause.wait(server.thinking_seconds)
        if status:
            self.send_error(status, "busy")
            return
        first, second = ANSWERS.search(body["messages"][0]["content"]).groups()
        verdict = "A" if server.is_first_better(first, second) else "B"
        text = "I cannot say." if server.unclear else f"[[A]]? No: so.\n[[{verdict}]]"
        answer = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        server.answered += 1

    def log_message(self, *_: object) -> None:
        pass
