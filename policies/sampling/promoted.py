"""Live mode's model of a loop: always the currently promoted policy."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from policies.sampling.streaming import LocalModel
from rlhf.records.schema import Prompt, Response, Sampling
from rlhf.run.loops.promotion import promoted_policy


class PromotedModel:
    """The promoted policy of a loop, in this process.

    After a promotion the next question waits until the other policy is loaded.

    Args:
        out: folder of the loop.
        sampling: as for `LocalModel`.
        given: --chat-template-kwargs.
        original: the model before the loop was started in its folder.

    Raises:
        InputError: the policy cannot be loaded.
    """

    def __init__(
        self, out: Path, sampling: Sampling, given: dict[str, Any], original: str | None = None
    ) -> None:
        self.out = out
        self.sampling = sampling
        self.given = given
        self.original = original
        self._lock = threading.Lock()
        self._loaded: tuple[str, LocalModel] | None = None
        self._model()

    def answer(
        self, prompt: Prompt, ids: Sequence[str], seed: int, on_text: Callable[[int, str], bool]
    ) -> list[Response]:
        """As `LocalModel.answer`, by the policy that is promoted now."""
        return self._model().answer(prompt, ids, seed, on_text)

    def _model(self) -> LocalModel:
        with self._lock:
            name = promoted_policy(self.out, self.original)
            if self._loaded is None or self._loaded[0] != name:
                self._loaded = None  # frees its memory first
                self._loaded = name, LocalModel(name, self.sampling, self.given)
            return self._loaded[1]
