"""Failures in the form that OpenAI's clients expect."""

from typing import Any

from starlette.responses import JSONResponse

INVALID = "invalid_request_error"
UPSTREAM = "upstream_error"
UNAVAILABLE = "server_error"


class ApiError(Exception):
    """A request is answered with this status and message.

    Args:
        status: the HTTP status.
        message: what is wrong, and what to do.
        kind: OpenAI's `type` of the error.
        code: OpenAI's `code`, for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as a JSON object."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return {"error": error}

    def to_response(self) -> JSONResponse:
        """The error as an HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)
