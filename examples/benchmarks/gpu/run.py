"""All stages in order, each a process of its own, as far as the time goes.

    python -m examples.benchmarks.gpu.run [--minutes 9] [--rehearse] [--out FOLDER] [--work FOLDER]

What OUT/results.jsonl has of this code and this device is not measured again. When the time is up
the stage in work is stopped, and the same command goes on; stages that failed or were stopped come
after those that were never begun. Exit codes: 0 all is measured, 75 the time was up, 1 a stage
failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

from examples.benchmarks.gpu.results import (
    REPOSITORY,
    Line,
    append,
    find_result,
    has_failed,
    key_of,
    parse,
    parser_of,
    say,
)

STAGES: tuple[tuple[str, Line], ...] = (
    ("run_tests", {}),
    ("flex_lengths", {}),
    ("reward_model", {"size": "1b", "kind": "packed"}),
    ("reward_model", {"size": "1b", "kind": "trl"}),
    ("reward_model", {"size": "6b", "kind": "packed"}),
    ("reward_model", {"size": "6b", "kind": "trl"}),
    ("ppo_steps", {"size": "1b", "engine": "generate"}),
    ("ppo_steps", {"size": "1b", "engine": "continuous"}),
    ("ppo_steps", {"size": "1b", "engine": "vllm"}),
    ("ppo_steps", {"size": "6b", "engine": "generate"}),
    ("ppo_steps", {"size": "6b", "engine": "continuous"}),
    ("ppo_steps", {"size": "6b", "engine": "vllm"}),
)
OPTIONAL = ("trl", "vllm")
LEAST_SECONDS = 60.0  # that a stage is begun with
INTERRUPTED = 75


def run_stage(arguments: argparse.Namespace, stage: str, settings: Line, seconds: float) -> int:
    """Run one in a process of its own, which takes all memory with it when it ends.

    Raises:
        subprocess.TimeoutExpired: it was stopped.
    """
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    flags += ["--out", str(arguments.out), "--work", str(arguments.work)]
    flags += ["--rehearse"] if arguments.rehearse else []
    command = [sys.executable, "-m", f"{__package__}.{stage}", *flags]
    # asking a hub that does not answer would cost minutes
    environment = {"HF_HUB_OFFLINE": "1", **os.environ}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, process_group=0)
    try:
        return process.wait(seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(argv: list[str] | None = None) -> int:
    """Run what is not measured yet; the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=9.0)
    arguments = parse(parser, argv)
    arguments.out = arguments.out.resolve()
    arguments.work = arguments.work.resolve()
    deadline = time.monotonic() + 60 * arguments.minutes
    failed = 0
    for stage, settings in sorted(STAGES, key=lambda case: has_failed(arguments, *case)):
        title = " ".join([stage, *settings.values()])
        missing = [
            value for value in settings.values() if value in OPTIONAL and not find_spec(value)
        ]
        if missing:
            say(f"{title}: left out, {missing[0]} is not installed")
            continue
        if find_result(arguments, stage, settings) is not None:
            say(f"{title}: measured already")
            continue
        left = deadline - time.monotonic()
        try:
            if left >= LEAST_SECONDS:
                failed += run_stage(arguments, stage, settings, left) != 0
                continue
        except subprocess.TimeoutExpired:
            error = {"error": f"stopped after {left:.0f} s"}
            append(arguments.results, key_of(arguments, stage, settings) | error)
        say(f"{title}: the time is up; run the same command again to go on")
        return INTERRUPTED
    say(f"results: {arguments.results}" + (f"; {failed} stages failed" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or a stage would be left behind
    sys.exit(main())
