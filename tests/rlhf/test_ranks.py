"""How processes of a group end, and what a signal cannot break off."""

import os
import signal
import subprocess
import sys
import threading

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


def test_a_short_block_is_not_broken_off_by_a_signal() -> None:
    caught = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    try:
        with without_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        assert caught == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_another_thread_which_gets_no_signals_is_left_as_it_is() -> None:
    done = []

    def work() -> None:
        with without_signals():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]
