"""What the fuzz tests do to files and answers: bytes spliced in, values of JSON replaced."""

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MAX_SECONDS = 5

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63) - 1, 10**400, -1, 0])
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(["", "done", "running", "failed", "2026-01-01", "../..", "\udc80", "nan"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
PIECES = st.binary(max_size=6) | st.sampled_from(
    [
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"{",
        b"}",
        b"[" * 2000,
        b'{"a":' * 2000,
        b'"',
        b"9" * 5000,
        b"1e999",
        b"NaN",
        b"\\ud800",
        b"\n",
        b"\r\n",
        b": ",
        b"&a [*a, *a]",
        b"*a",
        b"!!float x",
        b"!!binary x",
        b"!!set {a}",
        b"2026-13-45",
        b"0x" + b"f" * 5000,
        b"<<: *a",
        b"? [1]",
        b"\t",
    ]
)


@st.composite
def spliced(draw: st.DrawFn, content: bytes) -> bytes:
    """Some bytes with one to three pieces put in, here and there in the place of others."""
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(content)))
        end = min(len(content), begin + draw(st.integers(0, 40)))
        content = content[:begin] + draw(PIECES) + content[end:]
    return content


@st.composite
def altered(draw: st.DrawFn, document: Any) -> bytes:
    """A JSON document in which a value was replaced, removed or added, as text."""
    document = copy.deepcopy(document)
    inside = document
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        if isinstance(inside[key], dict | list) and inside[key] and draw(st.booleans()):
            inside = inside[key]
            continue
        if draw(st.integers(0, 3)) == 0:
            del inside[key]
        else:
            inside[key] = draw(VALUES)
        break
    return json.dumps(document).encode()


def mutated(document: Any) -> st.SearchStrategy[bytes]:
    """A JSON document with a value altered, or its text spliced."""
    return altered(document) | spliced(json.dumps(document).encode())


def run_cases(check: Callable[[Any], None], cases: st.SearchStrategy[Any], count: int) -> None:
    """Check so many cases, each of which must end in time."""
    configured = settings(
        max_examples=count,
        deadline=MAX_SECONDS * 1000,
        database=None,
        derandomize=count < 1000,  # the quick ones are the same every time
        suppress_health_check=list(HealthCheck),
    )

    def one(case: Any) -> None:
        check(case)

    configured(given(cases)(one))()
