import pytest

from rlhf.records.wording import OWN_JUDGE, judge_in_words

SENTIMENT = "examples.quickstart.sentiment:score"
OWN = f", {OWN_JUDGE}"


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ("reward model", "The reward model"),
        (f"reward model{OWN}", "Its own reward model"),
        (f"reward model runs/a/reward{OWN}", "Its own reward model"),
        (f"signal {SENTIMENT}", "The function sentiment:score"),
        ("signal", "The function"),  # of a report without its name
        (f"signal {SENTIMENT}{OWN}", f"The function sentiment:score{OWN},"),
        (f"reward function signal:{SENTIMENT}{OWN}", f"The function sentiment:score{OWN},"),
        ("gold reward model runs/gold", "The gold reward model runs/gold"),
        (f"gold reward model runs/gold{OWN}", f"The gold reward model runs/gold{OWN},"),
        ("AI judge http://signal.example/v1", "The AI judge http://signal.example/v1"),
    ],
)
def test_a_judge_begins_a_sentence(judge, words):
    assert judge_in_words(judge) == words
