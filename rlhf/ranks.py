"""Which process of a group this is, as torchrun and accelerate tell every process."""

import os


def is_main_process() -> bool:
    """True in the one process that talks to the user; callable before the group exists."""
    return os.environ.get("RANK", "0") == "0"
