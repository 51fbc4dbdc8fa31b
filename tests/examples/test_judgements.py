"""What examples/benchmarks/reward.py counts before it measures."""

import gzip
import json
from argparse import Namespace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from reward.data.groups import Group, Pair

FILE = Path(__file__).parents[2] / "examples" / "benchmarks" / "judgements.py"
PAIRS = (Pair(0, 1, 1.0, 0, "b"), Pair(0, 2, 1.0, 0, "b"))
GROUP = Group("a", (1,) * 10, ((2,) * 3, (3,) * 5, (4,) * 7), PAIRS)


@pytest.fixture(scope="module")
def judgements():
    spec = spec_from_file_location("judgements", FILE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("trl", 2 * (10 + 10 + 3 + 5 + 10 + 10 + 3 + 7)),  # each pair brings two sequences
        ("pairs", 2 * (10 + 10 + 3 + 5 + 10 + 10 + 3 + 7)),
        ("groups", 2 * (3 * 10 + 3 + 5 + 7)),  # each response once
        ("packed", 2 * (10 + 3 + 5 + 7)),  # the prompt once too
    ],
)
def test_tokens_of_an_epoch(judgements, kind, tokens):
    assert judgements.epoch_tokens([GROUP, GROUP], kind) == tokens


@pytest.mark.parametrize(("tokens", "pairs"), [(10, 1), (58, 2), (2048, 71)])
def test_trl_gets_pairs_for_about_as_many_tokens(judgements, tokens, pairs):
    assert judgements.pairs_per_pass([GROUP], tokens) == pairs  # a pair has 29 on average


def test_ties_are_left_out_and_tiers_become_pairs(judgements, tiny_model, tmp_path):
    lines = [
        {"prompt": "Hi?", "responses": ["a", "b"], "pairs": [[0, 1, "second"]]},
        {"prompt": "Ho?", "responses": ["a", "b"], "pairs": [[0, 1, "tie"]]},
        {"prompt": "Ha?", "responses": ["a", "b", "c"], "tiers": [[2], [0, 1]]},
    ]
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    read = judgements.read_judgements(str(path), 10)
    assert [line["pairs"] for line in read] == [[[1, 0]], [[2, 0], [2, 1]]]
    arguments = Namespace(model=str(tiny_model), prompt_tokens=10, response_tokens=10)
    whole = judgements.build_groups(read, arguments, apart=False)
    apart = judgements.build_groups(read, arguments, apart=True)
    assert [(len(group.responses), len(group.pairs)) for group in whole] == [(2, 1), (3, 2)]
    assert [group.responses for group in apart] == [
        whole[0].responses[::-1],
        (whole[1].responses[2], whole[1].responses[0]),
        (whole[1].responses[2], whole[1].responses[1]),
    ]
    arguments.prompt_tokens = 1
    cut = judgements.build_groups(read, arguments, apart=False)
    assert len(cut[0].prompt) < len(whole[0].prompt)
    assert cut[0].responses == whole[0].responses
