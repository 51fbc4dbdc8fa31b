"""All end tokens of a model, and the values that its template is rendered with."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from reward.data.groups import Encoder
from rlhf.cli import main
from rlhf.config import read_settings_file
from rlhf.errors import InputError
from rlhf.modeling.chat_template import end_token_ids, set_end_tokens, template_kwargs
from rlhf.modeling.models import describe_model, load_causal_lm, new_reward_model, save_model
from rlhf.modeling.readers import described_kwargs, load_reader, tokenizer_of
from rlhf.modeling.tokens import (
    close,
    decode_response,
    encode_prompt,
    encode_response,
    load_tokenizer,
    pad_right,
    tokenizer_fingerprint,
)
from rlhf.records.schema import Message, Prompt, RankedPrompt, Ranking, Response
from tests.families import FAMILIES, build_family_model, build_family_tokenizer
from tests.reward.data.grouping import build_groups

NO_THINKING = {"enable_thinking": False}
PROMPT = Prompt.create((Message(role="user", content="How was the trip?"),), "train", "test")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family_model(tmp_path_factory.mktemp("qwen"), FAMILIES["qwen"])


@pytest.fixture
def opening() -> PreTrainedTokenizerBase:
    """A tokenizer whose template ends prompts with an open think tag."""
    tokenizer = build_family_tokenizer(FAMILIES["qwen"], ("<think>", "</think>"))
    tokenizer.chat_template = FAMILIES["qwen"].template.replace(
        "assistant\n{%", "assistant\n<think>\n{%"
    )
    return tokenizer


def words(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_closing_token_is_the_first_end_token(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = build_family_tokenizer(family)
    ends = tokenizer.convert_ids_to_tokens(list(end_token_ids(tokenizer)))
    assert ends == list(dict.fromkeys((family.closing, family.eos)))
    response = Response(id="a", prompt_id="p", text="Lovely!", model="m")
    read = encode_response(tokenizer, response, "")
    assert tokenizer.decode(read) == f"Lovely!{family.closing}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages[0]['content'][0]['text'] + 1 }}",
        "no words",
        "{% for m in messages %}{{ m['content'] }} |{{ eos_token }}{% endfor %}",
    ],
)
def test_a_template_that_closes_no_turn_leaves_the_end_token(template: str) -> None:
    tokenizer = build_family_tokenizer(FAMILIES["qwen"])
    tokenizer.chat_template = template
    [end] = end_token_ids(tokenizer)
    assert tokenizer.convert_ids_to_tokens(end) == "<|endoftext|>"


def test_end_tokens_of_a_folder_without_generation_config(qwen: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    tokenizer.save_pretrained(tmp_path)
    for ends in (7, [7, 9]):
        config = {"model_type": "llama", "vocab_size": 400, "eos_token_id": ends}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        closing = tokenizer.convert_tokens_to_ids("<|im_end|>")
        expected = (closing, tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends]))
        assert end_token_ids(load_tokenizer(str(tmp_path))) == expected
    for broken in ("{", "[]"):
        (tmp_path / "generation_config.json").write_text(broken, encoding="utf-8")
        with pytest.raises(
            InputError, match=r"generation_config.json that is not a JSON object\n  "
        ):
            load_tokenizer(str(tmp_path))


def test_the_quickstarts_model_has_one_end_token_and_its_old_fingerprint(real_model: Path) -> None:
    tokenizer = load_tokenizer(str(real_model))
    assert end_token_ids(tokenizer) == (tokenizer.eos_token_id,) == (2,)
    # recorded with the version that knew one end token and no template values
    assert tokenizer_fingerprint(tokenizer) == "1c917d8e8fb0acb4"


def test_a_saved_model_keeps_the_end_tokens_it_came_with(tmp_path: Path) -> None:
    folder = build_family_model(tmp_path / "model", FAMILIES["llama3"])
    tokenizer, model = load_tokenizer(str(folder)), load_causal_lm(str(folder))
    known = set(end_token_ids(tokenizer))
    assert len(known) == 3
    set_end_tokens(tokenizer, [tokenizer.eos_token_id])  # as a store of an early version says
    save_model(model, tokenizer, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert set(written["eos_token_id"]) == known
    set_end_tokens(tokenizer, [0, 1])
    model.generation_config.eos_token_id = None
    save_model(model, tokenizer, tmp_path / "other")
    written = json.loads((tmp_path / "other" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [0, 1]


def test_rows_are_closed_by_hand() -> None:
    batch = pad_right([[5, 9], [5, 8, 7], [5], [6, 7]], 0)
    found = close(batch, (9, 8))
    assert [row[mask].tolist() for row, mask in zip(found.ids, found.mask, strict=True)] == [
        [5, 9],
        [5, 8, 7, 9],
        [5, 9],
        [6, 7, 9],
    ]
    other = close(pad_right([[5, 8], [5, 8, 8]], 0), (9, 8))
    assert other.ids.tolist() == [[5, 9, 0], [5, 8, 9]]
    assert torch.equal(other.mask, torch.tensor([[True, True, False], [True, True, True]]))


def test_text_has_no_end_token_even_if_that_is_no_special_token() -> None:
    tokenizer = build_family_tokenizer(FAMILIES["gemma"], ("<stop>",))
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    tokenizer.init_kwargs["end_token_ids"] = [stop]
    assert decode_response(tokenizer, [*words(tokenizer, " Lovely!"), stop], []) == "Lovely!"


def test_a_think_tag_that_the_prompt_opened_is_put_back(opening: PreTrainedTokenizerBase) -> None:
    prompt = encode_prompt(opening, PROMPT)
    ids = words(opening, "It rained.</think>Lovely!<|im_end|>")
    assert decode_response(opening, ids, prompt) == "<think>\nIt rained.</think>Lovely!"
    assert decode_response(opening, ids, prompt[:-2]) == "It rained.</think>Lovely!"


@pytest.mark.parametrize(
    ("text", "reads_thinking", "read"),
    [
        ("<think>\nIt rained.</think>Lovely!", False, "\n</think>\n\nLovely!"),
        ("<think>\nIt rain", False, "\n</think>\n\n"),
        ("Lovely!", False, "\n</think>\n\nLovely!"),
        ("<think>\nIt rained.</think>Lovely!", True, "It rained.</think>Lovely!"),
        ("It rained.</think>Lovely!", True, "It rained.</think>Lovely!"),
        ("Lovely!", True, "\n</think>\n\nLovely!"),
    ],
)
def test_a_tag_that_the_prompt_opened_is_closed_once_and_opened_once(
    opening: PreTrainedTokenizerBase, text: str, reads_thinking: bool, read: str
) -> None:
    response = Response(id="a", prompt_id=PROMPT.id, text=text, model="m")
    encoder = Encoder.create(opening, 100, truncate=False, reads_thinking=reads_thinking)
    other = Response(id="b", prompt_id=PROMPT.id, text="No", model="m")
    order = Ranking(
        id="r", prompt_id=PROMPT.id, annotator="me", kind="human", tiers=(("a",), ("b",))
    )
    record = RankedPrompt(prompt=PROMPT, responses=(response, other), rankings=(order,))
    [group] = build_groups([record], encoder)[0]
    assert opening.decode(list(group.prompt)).endswith("assistant\n<think>\n")
    assert opening.decode(list(group.responses[0])) == f"{read}<|im_end|>"


def test_think_tags_stay_in_the_text_where_they_are_special() -> None:
    tokenizer = build_family_tokenizer(FAMILIES["qwen"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    ids = words(tokenizer, "<think>It rained.</think><|im_start|>Lovely!<|im_end|>")
    assert decode_response(tokenizer, ids, []) == "<think>It rained.</think>Lovely!"


def test_records_of_another_form_are_ignored(qwen: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(qwen))
    ends = end_token_ids(tokenizer)
    tokenizer.init_kwargs |= {"end_token_ids": "7", "chat_template_kwargs": [1]}
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert (end_token_ids(again), template_kwargs(again)) == (ends, {})


def test_template_values_are_part_of_the_fingerprint_and_travel(qwen: Path, tmp_path: Path) -> None:
    plain, without = load_tokenizer(str(qwen)), load_tokenizer(str(qwen), NO_THINKING)
    assert plain.decode(encode_prompt(plain, PROMPT)).endswith("<|im_start|>assistant\n")
    assert without.decode(encode_prompt(without, PROMPT)).endswith("<think>\n\n</think>\n\n")
    assert tokenizer_fingerprint(plain) != tokenizer_fingerprint(without)
    assert tokenizer_fingerprint(plain) == describe_model(str(qwen))["tokenizer"]

    description = describe_model(str(qwen), NO_THINKING)
    assert description["tokenizer"] == tokenizer_fingerprint(without)
    assert (
        described_kwargs(description) == NO_THINKING == template_kwargs(tokenizer_of(description))
    )
    assert "chat_template_kwargs" not in describe_model(str(qwen))

    save_model(load_causal_lm(str(qwen)), without, tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(without)
    assert (
        describe_model(str(tmp_path / "saved"), NO_THINKING)["tokenizer"]
        == (description["tokenizer"])
    )
    with pytest.raises(InputError) as caught:
        load_tokenizer(str(tmp_path / "saved"), {"enable_thinking": True})
    assert str(caught.value) == (
        f"{tmp_path / 'saved'} was made with --chat-template-kwargs {{'enable_thinking': False}}, "
        "not {'enable_thinking': True}\n"
        "  Leave --chat-template-kwargs out: the folder knows its own."
    )


def test_a_reward_model_reads_the_answer_unless_it_was_trained_to_read_all(
    qwen: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(qwen))
    fingerprint = tokenizer_fingerprint(tokenizer)
    text = "<think>It rained.</think>\n\nLovely!"
    ids = words(tokenizer, text + "<|endoftext|>")
    response = Response(
        id="a",
        prompt_id="p",
        text=text,
        model="m",
        token_ids=tuple(ids),
        tokenizer_fingerprint=fingerprint,
    )
    reward = new_reward_model(str(qwen), int(tokenizer.pad_token_id), seed=0)
    read = {}
    for name, bias, reads in (
        ("foreign", None, None),
        ("early", 0.5, None),
        ("ours", 0.5, False),
        ("all", 0.5, True),
    ):
        for key, value in (("reward_bias", bias), ("reads_thinking", reads)):
            if value is not None:
                setattr(reward.config, key, value)
        save_model(reward, tokenizer, tmp_path / name)
        reader = load_reader(describe_model(str(tmp_path / name)))
        read[name] = tokenizer.decode(reader.encode(response, fingerprint, []))
    assert read == {
        "foreign": "Lovely!<|im_end|>",
        "early": f"{text}<|endoftext|>",  # as the version read that trained it
        "ours": "Lovely!<|im_end|>",
        "all": f"{text}<|im_end|>",
    }


def test_the_flag_reads_json_and_settings_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--chat-template-kwargs"
    start = ["generate", "--db", "d", "--model", "m", "--dry-run", "--json"]
    assert main([*start, flag, '{"enable_thinking": false, "n": [1]}']) == 0
    found = json.loads(capsys.readouterr().out)["settings"]["chat_template_kwargs"]
    assert found == {"enable_thinking": False, "n": [1]}
    file = tmp_path / "settings.yaml"
    file.write_text("chat_template_kwargs: {enable_thinking: false, mode: {a: 1}}")
    assert main([*start, "--config", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]["chat_template_kwargs"]
    assert found == {"enable_thinking": False, "mode": {"a": 1}}
    assert main([*start, f"{flag}.enable_thinking", "false"]) == 0
    assert '"enable_thinking": false' in capsys.readouterr().out
    for wrong, problem in (
        ("abc", f"{flag} is 'abc', not a JSON object"),
        ("[1]", f"{flag} is '[1]', not a JSON object"),
        ('{"tokenize": true}', f"{flag} names tokenize, which is not for the template"),
    ):
        assert main([*start, flag, wrong]) == 2
        assert problem in capsys.readouterr().err


def test_values_go_through_a_settings_file_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also as config.yaml of a run, which `--config RUN/config.yaml --resume` compares."""
    values = {
        **{"a": "no", "b": "1", "c": ["a"], "d": "", "e": "2024-07-26", "f": None, "g": False},
        **{"h": {"i": [], "j": {}}, "k": "{}", "l": 1.5, "m": [[1], "x"], "n": "é"},
    }
    arguments = ["--db", "d", "--model", "m", "--dry-run"]
    assert main(["generate", *arguments, "--chat-template-kwargs", json.dumps(values)]) == 0
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_settings_file(file)["chat_template_kwargs"] == values
    assert main(["generate", "--config", str(file), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]["chat_template_kwargs"]
    assert found == values
