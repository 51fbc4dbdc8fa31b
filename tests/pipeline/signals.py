"""Signals for tests: functions of prompt and response."""

import itertools
import os
import signal
import time


def count_vowels(prompt: str, response: str) -> float:
    """How many vowels the response has."""
    return float(sum(letter in "aeiou" for letter in response))


def count_scaled(prompt: str, response: str) -> float:
    """`count_vowels` times SCALE: a function that changes under its name."""
    return count_vowels(prompt, response) * float(os.environ.get("SCALE", "1"))


def not_a_number(prompt: str, response: str) -> float:
    """A broken signal."""
    return float("nan")


def count_letters(prompt: str, response: str) -> float:
    """How many letters the response has."""
    return float(sum(letter.isalpha() for letter in response))


def count_or_die(prompt: str, response: str) -> float:
    """`count_vowels`, but a prompt with the words in KILL_AT kills the process."""
    if os.environ.get("KILL_AT", prompt + "?") in prompt:
        os.kill(os.getpid(), signal.SIGKILL)
    return count_vowels(prompt, response)


def count_slowly(prompt: str, response: str) -> float:
    """`count_vowels`, half a second later."""
    time.sleep(0.5)
    return count_vowels(prompt, response)


_calls = itertools.count(1)


def count_calls(prompt: str, response: str) -> float:
    """Which call of this function it is, so that the same response asked twice differs."""
    return float(next(_calls))
