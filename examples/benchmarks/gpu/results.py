"""The results of the GPU stages: one JSON line for every case, written as soon as it is measured.

A case is a stage with its settings. It counts as measured for the code and the device that it was
measured with; a case that failed leaves a line with its error and is measured again.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
CODE = ("rlhf", "reward", "policies", "examples/benchmarks")
MOST_PRINTED = 1000  # characters; the file has all
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "vllm")

Line = dict[str, Any]


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """The flags that every stage has."""
    parser = argparse.ArgumentParser(description=str(text).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "gpu")
    parser.add_argument("--work", type=Path, help="models and data; default: OUT/work")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, on any machine")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Read the flags; without a GPU only a rehearsal runs."""
    arguments = parser.parse_args(argv)
    arguments.work = arguments.work or arguments.out / "work"
    arguments.results = arguments.out / "results.jsonl"
    if not arguments.rehearse and device() == "cpu":
        parser.error("there is no GPU here; add --rehearse to try this with a tiny model")
    return arguments


@lru_cache
def device() -> str:
    """The name of the first GPU, without loading torch; cpu where there is none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    program = shutil.which("nvidia-smi")
    if program is None:
        return "gpu" if Path("/dev/nvidia0").exists() else "cpu"
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or ["cpu"])[0].strip() if not done.returncode else "cpu"


@lru_cache
def code() -> str:
    """A hash of the code that is measured; commits are not known where there is no git."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def key_of(arguments: argparse.Namespace, stage: str, settings: Line) -> Line:
    """The case, device and code that a result belongs to."""
    case = {"stage": stage, "settings": settings, "rehearsal": arguments.rehearse}
    return {**case, "device": device(), "code": code()}


def read_results(file: Path) -> list[Line]:
    """All lines but one that a kill cut short."""
    if not file.is_file():
        return []
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def lines_of(arguments: argparse.Namespace, stage: str, settings: Line) -> list[Line]:
    """The lines that the file has of a case."""
    key = key_of(arguments, stage, settings).items()
    lines = read_results(arguments.results)
    return [line for line in lines if all(line[name] == value for name, value in key)]


def find_result(arguments: argparse.Namespace, stage: str, settings: Line) -> Line | None:
    """The result of a case; None where it is still to be measured."""
    results = [line["result"] for line in lines_of(arguments, stage, settings) if "result" in line]
    return results[-1] if results else None


def has_failed(arguments: argparse.Namespace, stage: str, settings: Line) -> bool:
    """Whether a case has ended with an error."""
    return any("error" in line for line in lines_of(arguments, stage, settings))


def measure(
    arguments: argparse.Namespace, stage: str, settings: Line, work: Callable[[], Line]
) -> Line:
    """The result of a case, from the file or else from `work`, which is printed and appended."""
    title = " ".join([stage, *map(str, settings.values())])
    known = find_result(arguments, stage, settings)
    if known is not None:
        say(f"{title}: measured already, in {arguments.results}")
        return known
    say(f"{title}: begins" + (" (rehearsal)" if arguments.rehearse else ""))
    began, result = time.monotonic(), None
    try:
        result = work()
    finally:  # what ends a case is named in the file, and travels on
        error = sys.exc_info()[1]
        outcome = {"error": repr(error)[:2000]} if result is None else {"result": result}
        seconds = round(time.monotonic() - began, 1)
        line = {**key_of(arguments, stage, settings), **outcome, "seconds": seconds, **facts()}
        append(arguments.results, line)
        say(f"{title}: {json.dumps(outcome)[:MOST_PRINTED]}, {seconds} s")
    return result


def append(file: Path, line: Line) -> None:
    """Add a line that stays when the machine goes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torn = file.is_file() and not file.read_bytes().endswith(b"\n") and file.stat().st_size > 0
    with file.open("a", encoding="utf-8") as stream:
        stream.write("\n" * torn + json.dumps(line) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def facts() -> Line:
    """When, and with which versions."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"at": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions}


def say(message: str) -> None:
    """Print at once: what a killed command has printed is all that is left of it."""
    print(message, flush=True)
