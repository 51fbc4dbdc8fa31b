"""The pages for readers: their links, paths, commands and diagrams are those of the tree."""

import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from rlhf.cli import COMMANDS
from rlhf.commands.help_page import FLAGS_OF_ALL
from rlhf.config.paths import flag_of, old_names, setting_names
from tests.servers.commands import REPOSITORY

PACKAGES = ("rlhf", "reward", "policies", "labeling_app")
PAGES = sorted(
    path
    for pattern in ("*.md", "examples/**/*.md", *(f"{p}/*.md" for p in PACKAGES))
    for path in REPOSITORY.glob(pattern)
    if path.name != "CHANGELOG.md"  # which speaks of what was
)
SHORT = {"README.md": 900, **{f"{package}/README.md": 640 for package in PACKAGES}}
OF_RUNS = {"config.yaml", "lead.yaml", "NAME.yaml"}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pages
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`([\w./-]+\.(?:py|sh|yaml|sbatch|md))`", text):
        if Path(name).name not in OF_RUNS:
            assert any((root / name).is_file() for root in (page.parent, REPOSITORY)), name


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every rlhf command that a page quotes, also in the middle of a sentence."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?:    |\$ )?rlhf (.+)$", text, flags=re.MULTILINE)
    quoted = re.findall(r"`rlhf\s([^`]+)`", FENCE.sub("", text))
    for command in [*lines, *quoted]:
        yield command.partition("  #")[0].split()


@pages
def test_every_command_that_is_quoted_has_its_flags(page: Path) -> None:
    for name, *words in commands(page):
        if name == "COMMAND":
            continue
        assert name in COMMANDS, name
        settings = import_module(f"rlhf.commands.{COMMANDS[name]}").Settings
        names = {*setting_names(settings), *old_names(settings)}
        flags = {*map(flag_of, names), *FLAGS_OF_ALL}
        for word in words:
            flag = word.partition("=")[0].rstrip(".,;:)")
            if flag.startswith("--"):
                known = flag in flags or flag.rpartition(".")[0] in flags
                assert known, f"rlhf {name} has no {flag}"


def packages_in(page: Path) -> set[str]:
    """The folders in the diagram of a page: two spaces of indentation lead one deeper."""
    [block] = re.findall(r"^```text\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    parents: list[str] = []
    for indentation, name in re.findall(r"^( *)(\w+)/(?=\s)", block, flags=re.MULTILINE):
        parents = [*parents[: len(indentation) // 2], name]
        found.add("/".join(parents))
    return found


def folders(package: str) -> set[str]:
    root = REPOSITORY / package
    inner = (path for path in root.rglob("*/") if path.is_dir() and path.name != "__pycache__")
    return {package, *(str(path.relative_to(REPOSITORY)) for path in inner)}


def test_the_diagram_shows_every_folder() -> None:
    assert packages_in(REPOSITORY / "rlhf" / "README.md") == set().union(*map(folders, PACKAGES))


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_the_diagram_of_a_package_shows_its_packages(package: str) -> None:
    shown = packages_in(REPOSITORY / package / "README.md")
    assert shown <= folders(package)
    assert shown >= {name for name in folders(package) if name.count("/") <= 1}


def layers_of(package: str) -> list[set[str]]:
    """The import contract of a package, from the top: which modules stand beside each other."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    [layers] = [one["layers"] for one in contracts if one.get("containers") == [package]]
    return [set(layer.split(" | ")) for layer in layers]


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_the_diagram_of_a_package_is_in_the_order_of_its_imports(package: str) -> None:
    page = (REPOSITORY / package / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = re.findall(r"^  (\w+)(?:/|\.py)\s", block, flags=re.MULTILINE)
    layers = layers_of(package)
    ranks = [rank for name in shown for rank, layer in enumerate(layers) if name in layer]
    assert len(ranks) == sum(map(len, layers))
    assert ranks == sorted(ranks)


def test_the_table_names_every_command() -> None:
    page = (REPOSITORY / "examples" / "guides" / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `rlhf ([a-z-]+)", page, flags=re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize("name", SHORT)
def test_a_readme_is_short(name: str) -> None:
    assert len((REPOSITORY / name).read_text(encoding="utf-8").split()) <= SHORT[name]
