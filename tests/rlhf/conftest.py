"""A command that only the tests of the command line know."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf import cli
from rlhf.config import require_range

RESULT = {
    "steps": 3,
    "kl": {"nats": 0.12345678},
    "text": "grüß [/INST] [b]",
    "of": [{"model": "a"}, {"model": "b"}],
    "skipped": [],
}


@dataclass(frozen=True, kw_only=True)
class Brake:
    """A group of settings."""

    source: str = "reference"
    """Where it comes from."""
    coefficient: float = 0.1
    """How strong it is."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a command that only this test knows."""

    model: str
    """Model folder or hub name."""
    out: Path = Path("runs/a")
    """Folder of this stage."""
    steps: int = 3
    """How many steps."""
    learning_rate: float = 3e-6
    """Peak learning rate."""
    tags: tuple[str, ...] = ()
    """Words."""
    note: str | None = None
    """A remark."""
    fast: bool = False
    """Whether to hurry."""
    brake: Brake = field(default_factory=Brake)
    """The brake."""

    def __post_init__(self) -> None:
        require_range("steps", self.steps, 1)


def _command(run: Callable[[Settings], dict[str, Any]], plan: str = "") -> ModuleType:
    module = ModuleType("rlhf.commands.models.generate")
    module.Settings = Settings
    module.run = run
    module.describe = lambda settings, result: f"Did {result['steps']} steps: {result['text']}"
    module.EXAMPLE = "rlhf probe --model m"
    if plan:
        module.memory_plan = lambda settings: plan
    return module


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Settings]]:
    """Puts a command `probe` beside the real ones; gives the settings that it ran with."""

    def install(fail: BaseException | None = None, plan: str = "") -> list[Settings]:
        seen: list[Settings] = []

        def run(settings: Settings) -> dict[str, Any]:
            """Do what this test wants."""
            seen.append(settings)
            if fail is not None:
                raise fail
            return RESULT | {"steps": settings.steps}

        monkeypatch.setitem(sys.modules, "rlhf.commands.models.generate", _command(run, plan))
        monkeypatch.setitem(cli.COMMANDS, "probe", "models.generate")
        return seen

    return install
