"""Signals for tests: functions of prompt and response."""


def count_vowels(prompt: str, response: str) -> float:
    """How many vowels the response has."""
    return float(sum(letter in "aeiou" for letter in response))


def not_a_number(prompt: str, response: str) -> float:
    """A broken signal."""
    return float("nan")
