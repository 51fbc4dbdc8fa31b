"""The server behind `rlhf serve --reward`: a reward model at an address."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from rich.console import Console
from rich.markup import escape

from reward.scoring.scorer import member_folders
from reward.scoring.texts import PromptResponses, TextReward, load_text_reward
from reward.serving.app import build_app
from reward.serving.batches import RequestCounts, Score, SharedBatches
from reward.serving.settings import ScoringSettings
from rlhf.endpoints.urls import LOOPBACK, http_address
from rlhf.errors import InputError
from rlhf.modeling.models import describe_model
from rlhf.modeling.readers import load_reader
from rlhf.modeling.tokens import encode_prompt
from rlhf.parallel.distributed import start_alone

MAX_CONNECTIONS = 256
SHUTDOWN_SECONDS = 60  # as long as a client waits for its answer


@dataclass(frozen=True, kw_only=True)
class ServedReward:
    """Which reward model is served, and where."""

    reward: str
    host: str
    port: int
    scoring: ScoringSettings
    template_kwargs: dict[str, Any]


def serve_reward(served: ServedReward) -> dict[str, Any]:
    """Serve a reward model until SIGTERM or SIGINT; accepted requests are answered before the end.

    Raises:
        InputError: there is no such model, or the address cannot be used.
    """
    with _bind(served.host, served.port) as listening:
        [folder, *_] = member_folders(served.reward)
        description = describe_model(folder, served.template_kwargs)
        counts = RequestCounts()
        batches = SharedBatches(
            _load(served, description, counts), counts, served.scoring.max_queue
        )
        config = uvicorn.Config(
            build_app(batches, description),
            ws="none",
            lifespan="off",
            log_level="warning",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        _print_address(served)
        with suppress(KeyboardInterrupt):  # which uvicorn raises again after its shutdown
            uvicorn.Server(config).run(sockets=[listening])
    return {"requests": counts.requests, "responses": counts.items, "batches": counts.batches}


def load_batches(
    reward: str, scoring: ScoringSettings, template_kwargs: dict[str, Any]
) -> SharedBatches:
    """Shared batches of a reward model, a function or an address.

    Args:
        reward: what scores.
        scoring: how.
        template_kwargs: --chat-template-kwargs of a reward model.

    Raises:
        InputError: there is no such model or function.
    """
    score = _load_rewards(reward, scoring, template_kwargs)
    return SharedBatches(
        lambda answers: [row[0] for row in score(answers)], RequestCounts(), scoring.max_queue
    )


def _load_rewards(
    reward: str, scoring: ScoringSettings, template_kwargs: dict[str, Any]
) -> TextReward:
    return load_text_reward(
        reward,
        start_alone(scoring.precision, seed=0),
        scoring.micro_tokens,
        scoring.combine,
        given=template_kwargs,
    )


def _load(served: ServedReward, description: dict[str, str], counts: RequestCounts) -> Score:
    """The rewards of `rlhf score`, with their tokens counted."""
    rewards = _load_rewards(served.reward, served.scoring, served.template_kwargs)
    reader = load_reader(description)

    def score(answers: Sequence[PromptResponses]) -> list[float]:
        scores = [row[0] for row in rewards(answers)]
        for prompt, (response,) in answers:
            ids = encode_prompt(reader.tokenizer, prompt)
            counts.tokens += len(ids) + len(reader.encode(response, "", ids))
        return scores

    return score


def _bind(host: str, port: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise InputError(
            f"Port {port} of {host} cannot be used ({error.strerror})",
            f"Choose another: --port {port + 1}",
        ) from None
    return opened


def _print_address(served: ServedReward) -> None:
    address = http_address(served.host, served.port)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"Serving {escape(served.reward)} at [bold]{escape(address)}[/]  (Ctrl+C stops)")
    if served.host not in LOOPBACK:
        console.print(
            "Everybody who can reach this address can use it: there is no authentication."
        )
