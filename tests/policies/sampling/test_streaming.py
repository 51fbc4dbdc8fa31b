"""A local model in live mode: real sampling, streamed as it comes, stopped where asked."""

import pytest
from accelerate.state import AcceleratorState

from policies.sampling.streaming import LocalModel
from rlhf.errors import InputError
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.models import describe_model
from rlhf.modeling.tokens import encode_prompt
from rlhf.records.schema import Message, Prompt, Sampling
from rlhf.records.wording import EMPTY_TEXT
from tests.families import FAMILIES, build_family_model

PROMPT = Prompt.create((Message(role="user", content="How was the trip?"),), "train", "live")


@pytest.fixture(scope="module")
def voice(tiny_model):
    AcceleratorState._reset_state(True)  # other tests choose another precision
    yield LocalModel(str(tiny_model), Sampling(max_new_tokens=24))
    AcceleratorState._reset_state(True)


def test_two_answers_are_heard_as_they_grow(voice, tiny_model):
    heard: list[list[str]] = [[], []]

    def hear(place: int, text: str) -> bool:
        heard[place].append(text)
        return True

    answers = voice.answer(PROMPT, ["a", "b"], 3, hear)
    assert [answer.id for answer in answers] == ["a", "b"]
    assert answers[0].text != answers[1].text
    for answer, texts in zip(answers, heard, strict=True):
        assert len(answer.token_ids) == len(texts) <= 24
        assert texts[-1] == answer.text.rstrip("\ufffd")
        assert all("\ufffd" not in text[-1:] for text in texts)
        assert answer.finished is (answer.token_ids[-1] == voice.tokenizer.eos_token_id)
        assert answer.model_fingerprint == describe_model(str(tiny_model))["hash"]
        assert (answer.sampling.max_new_tokens, answer.sampling.seed) == (24, 3)
    again = voice.answer(PROMPT, ["a", "b"], 3, lambda place, text: True)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]


def test_one_answer_is_cut_and_the_other_goes_on(voice):
    count = [0, 0]

    def hear(place: int, text: str) -> bool:
        count[place] += 1
        return place == 1 or count[0] < 3

    cut, whole = voice.answer(PROMPT, ["a", "b"], 3, hear)
    assert (count[0], cut.token_ids, cut.finished) == (3, None, False)
    assert len(whole.token_ids) == count[1] > 3


def test_a_conversation_too_long_is_refused_in_words(voice):
    long = Prompt.create((Message(role="user", content="trip " * 600),), "train", "live")
    with pytest.raises(InputError, match="exceeds the model's context of 512") as caught:
        voice.answer(long, ["a"], 0, lambda place, text: True)
    assert caught.value.remedy == "Shorten it, or begin a new conversation."


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_ends_at_each_end_token_and_is_closed_once_in_memory(name, tmp_path):
    AcceleratorState._reset_state(True)
    family = FAMILIES[name]
    folder = build_family_model(tmp_path, family)
    voice = LocalModel(str(folder), Sampling(max_new_tokens=24))
    heard = ["", "", "", ""]

    def hear(place: int, text: str) -> bool:
        heard[place] = text
        return True

    answers = voice.answer(PROMPT, list("abcd"), 0, hear)
    ends = end_token_ids(voice.tokenizer)
    assert any(answer.finished for answer in answers)
    for answer, last in zip(answers, heard, strict=True):
        assert answer.finished is (answer.token_ids[-1] in ends)
        assert not set(answer.token_ids[:-1]) & set(ends)
        assert answer.text in (last, EMPTY_TEXT, f"{last}\ufffd")
        said = (*PROMPT.messages, Message(role="assistant", content=answer.text))
        later = Prompt.create((*said, *PROMPT.messages), "train", "live")
        remembered = voice.tokenizer.decode(encode_prompt(voice.tokenizer, later))
        assert f"{answer.text}{family.closing}" in remembered
        assert remembered.count(family.closing) == 3
    AcceleratorState._reset_state(True)
