from typing import Any

import pytest

from rlhf.errors import InputError
from rlhf.records.schema import (
    Message,
    Prompt,
    RankedPrompt,
    Ranking,
    Response,
    Sampling,
    content_id,
    is_finite_number,
)

HELLO = (Message(role="user", content="Hello"),)
PROMPT = Prompt.create(HELLO, "train", "test")
RESPONSE = {"id": "a1", "prompt_id": PROMPT.id, "text": "Hi!", "model": "m"}
RANKING = {"id": "r1", "prompt_id": PROMPT.id, "annotator": "ann", "tiers": [["a1"], ["b2"]]}


def test_a_content_id_depends_on_content_alone() -> None:
    # python -c "import hashlib; print(hashlib.sha256(b'[\"a\", 1]').hexdigest()[:16])"
    assert content_id("a", 1) == "2657442bb4a48d62"
    assert content_id({"x": 1, "y": 2}) == content_id({"y": 2, "x": 1})
    assert content_id("a", 1) != content_id("a", 2)


def test_the_same_messages_make_the_same_prompt_wherever_they_come_from() -> None:
    other = Prompt.create(HELLO, "test", "elsewhere")
    assert other.id == PROMPT.id
    assert Prompt.create((Message(role="user", content="hello"),), "train", "").id != PROMPT.id


def test_prompt_text_and_chat() -> None:
    turns = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "And now?")]
    messages = tuple(Message(role=role, content=content) for role, content in turns)
    prompt = Prompt.create(messages, "train", "")
    assert prompt.text == "User: Hi\n\nAssistant: Hello\n\nUser: And now?"
    assert prompt.chat[0] == {"role": "system", "content": "Be kind."}
    assert PROMPT.text == "Hello"


def ranked() -> RankedPrompt:
    responses = (
        Response(
            id="a1",
            prompt_id=PROMPT.id,
            text="Hi!",
            model="m",
            model_fingerprint="f",
            tokenizer_fingerprint="t",
            sampling=Sampling(temperature=0.7, seed=3),
            sample_index=2,
            token_ids=(4, 5),
            finished=True,
        ),
        Response(id="b2", prompt_id=PROMPT.id, text="Go.", model="m"),
    )
    ranking = Ranking(
        id="r1",
        prompt_id=PROMPT.id,
        annotator="ann",
        kind="ai",
        tiers=(("a1",), ("b2",)),
        strengths=(2,),
        scores=(0.1 + 0.2, -1),
        flags=("unsafe",),
        note="short",
    )
    return RankedPrompt(prompt=PROMPT, responses=responses, rankings=(ranking,))


def test_a_ranked_prompt_survives_json() -> None:
    import json

    line = json.dumps(ranked().to_json())
    assert RankedPrompt.from_json(json.loads(line)) == ranked()


def test_an_imported_prompt_keeps_its_own_id() -> None:
    value = {"id": "mine", "messages": [{"role": "user", "content": "Hello"}]}
    assert Prompt.from_json(value) == Prompt(id="mine", messages=HELLO, split="train", source="")


@pytest.mark.parametrize(
    ("sampling", "whole"),
    [(Sampling(), True), (Sampling(top_p=0.9), False), (Sampling(top_k=50), False)],
)
def test_untruncated_sampling(sampling: Sampling, whole: bool) -> None:
    assert sampling.is_untruncated is whole


def ranked_json(**changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT.to_json(), "responses": [RESPONSE], "rankings": [], **changes}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"messages": []}, "A prompt must end with a user turn, this one ends with nothing"),
        (
            {"messages": [{"role": "assistant", "content": "Hi"}]},
            "A prompt must end with a user turn, this one ends with assistant",
        ),
        ({"messages": [{"role": "user", "content": "  "}]}, "The user turn of a prompt is empty"),
        ({"messages": [{"role": "bot", "content": "Hi"}]}, "Unknown role 'bot' in a message"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "A message needs 'content' as str, found None",
        ),
        ({"messages": ["Hi"]}, "A message must be a JSON object, found 'Hi'"),
        ({"messages": "Hi"}, "A prompt needs 'messages' as list, found 'Hi'"),
        (
            {"messages": [{"role": "user", "content": "Hi"}], "split": "dev"},
            "Unknown split 'dev'",
        ),
    ],
)
def test_bad_prompts_are_refused(value: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        Prompt.from_json(value)
    assert caught.value.problem == problem
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"tiers": [["a1"], ["a1"]]},
            "Ranking r1 has an empty tier or a response in two tiers: (('a1',), ('a1',))",
        ),
        (
            {"tiers": [["a1"], []]},
            "Ranking r1 has an empty tier or a response in two tiers: (('a1',), ())",
        ),
        (
            {"tiers": ["a1", "b2"]},
            "Each tier of a ranking must be a list of response ids, found ['a1', 'b2']",
        ),
        ({"strengths": [1, 2]}, "Ranking r1 has 2 tiers but 2 strengths"),
        ({"strengths": [4]}, "Ranking r1 has strengths [4]"),
        ({"scores": [1.0]}, "Ranking r1 has 2 responses in its tiers but 1 scores"),
        ({"scores": [1.0, float("nan")]}, "Ranking r1 has scores [1.0, nan]"),
        ({"scores": [float("inf"), 1.0]}, "Ranking r1 has scores [inf, 1.0]"),
        ({"scores": [True, False]}, "Ranking r1 has scores [True, False]"),
        ({"scores": ["5", "4"]}, "Ranking r1 has scores ['5', '4']"),
        ({"scores": 5}, "A ranking needs 'scores' as list, found 5"),
        ({"scores": [2, 2.5]}, "Ranking r1 has score 2 in a tier above score 2.5"),
        (
            {"tiers": [["a1", "c3"], ["b2"]], "scores": [4, 3, 3.5]},
            "Ranking r1 has score 3 in a tier above score 3.5",
        ),
        ({"kind": "robot"}, "Ranking r1 has annotator kind 'robot'"),
        ({"annotator": None}, "A ranking needs 'annotator' as str, found None"),
    ],
)
def test_bad_rankings_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        Ranking.from_json({**RANKING, **changes})
    assert caught.value.problem == problem
    assert caught.value.remedy


def test_scores_may_differ_within_a_tier_and_equal_those_of_the_next() -> None:
    tiers = [["a1", "b2", "c3"], ["d4"]]
    ranking = Ranking.from_json({**RANKING, "tiers": tiers, "scores": [0.7, 0.9, 0.8, 0.7]})
    assert ranking.scores == (0.7, 0.9, 0.8, 0.7)
    assert Ranking.from_json(RANKING).scores == ()


@pytest.mark.parametrize(
    ("value", "usable"),
    [(3, True), (-0.5, True), (10**400, False), (float("-inf"), False), (None, False)],
)
def test_finite_numbers(value: Any, usable: bool) -> None:
    assert is_finite_number(value) is usable


def test_a_ranking_of_a_response_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        RankedPrompt.from_json(ranked_json(rankings=[RANKING]))
    assert caught.value.problem == "Ranking r1 names responses that are not there: ['b2']"


def test_unknown_sampling_settings_are_named() -> None:
    response = {**RESPONSE, "sampling": {"temperature": 1.0, "beams": 4}}
    with pytest.raises(InputError, match="Unknown sampling settings: beams\n  Use temperature, "):
        RankedPrompt.from_json(ranked_json(responses=[response]))
