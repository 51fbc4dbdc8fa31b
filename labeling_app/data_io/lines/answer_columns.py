"""Lines whose answers stand in fields of their own, as the columns of a spreadsheet do.

    prompt,answer_a,answer_b,preferred
    Why is the sky blue?,Rayleigh scattering.,It is painted.,a

Answers are fields whose names differ in a number, letter or side: `response_1`, `response_2`;
`Answer A`, `Answer B`; `a`, `b`. One field may say which is preferred. What looks like an answer or
a judgment and is not read makes the line a bad one: nothing that somebody judged is lost unsaid.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from string import ascii_lowercase
from typing import Any

from labeling_app.data_io.fields import KEYS, OF_OUR_LINES, refuse_misspelled
from labeling_app.data_io.lines.names import (
    NUMBERED,
    PROMPTS,
    ending,
    order,
    prompt_name,
    refuse_groups,
    refuse_prompts,
)
from labeling_app.rankings.tiers import Tiers
from rlhf.errors import InputError, MisreadError, UnusableContentError
from rlhf.records.schema import JsonObject

ANSWERS = ("answer", "response", "completion", "output")
STEMS = ("", *ANSWERS)  # of names of columns; that of `a` and `b` is empty
ANSWER = rf"({'|'.join(ANSWERS)})"
PREFERRED = rf"(preferred|winner|preference|label|choice|chosen|better|best)([\s_-]*{ANSWER})?"
# names of fields that must not be left unread; `response_id` and `preferred_language` may be
LOST = (
    rf"{ANSWER}s?([\s_-]*(\d+|[a-z]|left|right|text))?|rejected|"
    rf"(prefer(red|ence)|winn(er|ing)|chosen|better|best)([\s_-]*({ANSWER}|model|name|side|id))*"
)
# in longer names, too, where such a field names one of the answers: `boss_preferred`
JUDGMENT = r"(?:^|[\W_])(preferred|preference|winner|chosen|choice|better|best|verdict)(?:[\W_]|$)"
# where no field says which answer is preferred, also these, whatever they hold
JUDGMENT_ALONE = rf"{JUDGMENT}|(?:^|[\W_])(wins?|won|worst|rank(s|ed|ing)?)(?:[\W_]|$)"
SCORE = r"(?:^|[\W_])(scores?|ratings?)(?:[\W_]|$)"  # of an answer, as in `score_a`
NUMBER = r"-?\d+(\.0)?"
TIES = ("tie", "equal", "both")
LISTED = ("responses", "response", "completion")  # fields of our own lines
JUDGED = ("tiers", "pairs", "scores")
NO_PROMPT = {*KEYS, "id"} - set(PROMPTS)
COLUMNS = (
    "Answers are read from answer_a, answer_b, … (also response_1, response_2, …), and which is "
    "preferred from preferred (a, b or tie)."
)


def with_answer_columns(value: JsonObject) -> JsonObject:
    """A line with answers in fields of their own as one with `responses` and `tiers`.

    Lines of other formats are returned as they are.

    Raises:
        InputError: a field that looks like an answer or a judgment is not read, or the names leave
            open what is the prompt, or which group of fields are the answers; or an unknown value
            says which one is preferred.
        MisreadError: a number names none of the answers: the file may count them from 0.
        UnusableContentError: a judgment of fewer than two answers.
    """
    if _is_of_other_format(value):
        _refuse_names_for_texts(value)
        return value
    columns = () if any(map(value.get, LISTED)) else _columns(value)
    if not columns:
        if "prompt" in value or "messages" in value:
            refuse_misspelled(value)
            _refuse_unread(value)
        return value
    preferred = _preferred(value, columns)
    prompt = _prompt(value, (*columns, preferred))
    read = {*columns, preferred, prompt}
    rest = {name: content for name, content in value.items() if name not in read}
    given = [name for name in columns if _is_filled(value[name])]
    judgments = [
        name
        for name, content in rest.items()
        if _is_judgment(name, content, columns, given)
        or (preferred is None and _is_judgment_alone(name, content, columns))
    ]
    _refuse_unread(rest, judgments)
    judged = {} if preferred is None else _judged(preferred, value[preferred], columns, given)
    return {
        **rest,
        "prompt": value[prompt],
        "responses": [value[name] for name in given],
        **judged,
    }


def _is_of_other_format(value: JsonObject) -> bool:
    return (
        ("chosen" in value and "rejected" in value)
        or ("completions" in value and "instruction" in value)
        or any(map(value.get, JUDGED))
    )


def _refuse_names_for_texts(value: JsonObject) -> None:
    """Check that `chosen` and `rejected` are not the names of answers in columns."""
    if not ("chosen" in value and "rejected" in value):
        return
    letters = _letters(value)
    names = {_plain(str(value[name])) for name in ("chosen", "rejected")}
    spellings = {
        column: {_plain(column), *([_end(column)] if _stem(column, letters) in STEMS else [])}
        for column in value
        if column not in ("chosen", "rejected")
    }
    named = [column for column, spelled in spellings.items() if spelled & names]
    if names <= set().union(*spellings.values()):
        raise InputError(
            f"chosen is {value['chosen']!r} and rejected {value['rejected']!r}, which name "
            f"answers of {', '.join(named)}",
            "Call the column that names the better answer preferred, and remove the other.",
        )


def _is_filled(content: Any) -> bool:
    return bool(content.strip()) if isinstance(content, str) else content not in (None, [], {})


def _columns(value: JsonObject) -> tuple[str, ...]:
    """The fields that hold answers, or would: a table has empty cells."""
    groups: dict[str, list[str]] = {}
    letters = _letters(value)
    for name, content in value.items():
        stem = _stem(name, letters)
        if stem in ANSWERS and not isinstance(content, str | None):
            raise InputError(f"{name} must be text, found {content!r:.80}", "Write it in quotes.")
        if stem in STEMS and isinstance(content, str | None):
            groups.setdefault(stem, []).append(name)
    if len(groups.get("", ())) < 2:  # a column `a` alone may be anything
        groups.pop("", None)
    candidates = list(groups.values())
    filled = [names for names in candidates if any(_is_filled(value[name]) for name in names)]
    used = filled or candidates[:1]
    endings = [_end(name) for names in used for name in names]
    if len(used) > 1 or len(set(endings)) < len(endings):
        refuse_groups(used)
    return tuple(sorted(endings and used[0], key=order))


def _stem(name: str, letters: Sequence[str]) -> str | None:
    """The name without its number, letter or side; None if it has none."""
    if name.strip().lower() in letters:
        return ""
    numbered = NUMBERED.match(name.strip())
    return numbered[1].lower() if numbered else None


def _letters(names: Iterable[str]) -> list[str]:
    """The letters that are names of fields, from `a` on without a gap."""
    lows = {name.strip().lower() for name in names}
    return list(takewhile(lows.__contains__, ascii_lowercase))


def _end(name: str) -> str:
    """The part that tells an answer from the others: the end of its field's name, or the whole."""
    end = ending(name.strip()) or name.strip().lower()
    return str(int(end)) if end.isdecimal() else end


def _prompt(value: JsonObject, others: Collection[str | None]) -> str:
    """The field that holds the prompt, also where it is empty."""
    known = [name for name in value if name.lower() in PROMPTS]
    if known and not any(_is_filled(value[name]) for name in known):
        return known[0]
    no_prompt = {name for name in value if name in others or name.lower() in NO_PROMPT}
    if not known:  # told by the names alone, so that an empty cell changes nothing
        texts = [name for name in value if isinstance(value[name], str | list | None)]
        rest = [name for name in texts if name not in no_prompt]
        if len(rest) != 1:
            refuse_prompts(rest)
        return rest[0]
    return prompt_name(value, no_prompt)


# --------------------------------------------------------------------------------- the judgment


def _preferred(value: JsonObject, columns: Collection[str]) -> str | None:
    """The field that says which answer is preferred, if it says anything."""
    named = [name for name in value if _says_preferred(name) and name not in columns]
    filled = [name for name in named if _is_filled(value[name])]
    if len(filled) > 1:
        raise InputError(
            f"Both {filled[0]} and {filled[1]} could say which answer is preferred",
            "Keep one of them, and rename or remove the other.",
        )
    return next(iter(filled or named), None)


def _says_preferred(name: str) -> bool:
    return re.fullmatch(PREFERRED, name.strip(), re.IGNORECASE) is not None


def _judged(name: str, judgment: Any, columns: Sequence[str], given: Sequence[str]) -> JsonObject:
    """`tiers` over the answers that are given; nothing where there is no judgment."""
    if not _is_filled(judgment):
        return {}
    if len(given) < 2:
        empty = next((column for column in columns if column not in given), "a second answer")
        raise UnusableContentError(
            f"{name} is {judgment!r:.80}, and {empty} is empty",
            "Fill it in, or leave the line out.",
        )
    tiers = _tiers(str(judgment), columns, given)
    endings = {_end(column) for column in columns}
    if tiers is None and _is_unknown_number(str(judgment), endings):
        raise MisreadError(
            f"{name} is {judgment!r:.80}, and the answers are numbered "
            f"{', '.join(sorted(endings))}",
            f"If {name} counts from 0, add 1 to every number of the file; if it is a rating, "
            "rename it.",
        )
    if tiers is None:
        ties = TIES if len(given) == 2 else TIES[:2]  # both of three leaves open which
        raise InputError(
            f"{name} is {judgment!r:.80}, which names none of the answers {', '.join(given)}",
            f"Write {', '.join(_end(column) for column in given)}, one of these names, "
            f"{' or '.join(ties)}, or nothing where nobody has judged. If {name} says something "
            "else, rename it.",
        )
    return {"tiers": tiers}


def _tiers(judgment: str, columns: Sequence[str], given: Sequence[str]) -> Tiers | None:
    """The preferred answer above the others, a tie of all, or None for an unknown word."""
    word = _plain(judgment)
    if word in TIES[:2] or (word == TIES[2] and len(given) == 2):
        return [list(range(len(given)))]
    for position, name in enumerate(columns):
        spellings = {_plain(name), _end(name)}
        if _end(name).isdecimal():  # a letter counts numbers; a number might begin at 0 or 1
            spellings.add(ascii_lowercase[position : position + 1])
        if word in spellings and name in given:
            best = given.index(name)
            return [[best], [index for index in range(len(given)) if index != best]]
    return None


def _is_unknown_number(judgment: str, endings: Collection[str]) -> bool:
    """Whether a number is none of those that the answers have, so that these may be others."""
    is_numbered = all(end.isdecimal() for end in endings)
    is_number = re.fullmatch(NUMBER, judgment.strip()) is not None
    return is_numbered and is_number and _plain(judgment) not in endings


def _plain(text: str) -> str:
    """`Answer A` as `answera`, and `2.0`, as spreadsheets write numbers, as `2`; `-1` stays."""
    return re.sub(r"(?<=[a-z])[\s_-]+", "", text.strip().lower()).removesuffix(".0")


# ------------------------------------------------------------------------------- what is not read


def _refuse_unread(rest: JsonObject, judgments: Collection[str] = ()) -> None:
    """Check that none of the fields that are not read holds an answer or a judgment."""
    unread = [
        name for name, content in rest.items() if name in judgments or _is_lost(name, content, rest)
    ]
    if unread:
        reason = "look like answers or judgments"
        if len(unread) == 1:
            reason = "looks like an answer or a judgment"
        raise InputError(
            f"{', '.join(unread):.200} {reason}, and would not be read",
            f"{COLUMNS} Use these names; what is neither needs another name, or can be removed.",
        )


def _is_lost(name: str, content: Any, rest: JsonObject) -> bool:
    if not _is_filled(content):
        return False
    low = name.strip().lower()
    if low == "label":  # beside a prompt alone it may say anything
        return len(rest.get("responses") or ()) > 1
    if name in OF_OUR_LINES or re.fullmatch(LOST, low) is None:
        return False
    return _says_preferred(low) or not isinstance(content, int | float)


def _is_judgment(name: str, content: Any, columns: Sequence[str], given: Sequence[str]) -> bool:
    """Whether a field's name speaks of a judgment and its value names one of the answers."""
    speaks = name not in OF_OUR_LINES and re.search(JUDGMENT, name, re.IGNORECASE) is not None
    return speaks and _is_filled(content) and _tiers(str(content), columns, given) is not None


def _is_judgment_alone(name: str, content: Any, columns: Sequence[str]) -> bool:
    """Whether a field's name speaks of a judgment, in a line where no other says it."""
    if name in OF_OUR_LINES or not _is_filled(content):
        return False
    is_of_answer = _end(name) in {_end(column) for column in columns}
    pattern = f"{JUDGMENT_ALONE}|{SCORE}" if is_of_answer else JUDGMENT_ALONE
    return re.search(pattern, name, re.IGNORECASE) is not None
