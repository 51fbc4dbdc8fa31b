"""How counts of records are said, in commands and on pages."""


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 → "1 prompt", 2301 → "2,301 prompts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def num_people(number: int) -> str:
    """1 → "1 person", 12 → "12 people"."""
    return f"{number:,} {'person' if number == 1 else 'people'}"
