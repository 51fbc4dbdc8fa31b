"""A wheel of this tree, installed into an environment of its own that has no checkout."""

import os
import shutil
import site
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers.commands import REPOSITORY

PACKAGES = ("rlhf", "reward", "policies", "labeling_app")
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
OFFLINE = ("--no-deps", "--no-index")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and a folder outside the repository to work in."""

    bin: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables of processes: none that leads back to the checkout."""
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "GRADIO_ANALYTICS_ENABLED": "False",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, *command: str, folder: Path | None = None, text: str = "") -> str:
        """What a command prints that reads this text from stdin; it must succeed."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=folder or self.folder,
            env=self.environment,
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree: building leaves files beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(
            REPOSITORY / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in SOURCES:
        shutil.copy(REPOSITORY / name, source)
    out = source / "dist"
    built = [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", out, source]
    subprocess.run([str(word) for word in built], check=True)
    [found] = out.glob("rlhf-*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an empty environment that sees the dependencies of this one.

    A path in a .pth file adds a folder without its own .pth files, so an editable install of the
    checkout stays out of sight.
    """
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, symlinks=True)
    python = root / "bin" / "python"
    [packages] = (root / "lib").glob("python*/site-packages")
    (packages / "base.pth").write_text(f"{site.getsitepackages()[0]}\n", encoding="utf-8")
    server = Path(sys.executable).with_name("transformers")  # the program of a dependency
    (root / "bin" / server.name).symlink_to(server)
    install = [*PIP, "--python", python, "install", *OFFLINE, "--no-compile", "--ignore-installed"]
    subprocess.run([str(word) for word in (*install, wheel)], check=True, env=os.environ)
    return Installed(root / "bin", tmp_path_factory.mktemp("outside"))
