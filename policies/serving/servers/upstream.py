"""The server behind the proxy: one model that speaks OpenAI's chat completions."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from policies.serving.errors import INVALID, UPSTREAM, ApiError

CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 5.0
MAX_ANSWER_BYTES = 2**26
MAX_ERROR_BYTES = 2**16
MAX_MESSAGE = 2_000
PASSED_ON = (400, 404, 408, 413, 422, 429)  # what the app can do something about


def new_client(silence_seconds: float) -> httpx.AsyncClient:
    """A client that waits for a silent server for so long; it follows no redirects."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        trust_env=False,
    )


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """A model on a server.

    `url` ends in /v1; `model` is its name there; `headers` has the key, if the server needs one.
    """

    url: str
    model: str
    headers: dict[str, str]

    async def complete(self, client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        """A whole completion.

        Raises:
            ApiError: the server refuses, fails or cannot be reached.
        """
        response = await self.start_completion(client, {**body, "stream": False})
        try:
            content = bytearray()
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    raise unusable("its answer is too long")
            value = json.loads(content)
        except httpx.HTTPError as error:
            raise unreachable(error) from None
        except (ValueError, RecursionError):
            raise unusable("its answer is not JSON") from None
        finally:
            await response.aclose()
        if not isinstance(value, dict):
            raise unusable("its answer is no chat completion")
        return value

    async def start_completion(
        self, client: httpx.AsyncClient, body: dict[str, Any]
    ) -> httpx.Response:
        """The response to a request, open to be read; the caller closes it.

        Raises:
            ApiError: the server refuses, fails or cannot be reached.
        """
        request = client.build_request(
            "POST",
            f"{self.url}/chat/completions",
            content=json.dumps({**body, "model": self.model}).encode(),
            headers={"content-type": "application/json", **self.headers},
        )
        try:
            response = await client.send(request, stream=True)
            if response.status_code == httpx.codes.OK:
                return response
            raise await _refusal(response)
        except httpx.HTTPError as error:
            raise unreachable(error) from None

    async def problem(self, client: httpx.AsyncClient) -> str:
        """Why the server cannot be used; empty if it answers.

        Not every server has /health, and the list of models of `transformers serve` fails on a
        machine without a cache of the hub.
        """
        settings: dict[str, Any] = {"headers": self.headers, "timeout": HEALTH_SECONDS}
        try:
            response = await client.get(f"{self.url.removesuffix('/v1')}/health", **settings)
            if response.status_code == httpx.codes.NOT_FOUND:
                response = await client.get(f"{self.url}/models", **settings)
        except httpx.HTTPError as error:
            return describe(error)
        return "" if response.is_success else f"status {response.status_code}"


async def _refusal(response: httpx.Response) -> ApiError:
    """The error of a server's refusal, with its message."""
    content = bytearray()
    try:
        async for piece in response.aiter_bytes():
            content += piece[: MAX_ERROR_BYTES - len(content)]
            if len(content) >= MAX_ERROR_BYTES:
                break
    finally:
        await response.aclose()
    message = _message_of(bytes(content))
    if response.status_code in PASSED_ON:
        wait = response.headers.get("retry-after")
        headers = {"retry-after": wait} if wait else None
        return ApiError(response.status_code, message, INVALID, headers=headers)
    return ApiError(
        502, f"The model server failed with status {response.status_code}: {message}", UPSTREAM
    )


def _message_of(content: bytes) -> str:
    """The message in the body of an error, of the forms that servers use."""
    try:
        value: Any = json.loads(content)
    except (ValueError, RecursionError):
        value = content.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:MAX_MESSAGE] or "no message"


def unreachable(error: httpx.HTTPError) -> ApiError:
    """The answer when the server is silent or away."""
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return ApiError(504, "The model server sent nothing for too long.", UPSTREAM)
    return ApiError(
        502, f"The model server cannot be reached ({describe(error)}). Try again later.", UPSTREAM
    )


def unusable(problem: str) -> ApiError:
    """The answer when the server speaks another protocol."""
    return ApiError(502, f"The model server cannot be used: {problem}.", UPSTREAM)


def describe(error: httpx.HTTPError) -> str:
    """An error in words; some have none."""
    return str(error) or type(error).__name__
