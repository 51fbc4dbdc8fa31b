"""A local model that answers while people watch: sampling as in `generate.py`, token by token."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from policies.sampling.generate import (
    Sample,
    cut_at_end_token,
    encode_prompts,
    generation_config,
)
from policies.sampling.kv_cache import new_cache
from policies.sampling.responses import as_response
from rlhf.errors import InputError
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.models import describe_model, load_causal_lm
from rlhf.modeling.tokens import decode_response, load_tokenizer, pad_left
from rlhf.parallel.distributed import start
from rlhf.records.schema import Prompt, Response, Sampling

# One question at a time on this machine's accelerator, whatever the number of models.
_one_at_a_time = threading.Lock()


class LocalModel:
    """A model in this process.

    Args:
        name: model folder or hub name.
        sampling: its seed is not used: every question brings its own.
        given: --chat-template-kwargs.

    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(self, name: str, sampling: Sampling, given: dict[str, Any] | None = None) -> None:
        self.description = describe_model(name, given)
        self.tokenizer = load_tokenizer(name, given)
        self.accelerator = start("auto", 0)
        self.model = load_causal_lm(name).to(self.accelerator.device).eval()
        self.sampling = sampling

    def answer(
        self, prompt: Prompt, ids: Sequence[str], seed: int, on_text: Callable[[int, str], bool]
    ) -> list[Response]:
        """One response for each id, sampled together.

        Args:
            prompt: the conversation so far.
            ids: the ids that the responses get.
            seed: of this sampling.
            on_text: called with a place in `ids` and its text so far; returns whether to go on.

        Raises:
            InputError: the conversation is too long, or the chat template refuses it.
        """
        try:
            [encoded] = encode_prompts(
                self.tokenizer, self.model.config, [prompt], self.sampling.max_new_tokens
            )
        except InputError as error:
            raise InputError(error.problem, "Shorten it, or begin a new conversation.") from None
        streamer = TokenStreamer(self, encoded, on_text, len(ids))
        with _one_at_a_time:
            self._generate(seed, streamer)
        return [self._response(prompt, ids[row], row, seed, streamer) for row in range(len(ids))]

    @torch.no_grad()
    def _generate(self, seed: int, streamer: "TokenStreamer") -> None:
        torch.manual_seed(seed)
        pad_id = self.tokenizer.pad_token_id
        rows = [streamer.prompt] * len(streamer.tokens)
        batch = pad_left(rows, int(pad_id)).to(self.accelerator.device)
        with self.accelerator.autocast():
            self.model.generate(
                input_ids=batch.ids,
                attention_mask=batch.mask.long(),
                past_key_values=new_cache(self.model, self.sampling.max_new_tokens),
                generation_config=generation_config(self.tokenizer, self.sampling),
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([_Stop(streamer)]),
            )

    def _response(
        self, prompt: Prompt, id: str, row: int, seed: int, streamer: "TokenStreamer"
    ) -> Response:
        """One answer. A stopped one gets no token ids: it is not a sample of the model."""
        sample = streamer.sample(row)
        response = as_response(
            prompt,
            row,
            sample,
            decode_response(self.tokenizer, sample.token_ids, streamer.prompt),
            self.description,
            replace(self.sampling, seed=seed),
        )
        token_ids = None if streamer.stopped[row] else response.token_ids
        return replace(response, id=id, token_ids=token_ids)


class TokenStreamer(BaseStreamer):
    """Passes the text of every row on at every new token, and stops the rows that need no more."""

    def __init__(
        self, model: LocalModel, prompt: list[int], on_text: Callable[[int, str], bool], rows: int
    ) -> None:
        self.tokenizer = model.tokenizer
        self.prompt = prompt
        self.on_text = on_text
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.stopped = [False] * rows
        self._prompt_came = False

    def put(self, value: Tensor) -> None:
        """Take the next token of every row; the first call brings the prompts."""
        if not self._prompt_came:
            self._prompt_came = True
            return
        for row, token in enumerate(value.tolist()):
            sample = self.sample(row)
            if sample.finished or self.stopped[row]:
                continue
            self.tokens[row].append(token)
            # Half a character is not shown: its other bytes are in the next token.
            text = decode_response(self.tokenizer, self.tokens[row], self.prompt)
            self.stopped[row] = not self.on_text(row, text.rstrip("\ufffd"))

    def end(self) -> None:
        """Every row has ended."""

    def sample(self, row: int) -> Sample:
        """The tokens of a row so far."""
        return cut_at_end_token(self.tokens[row], end_token_ids(self.tokenizer))


class _Stop(StoppingCriteria):
    """Ends the rows that need not go on."""

    def __init__(self, streamer: TokenStreamer) -> None:
        self.streamer = streamer

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        return torch.tensor(self.streamer.stopped, device=input_ids.device)
