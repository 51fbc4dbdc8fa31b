"""How processes of a group end, and what a signal cannot break off."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from rlhf.ranks import without_signals

END = """
import atexit, sys
from rlhf.ranks import exit_process
atexit.register(lambda: print("registered"))
print("words, ", end="")
print("of an error", file=sys.stderr, end="")
exit_process(3)
"""


def test_a_process_of_a_group_ends_with_its_code_its_words_and_what_was_registered() -> None:
    done = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout == "words, registered\n"
    assert done.stderr == "of an error"


@pytest.fixture
def caught() -> Iterator[list[int]]:
    """The signals that arrive, whatever the process that started this one ignores."""
    numbers: list[int] = []
    both = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(one, lambda number, frame: numbers.append(number)) for one in both]
    yield numbers
    for one, handler in zip(both, before, strict=True):
        signal.signal(one, handler)


def test_a_short_block_is_not_broken_off_by_a_signal(caught: list[int]) -> None:
    with without_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert caught == []
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert caught == [signal.SIGTERM, signal.SIGINT]


def test_another_thread_which_gets_no_signals_is_left_as_it_is(caught: list[int]) -> None:
    handler, found = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with without_signals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [handler]
