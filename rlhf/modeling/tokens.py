"""From text to token ids and padded batches: the only tokenizing and padding in the project.

Letters: B sequences, T tokens. Every mask is True at a real token.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from rlhf.diagnose import as_input_error
from rlhf.errors import InputError
from rlhf.modeling.chat_template import (
    TEMPLATE_KWARGS,
    end_token_ids,
    end_tokens_of_model,
    find_end_tokens,
    opens_thinking,
    recorded_end_tokens,
    render_prompt,
    render_prompts,
    set_end_tokens,
    set_template_kwargs,
    template_kwargs,
)
from rlhf.modeling.heads import CLASSIFIER, reads_pairs
from rlhf.modeling.pairs import first_of_pair, is_for_pairs, second_of_pair, set_pair_tokens
from rlhf.modeling.thinking import (
    CLOSING,
    NO_THOUGHT,
    OPENING,
    after_opening_tag,
    has_thinking,
    split_thinking,
)
from rlhf.records.fingerprints import text_hash
from rlhf.records.schema import Prompt, Response

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

    @property
    def model_inputs(self) -> dict[str, Any]:
        """The arguments with which a model reads the batch."""
        return {
            "input_ids": self.ids,
            "attention_mask": self.mask.long(),
            "position_ids": position_ids(self.mask),
            "use_cache": False,
        }

    def to(self, device: torch.device) -> "TokenBatch":
        """The same batch on another device."""
        return TokenBatch(send(self.ids, device), send(self.mask, device))


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; a GPU that is busy is not waited for.

    A GPU copies from pinned memory by itself, when it comes to it.
    """
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    is_sent = tensor.device.type == "cpu"  # what is read must be there
    return tensor.to(device, non_blocking=is_sent)


def load_tokenizer(name: str, given: dict[str, Any] | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; its padding token never ends sequences.

    It knows all end tokens of the model (`end_token_ids`).

    `given` are --chat-template-kwargs; folders may record them.

    Raises:
        InputError: no tokenizer there, no end-of-sequence token, no token left to pad with, or the
            folder records other --chat-template-kwargs.
    """
    remedy = "Give a folder that holds a whole tokenizer.json beside the weights."
    with as_input_error(f"Cannot load a tokenizer from {name}", remedy):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False
        )
    set_template_kwargs(tokenizer, name, given or {})
    if _is_for_pairs(name):
        set_pair_tokens(tokenizer)
    elif tokenizer.eos_token_id is None:
        raise InputError(
            f"The tokenizer of {name} has no end-of-sequence token",
            "Set `eos_token` in its tokenizer_config.json: the end of a response is trained on."
            if tokenizer.sep_token_id is None
            else "An encoder needs a trained head: give a classifier with one label.",
        )
    if not recorded_end_tokens(tokenizer):
        set_end_tokens(tokenizer, find_end_tokens(tokenizer, end_tokens_of_model(name)))
    end_ids = (tokenizer.eos_token_id, end_token_ids(tokenizer)[0])
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in end_ids:
        # not `tokenizer.pad_token = …`: that gives a new token no id
        tokenizer.add_special_tokens({"pad_token": _choose_pad_token(tokenizer, name, end_ids)})
    return tokenizer


def _is_for_pairs(name: str) -> bool:
    """Whether a tokenizer's folder holds a classifier that reads text pairs."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except OSError:
        return False  # a tokenizer alone
    if not any(str(kind).endswith(CLASSIFIER) for kind in config.get("architectures") or ()):
        return False
    with as_input_error(f"Cannot read the config of {name}", "Copy or download the model again."):
        return reads_pairs(AutoConfig.from_pretrained(name, trust_remote_code=False))


def _choose_pad_token(
    tokenizer: PreTrainedTokenizerBase, name: str, end_ids: tuple[int, int]
) -> str:
    vocabulary = tokenizer.get_vocab()
    for token in (*PAD_TOKEN_NAMES, tokenizer.unk_token, tokenizer.bos_token):
        if token is not None and token in vocabulary and vocabulary[token] not in end_ids:
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
    """A hash of all that decides how text becomes token ids.

    That is vocabulary, merges, normalization, chat template and --chat-template-kwargs.
    """
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
    if kwargs := template_kwargs(tokenizer):
        parts["template_kwargs"] = sorted(kwargs.items())
    return text_hash(json.dumps(parts, ensure_ascii=False))


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Its fingerprint, and its --chat-template-kwargs as JSON, as manifests record them."""
    kwargs = template_kwargs(tokenizer)
    recorded = {TEMPLATE_KWARGS: json.dumps(kwargs)} if kwargs else {}
    return {"tokenizer": tokenizer_fingerprint(tokenizer), **recorded}


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt through the chat template, ready for the assistant's answer.

    For a classifier that reads text pairs they are those of the plain text, without system message.

    Raises:
        InputError: the tokenizer has no chat template, or its template refuses the conversation.
    """
    if is_for_pairs(tokenizer):
        return first_of_pair(tokenizer, prompt.text)
    if not tokenizer.chat_template:
        raise InputError(
            f"The tokenizer of {tokenizer.name_or_path} has no chat template",
            "Use an instruction-tuned model, or put chat_template.jinja beside its tokenizer.json.",
        )
    template = f"The chat template of {tokenizer.name_or_path}"
    remedy = "Change the prompt's roles, some templates know no system turn; or fix the template."
    with as_input_error(f"{template} refuses prompt {prompt.id}", remedy):  # it is a program
        ids = render_prompt(tokenizer, prompt.chat)
    if not ids:
        raise InputError(f"{template} makes no tokens of prompt {prompt.id}", "Fix the template.")
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise InputError(
            f"{template} begins with two {tokenizer.bos_token!r}",
            "Write the token once in the template.",
        )
    return ids


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """`encode_prompt` of many prompts, which takes less time.

    Raises:
        InputError: as `encode_prompt`, for one of them.
    """
    encoded: list[list[int]] = []
    if prompts and tokenizer.chat_template and not is_for_pairs(tokenizer):
        with suppress(InputError), as_input_error("The chat template failed", "Fix the template."):
            encoded = render_prompts(tokenizer, [prompt.chat for prompt in prompts])
    bos = tokenizer.bos_token_id
    if encoded and all(ids and (bos is None or ids[:2] != [bos, bos]) for ids in encoded):
        return encoded
    return [encode_prompt(tokenizer, prompt) for prompt in prompts]  # names the one at fault


def encode_response(
    tokenizer: PreTrainedTokenizerBase,
    response: Response,
    fingerprint: str,
    *,
    reads_thinking: bool = False,
    opened: bool = False,
) -> list[int]:
    """Token ids of a response as a reward model reads it: closed as its template closes a turn.

    These are the sampled ids if this tokenizer made them, else the ids of the text. A response that
    was cut at the length limit is closed too, since a score read in mid-sentence says little; any
    other end token is replaced by the template's, so that all scores are read at the same token.

    Args:
        tokenizer: the tokenizer of the model that will read the response.
        response: the response.
        fingerprint: `tokenizer_fingerprint(tokenizer)`, computed once by the caller.
        reads_thinking: whether that model reads text inside think tags.
        opened: whether the prompt ends with an open think tag (`opens_thinking`), which is closed
            before an answer that is read without thinking.
    """
    (ids,) = encode_responses(
        tokenizer, [(response, opened)], fingerprint, reads_thinking=reads_thinking
    )
    return ids


def encode_responses(
    tokenizer: PreTrainedTokenizerBase,
    responses: Sequence[tuple[Response, bool]],
    fingerprint: str,
    *,
    reads_thinking: bool,
) -> list[list[int]]:
    """`encode_response` of many responses, each with its `opened`, which takes less time."""
    arguments = (tokenizer, fingerprint, reads_thinking)
    read = [_text_or_ids(response, opened, *arguments) for response, opened in responses]
    texts = [text for text in read if isinstance(text, str)]
    if is_for_pairs(tokenizer):
        encoded = iter([second_of_pair(tokenizer, text) for text in texts])
    else:
        token_ids: Any = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        end = end_token_ids(tokenizer)[0]
        encoded = iter([[*ids, end] for ids in token_ids])
    return [next(encoded) if isinstance(text_or_ids, str) else text_or_ids for text_or_ids in read]


def _text_or_ids(
    response: Response,
    opened: bool,
    tokenizer: PreTrainedTokenizerBase,
    fingerprint: str,
    reads_thinking: bool,
) -> str | list[int]:
    """The text that a reward model reads of a response, or the sampled ids where they are that."""
    text = response.text
    is_whole = reads_thinking or not (opened or has_thinking(text))
    if (
        is_whole
        and response.token_ids is not None
        and not is_for_pairs(tokenizer)
        and response.tokenizer_fingerprint == fingerprint
    ):
        return closed(response.token_ids, end_token_ids(tokenizer))
    if opened and reads_thinking:
        return after_opening_tag(text)
    if opened or not is_whole:
        return (NO_THOUGHT if opened else "") + split_thinking(text)[1]
    return text


def closed(ids: Sequence[int], end_ids: Sequence[int]) -> list[int]:
    """Token ids that end with the first end token; it replaces any other end token."""
    open_ids = ids[:-1] if ids and ids[-1] in end_ids else ids
    return [*open_ids, end_ids[0]]


@contextmanager
def using_all_cores() -> Iterator[None]:
    """Let tokenizers use all cores within the block, where one process reads for the others."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def decode_response(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt_ids: Sequence[int]
) -> str:
    """The text of a response without end token and other special tokens.

    Think tags are kept, and one that the prompt opened is added, so that people and reward models
    can tell thinking from the answer.
    """
    end_ids, tags = end_token_ids(tokenizer), _special_think_tags(tokenizer)
    kept_ids = list(ids[:-1] if ids and ids[-1] in end_ids else ids)
    if tags:
        left_out = set(tokenizer.all_special_ids) - tags
        kept_ids = [token_id for token_id in kept_ids if token_id not in left_out]
    text = str(tokenizer.decode(kept_ids, skip_special_tokens=not tags)).strip()
    return f"{OPENING}\n{text}" if opens_thinking(tokenizer, prompt_ids) else text


def _special_think_tags(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The think tags that `skip_special_tokens` would drop."""
    special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {number for token, number in special if token in (OPENING, CLOSING)}


def pad_left(sequences: Sequence[Sequence[int]], pad_id: int) -> TokenBatch:
    """Stack sequences so that their last tokens align, as sampling needs."""
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
    """Left-padded prompts followed by right-padded responses, which all start in one column."""
    return TokenBatch(
        torch.cat([prompts.ids, responses.ids], dim=1),
        torch.cat([prompts.mask, responses.mask], dim=1),
    )


def position_ids(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Positions that count real tokens only, so that padding on either side changes nothing."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def close(batch: TokenBatch, end_ids: Sequence[int]) -> TokenBatch:
    """`closed` for a batch: right-padded rows that all end with the first end token."""
    batch = to_right_padding(batch)
    width = batch.ids.shape[1]
    lengths = batch.mask.sum(dim=1)
    last = batch.ids.gather(1, lengths[:, None] - 1).squeeze(1)
    ids = torch.nn.functional.pad(batch.ids, (0, 1))
    mask = torch.nn.functional.pad(batch.mask, (0, 1))
    has_end = torch.isin(last, torch.tensor(end_ids, device=last.device))
    rows = torch.arange(len(ids), device=ids.device)
    columns = lengths - has_end.long()
    ids[rows, columns] = end_ids[0]
    mask[rows, columns] = True
    full = width + 1 if bool(mask[:, width].any()) else width
    return TokenBatch(ids[:, :full], mask[:, :full])


def to_right_padding(batch: TokenBatch) -> TokenBatch:
    """The same sequences with every real token moved to the left end of its row."""
    order = (~batch.mask).long().argsort(dim=1, stable=True)
    width = int(batch.mask.sum(dim=1).max()) if batch.mask.numel() else 0
    return TokenBatch(batch.ids.gather(1, order)[:, :width], batch.mask.gather(1, order)[:, :width])
