"""Live mode's models on an OpenAI-compatible server; answers are read as they stream."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request

from rlhf.endpoints.chat_completions import key_header, open_completion, text_of
from rlhf.endpoints.urls import DeadlineError, open_url, read_answer
from rlhf.errors import InputError
from rlhf.records.schema import Prompt, Response, Sampling
from rlhf.records.wording import EMPTY_TEXT

API_KEY = "RLHF_LIVE_API_KEY"
KEPT = "Try again; your question is kept."
MAX_ERROR_BYTES = 300
MAX_LINE = 2**20
TOTAL_TIME = 10  # an answer may take this many times the limit on silence
PROTOCOL_ERRORS = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RecursionError,
)


class StreamEndedError(Exception):
    """The server ended its answer early; the message is the server's."""


@dataclass(frozen=True, kw_only=True)
class EndpointModel:
    """A model on a server.

    Its weights are unknown, so its responses have no model fingerprint.
    """

    url: str
    model: str
    sampling: Sampling
    timeout_seconds: float = 60.0

    def answer(
        self, prompt: Prompt, ids: Sequence[str], seed: int, on_text: Callable[[int, str], bool]
    ) -> list[Response]:
        """One response for each id, all asked for at the same time; see `live.ChatModel`.

        Raises:
            InputError: the server is down, too slow, refuses, or speaks another protocol.
        """

        def one(row: int) -> Response:
            text, finished = "", None
            for piece, ending in self._stream(prompt, seed + row):
                text += piece
                finished = {"stop": True, "length": False}.get(ending, finished)
                if not on_text(row, text):
                    finished = False
                    break
            sampling = replace(self.sampling, seed=seed + row)
            return Response(
                id=ids[row],
                prompt_id=prompt.id,
                text=text.strip() or EMPTY_TEXT,
                model=self.model,
                sampling=sampling,
                sample_index=row,
                finished=finished,
            )

        with ThreadPoolExecutor(len(ids)) as pool:
            return list(pool.map(one, range(len(ids))))

    def _stream(self, prompt: Prompt, seed: int) -> Iterator[tuple[str, str]]:
        """Pieces of text, each with the finish reason, "" while the answer goes on.

        Raises:
            InputError: as `answer`.
        """
        try:
            with self._open(prompt, seed) as answer:
                yield from _pieces(answer)
        # The server's message often names the model: it goes to the terminal, not to annotators.
        except HTTPError as error:
            message = error.read(MAX_ERROR_BYTES).decode(errors="replace")
            sys.stderr.write(f"{self.model}: {error.code} {message}\n")
            raise InputError(
                f"The model server refused the question (status {error.code})", KEPT
            ) from None
        except DeadlineError:
            raise InputError(
                f"The model server took more than {TOTAL_TIME * self.timeout_seconds:g} seconds",
                KEPT,
            ) from None
        except TimeoutError:
            raise InputError(
                f"The model server sent nothing for {self.timeout_seconds:g} seconds", KEPT
            ) from None
        except (URLError, ConnectionError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise InputError(f"The model server cannot be reached ({reason})", KEPT) from None
        except StreamEndedError as error:
            sys.stderr.write(f"{self.model} ended its answer early: {error}\n")
            raise InputError("The model server ended its answer early", KEPT) from None
        except PROTOCOL_ERRORS as error:
            sys.stderr.write(f"{self.model} answers with another protocol: {error!r}\n")
            raise InputError(
                "The model server does not speak the chat completions protocol",
                "Tell the person who started this app: --endpoint must end in /v1.",
            ) from None

    def _open(self, prompt: Prompt, seed: int) -> AbstractContextManager[HTTPResponse]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": prompt.chat,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_new_tokens,
            "seed": seed,
            "stream": True,
        }
        if self.sampling.top_k:
            body["top_k"] = (
                self.sampling.top_k
            )  # not in OpenAI's protocol; vLLM and others accept it
        return open_completion(
            self.url,
            body,
            key_variable=API_KEY,
            timeout_seconds=self.timeout_seconds,
            total_seconds=TOTAL_TIME * self.timeout_seconds,
        )


def _pieces(answer: HTTPResponse) -> Iterator[tuple[str, str]]:
    """The events of a stream, or the one message of a server that does not stream."""
    if "text/event-stream" not in answer.headers.get("content-type", ""):
        [choice] = json.loads(read_answer(answer))["choices"]
        yield text_of(choice["message"]["content"]), text_of(choice.get("finish_reason")) or "stop"
        return
    ended, half = False, ""
    while line := answer.readline(MAX_LINE):
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            ended = ended or data == b"[DONE]"
            continue
        event = json.loads(data)
        if "error" in event:
            raise StreamEndedError(event["error"])
        for choice in event["choices"]:
            ending = text_of(choice.get("finish_reason"))
            ended = ended or bool(ending)
            whole, half = split_half(half, choice.get("delta", {}).get("content"))
            if ending:  # nothing completes the half now
                whole, half = whole + text_of(half), ""
            yield whole, ending
    if not ended:
        raise StreamEndedError("the stream ended without a finish reason")


def split_half(half: str, content: Any) -> tuple[str, str]:
    """Whole characters, and the half of one at the end, which the next piece completes.

    JSON writes some characters as pairs, which a server may send in two pieces.

    Args:
        half: what was left of the piece before.
        content: the next piece; None is none.
    """
    if not isinstance(content, str | None):
        return text_of(content), ""
    text = half + (content or "")
    is_half = "\ud800" <= text[-1:] <= "\udbff"
    return (text_of(text[:-1]), text[-1]) if is_half else (text_of(text), "")


def served_model(url: str) -> str:
    """The one model that a server serves.

    Raises:
        InputError: it cannot be asked, or serves several.
    """
    address = url.rstrip("/") + "/models"
    request = Request(address, headers=key_header(API_KEY))
    try:
        with open_url(request, timeout_seconds=10) as answer:
            names = [text_of(model["id"]) for model in json.loads(read_answer(answer))["data"]]
    except (OSError, HTTPException, *PROTOCOL_ERRORS) as error:
        raise InputError(
            f"{address} does not list its models ({error})",
            "Start the server, check --endpoint (it ends in /v1), or name the model: --model NAME",
        ) from None
    if len(names) != 1:
        raise InputError(
            f"{url} serves {len(names)} models: {', '.join(names[:5])}",
            f"Choose: --model {names[0] if names else 'NAME'}",
        )
    return names[0]
