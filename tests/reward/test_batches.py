import torch

from reward.batches import (
    deal,
    epoch_order,
    num_tokens,
    plan_step,
    split_by_tokens,
    to_pair_tensors,
    to_rows,
)
from reward.groups import Group, Pair


def group(name, prompt, *responses, pairs=()):
    return Group(name, tuple(prompt), tuple(tuple(r) for r in responses), tuple(pairs))


def sized(name, prompt, response, k=2):
    return group(name, [1] * prompt, *([2] * response for _ in range(k)))


def test_rows_repeat_the_prompt_and_are_read_at_each_last_token():
    rows = to_rows([group("a", [1, 2], [3], [4, 5, 0]), group("b", [6], [7])], pad_id=0)
    assert rows.ids.tolist() == [[1, 2, 3, 0, 0], [1, 2, 4, 5, 0], [6, 7, 0, 0, 0]]
    assert rows.reads.tolist() == [2, 9, 11]  # the second response ends with the pad token itself


def test_no_groups_make_one_padding_token_and_no_reads():
    rows = to_rows([], pad_id=9)
    assert rows.ids.tolist() == [[9]]
    assert rows.reads.numel() == 0


def test_pairs_number_responses_over_all_groups():
    first = group("a", [1], [2], [3], pairs=[Pair(1, 0, 1.0, 2, "x", weight=0.5)])
    second = group("b", [1], [2], [3], pairs=[Pair(0, 1, 0.5, 0, "x")])
    pairs = to_pair_tensors([first, second], torch.device("cpu"))
    assert pairs.first.tolist() == [1, 2]
    assert pairs.second.tolist() == [0, 3]
    assert pairs.outcome.tolist() == [1.0, 0.5]
    assert pairs.strength.tolist() == [2, 0]
    assert pairs.weight.tolist() == [0.5, 1.0]
    assert pairs.prompt.tolist() == [0, 1]


def test_passes_stay_within_the_budget_and_group_similar_lengths():
    groups = [sized(str(n), n, 1) for n in (1, 9, 2, 8, 30)]
    parts = split_by_tokens(groups, 40)
    assert [[g.prompt_id for g in part] for part in parts] == [["30"], ["9", "8"], ["2", "1"]]


def test_dealing_balances_work_and_loses_nothing():
    groups = [sized(str(n), 10 * n, 5) for n in range(1, 9)]
    shares = deal(groups, 2)
    loads = [sum(map(num_tokens, share)) for share in shares]
    assert sorted(g.prompt_id for share in shares for g in share) == list("12345678")
    assert max(loads) / min(loads) < 1.1


def test_the_plan_names_the_busiest_process():
    plans, busiest = plan_step([sized("a", 10, 5), sized("b", 10, 5), sized("c", 1, 1)], 2, 30)
    assert [len(plan) for plan in plans] == [2, 1]
    assert busiest == 2


def test_a_process_without_work_has_an_empty_plan():
    plans, busiest = plan_step([sized("a", 10, 5)], 2, 30)
    assert [len(plan) for plan in plans] == [1, 0]
    assert busiest == 1


def test_order_depends_on_seed_and_epoch_alone():
    assert epoch_order(10, 0, 0) == epoch_order(10, 0, 0)
    assert epoch_order(10, 0, 0) != epoch_order(10, 0, 1)
    assert epoch_order(10, 0, 0) != epoch_order(10, 1, 0)
    assert sorted(epoch_order(10, 3, 2)) == list(range(10))
