"""A real HTTP server for the length of a test."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class LocalServer(ThreadingHTTPServer):
    """Serves on a free port inside a `with` block; `path` is the end of its `url`."""

    path = "/"

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    def __enter__(self) -> Self:
        # It looks this often whether the test is over; the default is 0.5 s.
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{self.path}"
