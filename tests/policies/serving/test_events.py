"""Events of a stream, however the network cuts them; conversations recognized by their turns."""

import json

import pytest

from policies.serving.servers.events import (
    BrokenStreamError,
    Completion,
    EventReader,
    completion_events,
    read_completion,
)
from policies.serving.split import REMEMBERED, Split

NAMES = {"id": "chatcmpl-1", "model": "policy"}
PIECES = ["Grüß ", "dich", "!"]


def chunk(content: str | None = None, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice], **more}).encode() + b"\n\n"


def read(content: bytes, size: int) -> tuple[EventReader, bytes]:
    reader = EventReader(NAMES)
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    return reader, b"".join(map(reader.feed, parts))


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b""])
def test_a_stream_is_read_in_pieces_of_any_size(size, end):
    stream = b": a comment\r\n\r\n" + b"".join(map(chunk, PIECES))
    stream += chunk(finish="stop", usage={"completion_tokens": 3}) + end
    reader, sent = read(stream, size)
    reader.close()
    assert (reader.completion.text, reader.completion.finish) == ("Grüß dich!", "stop")
    assert reader.completion.completion_tokens == 3
    events = [json.loads(line[5:]) for line in sent.splitlines() if line]
    assert {(event["id"], event["model"]) for event in events} == {("chatcmpl-1", "policy")}
    assert [e["choices"][0]["delta"].get("content") for e in events] == [*PIECES, None]
    assert b"[DONE]" not in sent


@pytest.mark.parametrize(
    "content",
    [
        b"data: {\n",
        b"data: 7\n",
        b'data: {"choices": 7}\n',
        b'data: {"choices": [7]}\n',
        b'data: {"error": {"message": "no memory"}}\n',
        b"data: " + b"[" * 10_000 + b"\n",
    ],
)
def test_what_is_no_event_breaks_the_stream(content):
    with pytest.raises(BrokenStreamError):
        EventReader(NAMES).feed(content)


def test_a_stream_that_ends_early_is_broken():
    reader, _ = read(chunk("Hel"), 100)
    with pytest.raises(BrokenStreamError, match="in the middle of a response"):
        reader.close()


def test_a_line_without_end_is_not_collected():
    with pytest.raises(BrokenStreamError, match="too long"):
        read(b"data: " + b"x" * 2**23, 2**20)


def test_calls_of_tools_are_no_text():
    message = {"content": None, "tool_calls": [{"id": "t"}]}
    answer = read_completion({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    assert answer.has_other_content
    assert answer.text == ""


def test_a_character_may_come_in_halves():
    pieces = [{"content": piece} for piece in ("I am \ud83d", "\ude00, \ud83d")]
    answer = Completion()
    for piece in pieces:
        answer.add(piece, None)
    assert answer.text == "I am 😀, \ufffd"
    answer.text.encode()  # as the database does


def test_a_whole_answer_as_events_is_the_same_answer():
    message = {"role": "assistant", "content": "Hello!"}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    completion = {"id": "a", "choices": [choice], "usage": {"completion_tokens": 2}}
    reader, _ = read(b"".join(completion_events(completion)), 11)
    reader.close()
    assert reader.completion == read_completion(completion)


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def test_the_draw_has_the_share_and_does_not_depend_on_the_question():
    split = Split(0.1, seed=1)
    drawn = [split.draw(f"c-{n}", turns("Hi?")).variant for n in range(5_000)]
    # three standard deviations of 5,000 draws are 64
    assert 500 - 64 < drawn.count("against") < 500 + 64
    assert {Split(0.0).draw("c", turns("Hi?")).variant for _ in range(100)} == {"policy"}


def test_a_conversation_is_recognized_by_what_was_said():
    split = Split(0.5, seed=1)
    begun = split.draw("c-1", turns("Hi?"))
    split.remember(begun, turns("Hi?"), "Hello! ")
    assert split.draw("c-2", turns("Hi?", "Hello!", "And?")) == begun
    split.remember(begun, turns("Hi?", "Hello!", "And?"), "So.")
    assert split.draw("c-3", turns("Hi?", "Hello!", "And?", "So.", "Oh!")) == begun
    assert split.draw("c-4", turns("Hi?", "Bye!", "And?")).id == "c-4"
    assert split.draw("c-5", turns("Hi?")).id == "c-5"


def test_two_conversations_with_the_same_words_are_not_told_apart():
    split = Split(0.5, seed=1)
    for name in ("c-1", "c-2"):
        split.remember(split.draw(name, turns("Hi?")), turns("Hi?"), "Hello!")
    found = split.draw("c-3", turns("Hi?", "Hello!", "And?"))
    assert (found.id, found.is_ambiguous) == ("c-2", True)
    split.remember(found, turns("Hi?", "Hello!", "And?"), "So.")
    later = split.draw("c-4", turns("Hi?", "Hello!", "And?", "So.", "Oh!"))
    assert later.is_ambiguous
    assert not split.draw("c-5", turns("Hi?")).is_ambiguous


def test_only_so_many_conversations_are_remembered(monkeypatch):
    assert REMEMBERED == 100_000
    monkeypatch.setattr("policies.serving.split.REMEMBERED", 2)
    split = Split(0.5)
    for n in range(3):
        split.remember(split.draw(f"c-{n}", turns(f"{n}?")), turns(f"{n}?"), "So.")
    found = [split.draw("new", turns(f"{n}?", "So.", "And?")).id for n in range(3)]
    assert found == ["new", "c-1", "c-2"]
    first = split.draw("c-1", turns("1?", "So.", "And?"))
    split.remember(first, turns("1?"), "So.")  # said again: the other is now the oldest
    split.remember(split.draw("c-3", turns("3?")), turns("3?"), "So.")
    found = [split.draw("new", turns(f"{n}?", "So.", "And?")).id for n in (1, 2, 3)]
    assert found == ["c-1", "new", "c-3"]
