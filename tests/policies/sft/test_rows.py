"""Rows for trl's trainers: every answer has an end that the model learns, once."""

from pathlib import Path

import pytest

from policies.trl_training.rows import trl_rows
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.tokens import load_tokenizer

WITHOUT_END = "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
ROW = {
    "prompt": [{"role": "user", "content": "Hi?"}],
    "completion": [{"role": "assistant", "content": "Hello!"}],
}


@pytest.mark.parametrize("template", [None, WITHOUT_END])
def test_an_answer_is_followed_by_one_end_token(tiny_model: Path, template: str | None) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = template or tokenizer.chat_template
    [row] = trl_rows([ROW], tokenizer, ["completion"])
    assert row["prompt"] == ROW["prompt"]
    text = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
    ids = tokenizer(text.partition("Hello!")[2], add_special_tokens=False)["input_ids"]
    assert ids[0] == end_token_ids(tokenizer)[0]
    assert ids.count(ids[0]) == 1
