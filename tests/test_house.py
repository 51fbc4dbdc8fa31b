"""What CONTRIBUTING.md promises of the code's shape."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.commands import REPOSITORY

PACKAGES = ("rlhf", "reward", "policies", "labeling_app")
FOLDERS = (*PACKAGES, "tests", "examples")
MOST_ENTRIES, MOST_LINES, MOST_LINES_OF_FUNCTION, MOST_ARGUMENTS = 14, 400, 60, 7
VAGUE_NAMES = {"found", "one", "place", "places", "words"}
FORMULAS = {  # pure functions of numbers take as many as their formula has
    ("policies/formulas.py", "policy_loss"),
    ("policies/formulas.py", "shape_rewards"),
}


def files(folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        yield from (REPOSITORY / folder).rglob("*.py")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imported_names(path: Path) -> Iterator[str]:
    """The modules that a file imports, and the full names of what it takes from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{one.name}" for one in node.names)


def bound_names(path: Path) -> Iterator[str]:
    """The names of variables, fields and parameters."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def count_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = function.args
    taken = [*names.posonlyargs, *names.args, *names.kwonlyargs]
    return sum(one.arg not in ("self", "cls") for one in taken)


@pytest.mark.parametrize("root", FOLDERS)
def test_a_folder_fits_one_glance(root: str) -> None:
    folders = [REPOSITORY / root, *(REPOSITORY / root).rglob("*/")]
    entries = {
        str(folder.relative_to(REPOSITORY)): len(
            [one for one in folder.iterdir() if one.name != "__pycache__"]
        )
        for folder in folders
        if folder.is_dir() and folder.name != "__pycache__"
    }
    assert not {name: count for name, count in entries.items() if count > MOST_ENTRIES}


def test_files_and_functions_are_short() -> None:
    long = []
    for path in files(FOLDERS):
        name = str(path.relative_to(REPOSITORY))
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            long.append((name, lines))
        for function in functions(path):
            size = (function.end_lineno or 0) - function.lineno + 1
            if size > MOST_LINES_OF_FUNCTION:
                long.append((f"{name}:{function.name}", size))
    assert not long


def test_functions_take_few_arguments() -> None:
    many = {
        (str(path.relative_to(REPOSITORY)), function.name): count_arguments(function)
        for path in files(PACKAGES)
        for function in functions(path)
        if count_arguments(function) > MOST_ARGUMENTS
    }
    assert set(many) <= FORMULAS, many


def test_names_say_what_they_hold() -> None:
    vague = {
        str(path.relative_to(REPOSITORY)): sorted(names)
        for path in files((*PACKAGES, "examples"))
        if (names := VAGUE_NAMES & set(bound_names(path)))
    }
    assert not vague


def test_no_test_file_is_imported_by_another() -> None:
    """What tests share has a module of a plain name beside them, or is a fixture in conftest.py."""
    shared = [
        (str(path.relative_to(REPOSITORY)), name)
        for path in files(("tests", "examples"))
        for name in imported_names(path)
        if name.startswith("tests.") and ".test_" in name
    ]
    assert not shared
