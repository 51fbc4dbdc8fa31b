"""Checks that the hub answers, before its library waits for it."""

from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError
from urllib.request import Request

from huggingface_hub import constants, try_to_load_from_cache

from rlhf.endpoints.urls import open_url
from rlhf.errors import InputError

HUB_SECONDS = 10


def require_hub(name: str) -> None:
    """Check once that the hub answers, for models not on disk; its library would try for 23 s.

    Raises:
        InputError: the hub does not answer.
    """
    on_disk = Path(name).is_dir() or try_to_load_from_cache(name, "config.json")
    if on_disk or constants.is_offline_mode():
        return
    try:
        with open_url(Request(constants.ENDPOINT, method="HEAD"), timeout_seconds=HUB_SECONDS):
            return
    except HTTPError:
        return  # an answer
    except OSError as error:
        if isinstance(getattr(error, "reason", None), SSLError):
            return  # its library may have certificates that Python lacks
        raise InputError(
            f"{name} is not a local folder, and the hub does not answer ({constants.ENDPOINT})",
            "Check the name and the connection, or download the model and give its folder.",
        ) from None
