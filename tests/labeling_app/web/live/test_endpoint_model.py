"""What a model server sends in pieces, put together."""

import pytest

from labeling_app.web.live.endpoint_model import split_half


def test_a_character_may_come_in_halves() -> None:
    whole, half = split_half("", "I am \ud83d")
    assert (whole, half) == ("I am ", "\ud83d")
    assert split_half(half, "\ude00!") == ("😀!", "")
    assert split_half(half, "!") == ("\ufffd!", "")  # the other half never came
    assert split_half("", None) == ("", "")
    with pytest.raises(TypeError, match="a list in the place of text"):
        split_half("", [])
