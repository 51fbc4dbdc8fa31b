"""Servers of tests as processes, waiting until they answer, and a database to serve."""

import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

from rlhf.cli import main
from tests.servers.commands import REPOSITORY

DEPLOY = REPOSITORY / "examples" / "deploy"


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


def label_database(path: Path) -> Path:
    """A label database with three prompts."""
    lines = [json.dumps({"prompt": f"question {n}", "responses": ["a", "b"]}) for n in range(3)]
    source = path.with_suffix(".jsonl")
    source.write_text("\n".join(lines))
    assert main(["import", str(source), "--db", str(path)]) == 0
    return path
