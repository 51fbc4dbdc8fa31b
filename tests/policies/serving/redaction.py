"""Redactions that tests name on the command line."""

import re


def without_digits(text: str) -> str:
    return re.sub(r"\d", "*", text)


def broken(text: str) -> str:
    raise ValueError(text)
