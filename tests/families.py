"""Tiny chat models whose tokenizers and templates end turns as four well-known families do."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.conftest import CORPUS

CONSTANT = 6.0  # in one dimension of every embedding: what the head says to it is a bias
HIDDEN = 32
THINK_TAGS = ("<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """How a family ends a turn.

    Args:
        special: its special tokens.
        eos: `tokenizer.eos_token`.
        closing: what its template closes a turn with.
        ends: of its generation_config.json.
        template: the chat template.
    """

    special: tuple[str, ...]
    eos: str
    closing: str
    ends: tuple[str, ...]
    template: str

    @property
    def all_ends(self) -> set[str]:
        return {self.eos, self.closing, *self.ends}


def _turns(begin: str, end: str, ask: str, otherwise: str = "") -> str:
    return (
        "{% for m in messages %}{% set role = m['role'] %}"
        + begin
        + "{{ m['content'] }}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}"
        + ask
        + "{% else %}"
        + otherwise
        + "{% endif %}"
    )


NO_THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
FAMILIES = {
    "gemma": Family(
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<end_of_turn>",
        ("<eos>", "<end_of_turn>"),
        "<bos>"
        + _turns(
            "<start_of_turn>{{ 'model' if role == 'assistant' else role }}\n",
            "<end_of_turn>\n",
            "<start_of_turn>model\n",
        ),
    ),
    "phi": Family(
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|placeholder1|>"),
        "<|endoftext|>",
        "<|end|>",
        ("<|endoftext|>", "<|assistant|>", "<|end|>"),
        _turns("<|{{ role }}|>\n", "<|end|>\n", "<|assistant|>\n", "<|endoftext|>"),
    ),
    "llama3": Family(
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
            *("<|start_header_id|>", "<|end_header_id|>", "<|finetune_right_pad_id|>"),
        ),
        "<|end_of_text|>",
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        "<|begin_of_text|>"
        + _turns(
            "<|start_header_id|>{{ role }}<|end_header_id|>\n\n",
            "<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ),
    # as the base models are: nothing but the template knows the token that closes a turn
    "qwen": Family(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|endoftext|>",
        "<|im_end|>",
        ("<|endoftext|>",),
        _turns(
            "<|im_start|>{{ role }}\n"
            "{% if role == 'assistant' and loop.last %}" + NO_THINKING + "{% endif %}",
            "<|im_end|>\n",
            "<|im_start|>assistant\n" + NO_THINKING,
        ),
    ),
}


def build_family_tokenizer(family: Family, words: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the family's special tokens; `words` are ordinary added ones."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(family.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(list(words))
    unknown = {"unk_token": "<|placeholder1|>"} if "<|placeholder1|>" in family.special else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.eos, **unknown)
    if "<pad>" in family.special:
        tokenizer.pad_token = "<pad>"
    if family.eos == family.special[0] and "<|im_start|>" in family.special:
        tokenizer.pad_token = "<|im_start|>"
    tokenizer.chat_template = family.template
    return tokenizer


def build_family_model(folder: Path, family: Family, odds: float = 0.12) -> Path:
    """Save a tiny model that says each of the family's end tokens with about this probability."""
    tokenizer = build_family_tokenizer(family, THINK_TAGS)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    ends = tokenizer.convert_tokens_to_ids(sorted(family.all_ends))
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight.normal_()
        embeddings[:, 0] = CONSTANT
        normed = CONSTANT / ((CONSTANT**2 + HIDDEN - 1) / HIDDEN) ** 0.5
        share = odds / (1 - odds * len(ends))
        bias = torch.log(torch.tensor(share * (len(tokenizer) - len(ends))))
        model.lm_head.weight[ends, 0] = bias / normed
        silent = sorted({*family.special, *THINK_TAGS} - family.all_ends)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(silent), 0] = -4.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    named = tokenizer.convert_tokens_to_ids(list(family.ends))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    return folder
