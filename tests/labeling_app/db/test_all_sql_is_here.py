"""SQL stands in `labeling_app/db` alone, and tasks are made and changed by one module."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
DB = ROOT / "labeling_app" / "db"
STATEMENT = re.compile(
    r"\s*(SELECT\s.+\sFROM|SELECT 1|INSERT\s+(OR\s+\w+\s+)?INTO|UPDATE\s+\w+\s+SET|DELETE\s+FROM"
    r"|REPLACE\s+INTO|(CREATE|ALTER|DROP)\s+(TABLE|INDEX|TRIGGER|UNIQUE)|PRAGMA|BEGIN|VACUUM)\b",
    re.DOTALL,
)
CALLS = {"execute", "executemany", "executescript", "query"}


def sources() -> Iterator[Path]:
    for package in ("labeling_app", "policies", "reward", "rlhf"):
        yield from sorted((ROOT / package).rglob("*.py"))


def sql_of(path: Path) -> list[str]:
    """Statements in the strings of a file, and calls that run some."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(v.value) if isinstance(v, ast.Constant) else "x" for v in node.values]
            found += [text for text in ["".join(parts)] if STATEMENT.match(text)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value] if STATEMENT.match(node.value) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found += [f"{node.func.attr}()"] if node.func.attr in CALLS else []
    return found


def test_no_file_outside_db_contains_sql() -> None:
    outside = {
        str(path.relative_to(ROOT)): found
        for path in sources()
        if DB not in path.parents and (found := sql_of(path))
    }
    assert outside == {}
    assert len(sql_of(DB / "tasks.py")) > 20  # or the look for it finds nothing anywhere


def test_tasks_are_made_and_changed_by_one_module() -> None:
    changing = re.compile(r"INSERT\s+INTO\s+tasks\b|UPDATE\s+tasks\b|DELETE\s+FROM\s+tasks\b")
    found = {
        path.name: len(re.findall(r"INSERT\s+INTO\s+tasks\b", path.read_text()))
        for path in sources()
        if changing.search(path.read_text()) and path.parent.name != "files"  # steps of the schema
    }
    assert found == {"tasks.py": 1}
