"""Who may use the server: programs of this machine, or those with a token."""

from typing import final

from starlette.requests import Request

from policies.serving.errors import ApiError
from policies.serving.retention import Records
from rlhf.endpoints.urls import LOOPBACK

LOCAL_PROGRAM = "app"  # who gives feedback where no token is needed


@final
class Access:
    """Checks requests.

    Args:
        host: the address that is served.
        records: where tokens are; needed unless `host` is this machine alone.
    """

    def __init__(self, host: str, records: Records | None) -> None:
        self._is_local = host in LOOPBACK
        self._records = records

    async def program(self, request: Request) -> str:
        """The program that asks.

        Raises:
            ApiError: it has no valid token; or a web page of another site asks.
        """
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        if self._is_local:
            _require_own_machine(request)
            owner = await self._records.owner(token) if self._records and token else None
            return owner or LOCAL_PROGRAM
        assert self._records is not None  # the command has checked it
        owner = await self._records.owner(token) if token else None
        if owner is None:
            raise ApiError(
                401,
                "Send a valid token as the API key (Authorization: Bearer TOKEN). Make one: "
                "rlhf users token NAME --db DB",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return owner


def _require_own_machine(request: Request) -> None:
    """Refuse pages of other sites, whose browser runs on this machine, too."""
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
    if name.strip("[]") not in LOOPBACK:
        raise ApiError(403, f"This server is called {LOOPBACK[0]}, not {name!r:.80}.")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise ApiError(403, "Pages of other sites may not use this server.")
