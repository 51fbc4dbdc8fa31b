"""From text to token ids and padded batches: the only tokenising and padding in the project.

Letters: B sequences, T tokens. Every mask is True at a real token.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from rlhf.diagnose import as_input_error
from rlhf.errors import InputError
from rlhf.fingerprints import text_hash
from rlhf.records import Prompt, Response

PAD_TOKEN_NAMES = (
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<|padding|>",
    "<|endoftext|>",
    "<|finetune_right_pad_id|>",
)


@dataclass(frozen=True)
class TokenBatch:
    """Token ids (B, T) and their mask (B, T), True at a real token."""

    ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]

    def to(self, device: torch.device) -> "TokenBatch":
        """The same batch on another device."""
        return TokenBatch(self.ids.to(device), self.mask.to(device))


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name; its padding token never ends sequences.

    Raises:
        InputError: no tokenizer there, no end-of-sequence token, or no token left to pad with.
    """
    remedy = "Give a folder that holds a whole tokenizer.json beside the weights."
    with as_input_error(f"Cannot load a tokenizer from {name}", remedy):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False
        )
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"The tokenizer of {name} has no end-of-sequence token",
            "Set `eos_token` in its tokenizer_config.json: the end of a response is trained on.",
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        # not `tokenizer.pad_token = …`: that gives a new token no id
        tokenizer.add_special_tokens({"pad_token": _choose_pad_token(tokenizer, name)})
    return tokenizer


def _choose_pad_token(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    vocabulary = tokenizer.get_vocab()
    for token in (*PAD_TOKEN_NAMES, tokenizer.unk_token, tokenizer.bos_token):
        if token is not None and token in vocabulary and token != tokenizer.eos_token:
            return str(token)
    rows = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config().vocab_size
    if len(tokenizer) < rows:  # the embedding has rows that no token uses
        return PAD_TOKEN_NAMES[0]
    raise InputError(
        f"The tokenizer of {name} has no token to pad with: its only special token ends sequences",
        "Add one with tokenizer.add_special_tokens({'pad_token': '<|pad|>'}), resize the model's "
        "embeddings with model.resize_token_embeddings, and save both.",
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what decides how text becomes token ids: vocabulary, merges, chat template."""
    parts: dict[str, Any] = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "template": tokenizer.chat_template,
        "eos": tokenizer.eos_token_id,
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        parts |= {key: state.get(key) for key in ("normalizer", "pre_tokenizer")}
        parts["merges"] = state["model"].get("merges")
    return text_hash(json.dumps(parts, ensure_ascii=False))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt through the chat template, ready for the assistant's answer.

    Raises:
        InputError: the tokenizer has no chat template, or its template refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise InputError(
            f"The tokenizer of {tokenizer.name_or_path} has no chat template",
            "Use an instruction-tuned model, or put chat_template.jinja beside its tokenizer.json.",
        )
    template = f"The chat template of {tokenizer.name_or_path}"
    remedy = "Change the prompt's roles, some templates know no system turn; or fix the template."
    with as_input_error(f"{template} refuses prompt {prompt.id}", remedy):  # it is a program
        encoded: Any = tokenizer.apply_chat_template(
            prompt.chat, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    ids: list[int] = list(encoded["input_ids"])
    if not ids:
        raise InputError(f"{template} makes no tokens of prompt {prompt.id}", "Fix the template.")
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise InputError(
            f"{template} begins with two {tokenizer.bos_token!r}",
            "Write the token once in the template.",
        )
    return ids


def encode_response(
    tokenizer: PreTrainedTokenizerBase, response: Response, fingerprint: str
) -> list[int]:
    """Token ids of a response as a reward model reads it: closed by the end token, always.

    The sampled ones where this tokenizer made them, else the text's. One that was cut at the
    length limit gets the end token too: a score read in mid-sentence says little.

    Args:
        tokenizer: the tokenizer of the model that will read the response.
        response: the response.
        fingerprint: `tokenizer_fingerprint(tokenizer)`, computed once by the caller.
    """
    if response.token_ids is not None and response.tokenizer_fingerprint == fingerprint:
        sampled = list(response.token_ids)
        is_closed = sampled[-1:] == [tokenizer.eos_token_id]
        return sampled if is_closed else [*sampled, int(tokenizer.eos_token_id)]
    ids: list[int] = tokenizer(response.text, add_special_tokens=False)["input_ids"]
    return [*ids, int(tokenizer.eos_token_id)]


def pad_left(sequences: Sequence[Sequence[int]], pad_id: int) -> TokenBatch:
    """Stack sequences so that their last tokens align: the form sampling wants."""
    return _pad(sequences, pad_id, left=True)


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int) -> TokenBatch:
    """Stack sequences so that their first tokens align."""
    return _pad(sequences, pad_id, left=False)


def _pad(sequences: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> TokenBatch:
    length = max((len(sequence) for sequence in sequences), default=0)
    ids = torch.full((len(sequences), length), pad_id, dtype=torch.long)
    mask = torch.zeros((len(sequences), length), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        where = slice(length - len(sequence), length) if left else slice(0, len(sequence))
        ids[row, where] = torch.tensor(sequence, dtype=torch.long)
        mask[row, where] = True
    return TokenBatch(ids, mask)


def join(prompts: TokenBatch, responses: TokenBatch) -> TokenBatch:
    """Left-padded prompts beside right-padded responses: all responses start in one column."""
    return TokenBatch(
        torch.cat([prompts.ids, responses.ids], dim=1),
        torch.cat([prompts.mask, responses.mask], dim=1),
    )


def position_ids(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Positions that count real tokens only, so that padding on either side changes nothing."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def close(batch: TokenBatch, eos_id: int) -> TokenBatch:
    """Right-padded rows that all end with the end token, appended where it is missing."""
    batch = to_right_padding(batch)
    width = batch.ids.shape[1]
    lengths = batch.mask.sum(dim=1)
    last = batch.ids.gather(1, lengths[:, None] - 1).squeeze(1)
    ids = torch.nn.functional.pad(batch.ids, (0, 1))
    mask = torch.nn.functional.pad(batch.mask, (0, 1))
    rows = torch.arange(len(ids), device=ids.device)[last != eos_id]
    ids[rows, lengths[rows]] = eos_id
    mask[rows, lengths[rows]] = True
    full = width + 1 if bool(mask[:, width].any()) else width
    return TokenBatch(ids[:, :full], mask[:, :full])


def to_right_padding(batch: TokenBatch) -> TokenBatch:
    """The same sequences with every real token moved to the left end of its row."""
    order = (~batch.mask).long().argsort(dim=1, stable=True)
    width = int(batch.mask.sum(dim=1).max()) if batch.mask.numel() else 0
    return TokenBatch(batch.ids.gather(1, order)[:, :width], batch.mask.gather(1, order)[:, :width])
