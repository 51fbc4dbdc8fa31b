import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.errors import InputError
from rlhf.modeling.tokens import (
    encode_prompt,
    encode_response,
    join,
    load_tokenizer,
    pad_left,
    pad_right,
    position_ids,
    to_right_padding,
    tokenizer_fingerprint,
)
from rlhf.records.schema import Message, Prompt, Response

SEQUENCES = [[5, 6, 7], [8], [9, 3]]
PROMPT = Prompt.create((Message(role="user", content="How was the trip?"),), "train", "test")
T, F = True, False


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_model))


def save_words(folder: Path, words: list[str], rows: int, **special: str) -> str:
    """Save a tokenizer of whole words beside a config whose embedding has `rows` rows."""
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    config = f'{{"model_type": "llama", "vocab_size": {rows}}}'
    (folder / "config.json").write_text(config, encoding="utf-8")
    return str(folder)


def test_padding_by_hand() -> None:
    left, right = pad_left(SEQUENCES, 0), pad_right(SEQUENCES, 0)
    assert left.ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 9, 3]]
    assert left.mask.tolist() == [[T, T, T], [F, F, T], [F, T, T]]
    assert right.ids.tolist() == [[5, 6, 7], [8, 0, 0], [9, 3, 0]]
    assert right.mask.tolist() == [[T, T, T], [T, F, F], [T, T, F]]
    assert pad_left([], 0).ids.shape == (0, 0)
    # a token equal to the padding is still real
    batch = pad_right([[0, 5, 0], [0]], 0)
    assert batch.mask.tolist() == [[T, T, T], [T, F, F]]
    assert to_right_padding(pad_left([[0, 5, 0], [0]], 0)).mask.tolist() == batch.mask.tolist()


def test_positions_count_real_tokens() -> None:
    assert position_ids(pad_left(SEQUENCES, 0).mask).tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 1]]
    assert position_ids(pad_right(SEQUENCES, 0).mask).tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 1]]


def test_prompts_and_responses_meet_in_one_column() -> None:
    joined = join(pad_left([[5, 6], [7]], 0), pad_right([[8], [9, 3]], 0))
    assert joined.ids.tolist() == [[5, 6, 8, 0], [0, 7, 9, 3]]
    assert joined.mask.tolist() == [[T, T, T, F], [F, T, T, T]]
    assert position_ids(joined.mask).tolist() == [[0, 1, 2, 2], [0, 0, 1, 2]]
    moved = to_right_padding(joined)
    assert moved.ids.tolist() == [[5, 6, 8], [7, 9, 3]]
    assert moved.mask.tolist() == [[T, T, T], [T, T, T]]


def test_logits_do_not_depend_on_the_form_of_the_batch(
    tiny_model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    sequences = [list(range(10, 27)), list(range(40, 45)), list(range(90, 101))]
    pad_id = int(tokenizer.pad_token_id)
    with torch.no_grad():
        singles = [model(torch.tensor([ids])).logits[0] for ids in sequences]
        for pad in (pad_left, pad_right):
            batch = pad(sequences, pad_id)
            logits = model(
                input_ids=batch.ids,
                attention_mask=batch.mask.long(),
                position_ids=position_ids(batch.mask),
            ).logits
            for row, single in enumerate(singles):
                torch.testing.assert_close(
                    logits[row, batch.mask[row]], single, rtol=1e-5, atol=1e-6
                )


def test_a_prompt_goes_through_the_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "<|im_start|>user\nHow was the trip?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(encode_prompt(tokenizer, PROMPT)) == text


def test_a_response_ends_with_the_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    fingerprint = tokenizer_fingerprint(tokenizer)
    response = Response(id="a", prompt_id="p", text="Lovely!", model="m")
    ids = encode_response(tokenizer, response, fingerprint)
    assert tokenizer.decode(ids) == "Lovely!<|im_end|>"

    sampled = (70, 71, 72)  # not what the text would give: what was sampled is what counts
    known = {"id": "a", "prompt_id": "p", "text": "Lovely!", "model": "m", "token_ids": sampled}
    same = Response(**known, tokenizer_fingerprint=fingerprint)
    other = Response(**known, tokenizer_fingerprint="other")
    end = tokenizer.eos_token_id
    assert encode_response(tokenizer, same, fingerprint) == [70, 71, 72, end]  # cut: now closed
    whole = Response(**{**known, "token_ids": (70, end)}, tokenizer_fingerprint=fingerprint)
    assert encode_response(tokenizer, whole, fingerprint) == [70, end]  # never closed twice
    assert encode_response(tokenizer, other, fingerprint) == ids


def test_two_bos_tokens_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.bos_token = "<|im_start|>"
    encode_prompt(tokenizer, PROMPT)  # one is fine
    tokenizer.chat_template = "<|im_start|>" + tokenizer.chat_template
    with pytest.raises(
        InputError, match=r"begins with two '<\|im_start\|>'\n  Write the token once"
    ):
        encode_prompt(tokenizer, PROMPT)


def test_the_fingerprint_follows_template_vocabulary_and_end_token(tiny_model: Path) -> None:
    def fresh() -> PreTrainedTokenizerBase:
        return load_tokenizer(str(tiny_model))

    template, added, ended = fresh(), fresh(), fresh()
    template.chat_template += " "
    added.add_tokens(["<extra>"])
    ended.eos_token = "<|im_start|>"
    prints = [tokenizer_fingerprint(t) for t in (fresh(), template, added, ended)]
    assert prints[0] == tokenizer_fingerprint(fresh())
    assert len(set(prints)) == 4


def test_the_fingerprint_follows_the_merges(tokenizer: PreTrainedTokenizerBase) -> None:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"][:2] = reversed(state["model"]["merges"][:2])
    reordered = Tokenizer.from_str(json.dumps(state))
    other = PreTrainedTokenizerFast(tokenizer_object=reordered, eos_token=tokenizer.eos_token)
    other.chat_template = tokenizer.chat_template
    assert other.get_vocab() == tokenizer.get_vocab()
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer)


def test_the_fingerprint_survives_saving(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(tokenizer)


@pytest.mark.parametrize(
    ("words", "special", "pad"),
    [
        (["<unk>", "</s>", "<|endoftext|>", "a"], {"pad_token": "</s>"}, "<|endoftext|>"),
        (["<unk>", "</s>", "<pad>", "<|endoftext|>"], {}, "<pad>"),
        (["<unk>", "</s>", "a"], {"unk_token": "<unk>"}, "<unk>"),
        (["<unk>", "</s>", "<s>"], {"bos_token": "<s>"}, "<s>"),
        (["<unk>", "</s>", "a"], {"pad_token": "a"}, "a"),
    ],
)
def test_padding_never_ends_a_sequence(
    tmp_path: Path, words: list[str], special: dict[str, str], pad: str
) -> None:
    name = save_words(tmp_path, words, len(words), eos_token="</s>", **special)
    tokenizer = load_tokenizer(name)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (pad, words.index(pad))
    assert len(tokenizer) == len(words)


def test_a_tokenizer_whose_end_token_looks_like_padding(tmp_path: Path) -> None:
    words = ["<unk>", "<|endoftext|>", "[PAD]"]
    tokenizer = load_tokenizer(save_words(tmp_path, words[:2], 3, eos_token="<|endoftext|>"))
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|pad|>", 2)
    tokenizer = load_tokenizer(save_words(tmp_path, words, 3, eos_token="<|endoftext|>"))
    assert tokenizer.pad_token == "[PAD]"


def test_a_row_that_no_token_uses_becomes_the_padding(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_words(tmp_path, ["<x>", "</s>"], 64, eos_token="</s>"))
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|pad|>", 2)


def test_no_token_left_to_pad_with(tmp_path: Path) -> None:
    name = save_words(tmp_path, ["<x>", "</s>"], 2, eos_token="</s>")
    with pytest.raises(InputError, match=r"has no token to pad with.*\n.*add_special_tokens"):
        load_tokenizer(name)


def test_no_end_token(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no end-of-sequence token\n  Set `eos_token`"):
        load_tokenizer(save_words(tmp_path, ["<x>"], 1))


@pytest.mark.model
def test_the_real_model_pads_with_another_token_than_its_end(real_model: Path) -> None:
    tokenizer = load_tokenizer(str(real_model))
    assert (tokenizer.pad_token_id, tokenizer.pad_token) == (0, "<|endoftext|>")
    assert tokenizer.eos_token == "<|im_end|>"
