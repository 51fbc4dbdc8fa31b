import pytest

from reward.data.batches import (
    balance,
    epoch_order,
    lay_out,
    num_tokens,
    plan_step,
    split_packed,
    split_padded,
)
from reward.data.groups import Group
from rlhf.modeling.attention.layout import Segment


def group(name, prompt, *responses):
    return Group(name, tuple(prompt), tuple(tuple(r) for r in responses))


def sized(name, prompt, response, k=2):
    first = int.from_bytes(name.encode(), "big")  # so that prompts share no beginning
    return group(name, [first] + [1] * (prompt - 1), *([2] * response for _ in range(k)))


def test_padded_rows_repeat_the_prompt_and_are_read_at_each_last_token():
    groups = [group("a", [1, 2], [3], [4, 5, 0]), group("b", [6], [7])]
    rows = lay_out(groups, 0, shared=False)
    assert rows.ids.tolist() == [[1, 2, 3, 0, 0], [1, 2, 4, 5, 0], [6, 7, 0, 0, 0]]
    assert rows.reads.tolist() == [2, 9, 11]  # the second response ends with the pad token itself
    assert rows.layout is None


def test_a_packed_row_has_each_prompt_once_and_no_padding():
    groups = [group("a", [1, 2], [3], [4, 5, 0]), group("b", [6], [], [7])]
    row = lay_out(groups, 0, shared=True)
    assert row.ids.tolist() == [[1, 2, 3, 4, 5, 0, 6, 7]]
    assert row.positions.tolist() == [[0, 1, 2, 2, 3, 4, 0, 1]]
    assert row.reads.tolist() == [2, 5, 6, 7]  # an empty response is read at its prompt's end
    assert row.layout == (Segment(2, (1, 3)), Segment(1, (0, 1)))


def test_a_beginning_of_all_prompts_is_packed_once_where_that_is_shorter():
    system = list(range(1, 11))
    groups = [group("a", [*system, 20], [5], [6, 7]), group("b", [*system, 21], [9], [])]
    row = lay_out(groups, 0, shared=True)
    assert row.ids.tolist() == [[*system, 20, 5, 20, 6, 7, 21, 9, 21]]  # 26 tokens by prompt
    assert row.positions.tolist() == [[*range(10), 10, 11, 10, 11, 12, 10, 11, 10]]
    assert row.reads.tolist() == [11, 14, 16, 17]
    assert row.layout == (Segment(10, (2, 3, 2, 1)),)
    assert split_packed(groups, 18) == [groups]
    assert split_packed(groups, 17) == [groups[:1], groups[1:]]


def test_a_beginning_that_saves_little_or_pads_much_is_not_shared():
    own = [group("a", [1, 2, 3], [4] * 9), group("b", [1, 5, 6], [7] * 9)]  # 23 of 24 tokens
    ragged = [group("a", [1] * 9 + [2], [4] * 40)]
    ragged += [group(str(n), [1] * 9 + [n], [4]) for n in range(3, 12)]  # 68 of 149 tokens
    for groups in (own, ragged):
        layout = lay_out(groups, 0, shared=True).layout
        assert [one.prompt for one in layout] == [len(one.prompt) for one in groups]


@pytest.mark.parametrize("shared", [True, False])
def test_no_groups_make_one_padding_token_and_no_reads(shared):
    inputs = lay_out([], 9, shared=shared)
    assert inputs.ids.tolist() == [[9]]
    assert inputs.reads.numel() == 0


def test_padded_batches_stay_within_the_budget_and_group_similar_lengths():
    groups = [sized(str(n), n, 1) for n in (1, 9, 2, 8, 30)]
    parts = split_padded(groups, 40)
    assert [[g.prompt_id for g in part] for part in parts] == [["30"], ["9", "8"], ["2", "1"]]


def test_packed_rows_stay_within_the_budget_and_are_even():
    groups = [sized(str(n), 10, 5) for n in range(6)]  # 20 tokens each, prompt counted once
    assert [len(part) for part in split_packed(groups, 50)] == [2, 2, 2]
    assert [len(part) for part in split_packed(groups, 80)] == [3, 3]
    assert [len(part) for part in split_packed(groups, 19)] == [1] * 6  # too long, goes alone


def test_packed_rows_of_unequal_groups_never_exceed_the_budget():
    groups = [sized(str(n), n % 13 + 1, n % 7) for n in range(40)]
    for budget in (25, 60, 300):
        parts = split_packed(groups, budget)
        assert sorted(int(g.prompt_id) for part in parts for g in part) == list(range(40))
        for part in parts:
            assert len(part) == 1 or sum(num_tokens(g, shared=True) for g in part) <= budget


@pytest.mark.parametrize("shared", [True, False])
def test_dealing_balances_work_and_loses_nothing(shared):
    groups = [sized(str(n), 10 * n, 5) for n in range(1, 9)]
    shares = balance(groups, 2, shared=shared)
    loads = [sum(num_tokens(g, shared=shared) for g in share) for share in shares]
    assert sorted(g.prompt_id for share in shares for g in share) == list("12345678")
    assert max(loads) / min(loads) < 1.1


def test_a_group_costs_its_prompt_once_when_shared():
    one = sized("a", 10, 5, k=4)
    assert num_tokens(one, shared=True) == 10 + 4 * 5
    assert num_tokens(one, shared=False) == 4 * (10 + 5)


def test_all_processes_make_as_many_passes():
    groups = [sized("a", 10, 5), sized("b", 10, 5), sized("c", 1, 1)]
    plans = plan_step(groups, 2, 30, shared=False)
    names = [[[g.prompt_id for g in part] for part in plan] for plan in plans]
    assert names == [[["a"], ["c"]], [["b"], []]]
    plans = plan_step(groups[:1], 2, 30, shared=True)
    assert [[len(part) for part in plan] for plan in plans] == [[1], [0]]


def test_order_depends_on_seed_and_epoch_alone():
    assert epoch_order(10, 0, 0) == epoch_order(10, 0, 0)
    assert epoch_order(10, 0, 0) != epoch_order(10, 0, 1)
    assert epoch_order(10, 0, 0) != epoch_order(10, 1, 0)
    assert sorted(epoch_order(10, 3, 2)) == list(range(10))
