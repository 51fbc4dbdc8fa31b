"""What a page sends is taken only from the person who is signed in."""

from typing import Any

from rlhf.endpoints.request_bodies import BodyError


def require_sender(payload: dict[str, Any], name: str) -> None:
    """Check that the page belongs to the person who is signed in, and remove its name.

    Positions on a page refer to the order that its person was shown.

    Raises:
        BodyError: the page is somebody else's.
    """
    page = payload.pop("annotator", name)
    if page != name:
        raise BodyError(
            403, f"This page was opened by {page}, but {name} is signed in now. Reload it."
        )
