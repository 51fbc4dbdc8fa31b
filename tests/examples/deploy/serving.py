"""Servers of tests as processes, and waiting until they answer."""

import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError


@contextmanager
def running(
    command: Sequence[str], url: str, environment: dict[str, str], folder: Path
) -> Iterator[None]:
    """A server during the block; `url` answers when it is ready."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            deadline = time.monotonic() + 180
            while not answers(url):
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline, f"{url} does not answer"
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.communicate(timeout=30)


def answers(url: str) -> bool:
    """Whether a server answers with success, whoever signed its certificate."""
    anybody = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(url, timeout=5, context=anybody):
            return True
    except (URLError, ConnectionError, TimeoutError):
        return False
