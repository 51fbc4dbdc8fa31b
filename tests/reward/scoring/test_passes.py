"""Plans of forward passes, their tokens counted by hand."""

import pytest

from reward.scoring.passes import SharedPrefix, pack_pass, packed_passes, padded_passes

SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]


def test_padded_passes_hold_sequences_of_similar_length() -> None:
    assert padded_passes([3, 9, 4, 2, 5], 10) == [[1], [4, 2], [0, 3]]
    assert padded_passes([30], 10) == [[0]]
    assert padded_passes([], 10) == []


@pytest.mark.parametrize("prompts", [["a", "b", "c", "d"], None])
def test_a_beginning_of_all_is_read_once_in_each_pass(prompts: list[str] | None) -> None:
    own = [[20], [21, 22, 23, 24], [25, 26], [27]]
    sequences = [SYSTEM + one for one in own]
    # 8 + 4 + 2 + 1 + 1
    assert packed_passes(sequences, prompts, 100) == [[SharedPrefix(8, [1, 2, 0, 3], 16)]]
    # 8 + 4 + 2, 8 + 1 + 1
    expected = [[SharedPrefix(8, [1, 2], 14)], [SharedPrefix(8, [0, 3], 10)]]
    assert packed_passes(sequences, prompts, 14) == expected


def test_prompts_are_read_once_if_that_saves_more() -> None:
    first, second = [*SYSTEM, 9, 9, 9], [*SYSTEM, 10, 10, 10]
    sequences = [[*first, 20], [*second, 21], [*first, 22, 23], [*second, 24]]
    # 11 + 2 + 1 and 11 + 1 + 1: 27 tokens; with one beginning 8 + 5 + 4 + 4 + 4 = 25
    assert packed_passes(sequences, ["a", "b", "a", "b"], 100) == [
        [SharedPrefix(8, [2, 0, 1, 3], 25)]
    ]
    more = [*sequences, [*first, 25], [*second, 26]]
    # one more token each, and one more of 4 each: 29 and 33
    expected = [[SharedPrefix(11, [2, 0, 4], 15), SharedPrefix(11, [1, 3, 5], 14)]]
    assert packed_passes(more, ["a", "b"] * 3, 100) == expected
    row = pack_pass(expected[0], more)
    assert row.ids.tolist() == [[*first, 22, 23, 20, 25, *second, 21, 24, 26]]
    assert row.reads.tolist() == [12, 13, 14, 26, 27, 28]


def test_no_pass_has_more_tokens_than_it_may_unless_one_sequence_has() -> None:
    sequences = [[*SYSTEM, *range(20, 20 + length)] for length in (1, 2, 3, 4, 30, 2, 1)]
    passes = packed_passes(sequences, ["a"] * 7, 12)
    assert passes is not None
    sizes = [sum(group.tokens for group in groups) for groups in passes]
    assert sizes == [38, 12, 11, 12, 10]
    assert sorted(row for groups in passes for one in groups for row in one.rows) == [*range(7)]


def test_sequences_with_little_in_common_are_padded() -> None:
    assert packed_passes([[1, 2, 3], [4, 5, 6], [7, 8, 9]], None, 100) is None
    assert packed_passes([[5]], None, 100) is None
    assert packed_passes([[5]] * 20, ["a"] * 20, 100) is None
    assert packed_passes([], None, 100) == []
    # 3 + 9 of 18 tokens are padding
    ragged = [[1] * 9, [2] * 3]
    assert packed_passes(ragged, None, 100) == [[SharedPrefix(8, [0], 9), SharedPrefix(2, [1], 3)]]
