"""What a judge's words mean; the asking itself is tested through `rlhf annotate` and `evaluate`."""

from rlhf import judge


def test_verdicts():
    assert judge.read_verdict("[[B]] at first, but [[ a ]]") == "first"
    assert judge.read_verdict("[[TIE]]") == judge.read_verdict("[[C]]") == "tie"
    assert judge.read_verdict("A is better") == "unclear"
    assert judge.combine("first", "second") == "first"
    assert judge.combine("second", "first") == "second"
    assert judge.combine("first", "first") == "tie"  # A both times: drawn to the place
    assert judge.combine("tie", "second") == "tie"
    assert judge.combine("unclear", "first") is None
