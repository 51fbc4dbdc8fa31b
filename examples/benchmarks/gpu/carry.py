"""Packages that are missing on a GPU machine without a network, and how to bring their wheels.

On the GPU machine, to see what is missing (this file needs the standard library only):

    python -m examples.benchmarks.gpu.carry

On a machine with a network, for Linux on x86-64:

    python -m examples.benchmarks.gpu.carry --download FOLDER NAME ...

On the GPU machine again:

    python -m pip install --no-index --no-deps --target .site FOLDER/*.whl
    export PYTHONPATH=$PWD/.site

PyTorch 2.11, transformers 5.17, accelerate, peft, safetensors and what they depend on must be
installed. Reward stages run without pyarrow, whose wheel is the largest.
"""

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Wheel(NamedTuple):
    """A package: how it is imported, MB of its wheel, and the stages that import it."""

    name: str
    module: str
    megabytes: float
    stages: str


WHEELS = (
    Wheel("pytest", "pytest", 0.4, "run_tests"),
    Wheel("pluggy", "pluggy", 0.1, "run_tests"),
    Wheel("iniconfig", "iniconfig", 0.1, "run_tests"),
    Wheel("jaxtyping", "jaxtyping", 0.1, "all"),
    Wheel("wadler-lindig", "wadler_lindig", 0.1, "all"),
    Wheel("jinja2", "jinja2", 0.1, "all"),
    Wheel("cyclopts", "cyclopts", 0.3, "reward_model, ppo_steps"),
    Wheel("attrs", "attrs", 0.1, "reward_model, ppo_steps"),
    Wheel("docstring-parser", "docstring_parser", 0.1, "reward_model, ppo_steps"),
    Wheel("rich-rst", "rich_rst", 0.3, "reward_model, ppo_steps"),
    Wheel("rich", "rich", 0.3, "reward_model, ppo_steps"),
    Wheel("markdown-it-py", "markdown_it", 0.1, "reward_model, ppo_steps"),
    Wheel("mdurl", "mdurl", 0.1, "reward_model, ppo_steps"),
    Wheel("pygments", "pygments", 1.2, "reward_model, ppo_steps"),
    Wheel("pyarrow", "pyarrow", 54, "ppo_steps, reward_model --kind trl"),
    Wheel("trl", "trl", 0.9, "reward_model --kind trl"),
    Wheel("datasets", "datasets", 0.6, "reward_model --kind trl"),
    Wheel("dill", "dill", 0.1, "reward_model --kind trl"),
    Wheel("multiprocess", "multiprocess", 0.2, "reward_model --kind trl"),
    Wheel("xxhash", "xxhash", 0.5, "reward_model --kind trl"),
    Wheel("pandas", "pandas", 12, "reward_model --kind trl"),
)
PINNED = {"dill": "dill<0.4.2", "multiprocess": "multiprocess<0.70.20"}  # datasets wants them
PLATFORMS = tuple(
    f"manylinux{name}_x86_64" for name in ("2014", "_2_17", "_2_24", "_2_27", "_2_28")
)


def list_missing() -> None:
    """Print what is not installed here."""
    missing = [wheel for wheel in WHEELS if find_spec(wheel.module) is None]
    for wheel in missing:
        print(f"{wheel.name:18} {wheel.megabytes:5.1f} MB  {wheel.stages}")
    total = sum(wheel.megabytes for wheel in missing)
    names = " ".join(wheel.name for wheel in missing)
    print(f"{total:.1f} MB to carry: {names}" if missing else "nothing is missing")


def download(folder: Path, python: str, names: list[str]) -> int:
    """Fetch wheels of these packages alone, for Linux on x86-64; pip's exit code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    done = subprocess.run([*command, *(PINNED.get(name, name) for name in names)], check=False)
    sizes = {path.name: path.stat().st_size / 1e6 for path in folder.glob("*.whl")}
    for name, megabytes in sorted(sizes.items()):
        print(f"{megabytes:7.1f} MB  {name}")
    print(f"{sum(sizes.values()):7.1f} MB in all")
    return done.returncode


def main(argv: list[str] | None = None) -> int:
    """List or download; the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--download", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default="3.12", help="the version on that machine")
    parser.add_argument("names", nargs="*", help="packages to download; default: the small ones")
    arguments = parser.parse_args(argv)
    if arguments.download is None:
        list_missing()
        return 0
    small = [wheel.name for wheel in WHEELS if wheel.megabytes < 10]
    return download(arguments.download, arguments.python, arguments.names or small)


if __name__ == "__main__":
    sys.exit(main())
