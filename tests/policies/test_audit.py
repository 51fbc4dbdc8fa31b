import pytest

from policies.audit import estimate


def test_the_error_is_that_of_the_prompts() -> None:
    # prompt means 2 and 4: mean 3, standard deviation √2, error √2/√2 = 1
    result = estimate([1.0, 3.0, 4.0, 4.0], [2, 2, 4, 4], ["a", "a", "b", "b"])
    assert result == {
        "nats": pytest.approx(3.0),
        "standard_error": pytest.approx(1.0),
        "per_token": pytest.approx(1.0),
        "sequences": 4,
    }


def test_one_prompt_has_no_error() -> None:
    assert estimate([1.0, 2.0], [3, 3], ["a", "a"])["standard_error"] is None
