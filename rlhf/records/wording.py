"""How prompts, counts of records and judges are worded, in commands, exports and on pages."""

from rlhf.records.schema import Prompt

PEOPLE = "people"  # as a judge
OWN_JUDGE = "which it was trained against"
EMPTY_TEXT = "(no answer)"  # shown to people in place of an empty response


def whole_text(prompt: Prompt) -> str:
    """The conversation as plain text, as `Prompt.text`, after what the system turn says."""
    system = [turn.content for turn in prompt.messages if turn.role == "system"]
    return "\n\n".join([*system, prompt.text])


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 → "1 prompt", 2301 → "2,301 prompts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def num_people(number: int) -> str:
    """1 → "1 person", 12 → "12 people"."""
    return f"{number:,} {'person' if number == 1 else 'people'}"


def judge_in_words(judge: str) -> str:
    """The judge of a verdict at the beginning of a sentence, so that nobody takes it for people.

    "signal examples.quickstart.sentiment:score" → "The function sentiment:score"; a reward model
    that the policy was trained against → "Its own reward model".

    Args:
        judge: kind and name, with `OWN_JUDGE` after a comma if the policy was trained against it.
    """
    bare = judge.removesuffix(f", {OWN_JUDGE}")
    if bare != judge and bare.startswith("reward model"):
        return "Its own reward model"
    kind, _, name = bare.partition("signal")
    if bare != kind and kind in ("", "reward function "):
        who = f"The function {name.lstrip(' :').rpartition('.')[2]}".rstrip()  # it may lack a name
    else:
        who = f"The {bare}"
    return who if bare == judge else f"{who}, {OWN_JUDGE},"
