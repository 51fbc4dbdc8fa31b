"""Imports of many preferences, and what a database holds of them."""

from labeling_app.db.store import Store
from rlhf.records.schema import Ranking
from tests.labeling_app.conftest import build_prompt, build_responses

TABLES = ("prompts", "responses", "rankings", "annotators", "tasks", "imports", "import_tasks")


def lines(count: int, start: int = 0) -> list[dict]:
    """That many lines, each of a prompt with a preference by eve."""
    return [
        {"prompt": f"imported {n}", "chosen": "yes", "rejected": "no", "annotator": "eve"}
        for n in range(start, start + count)
    ]


def stored(store: Store) -> dict[str, int]:
    """How many rows there are, seen or not."""
    db = store.connections.db
    return {one: db.execute(f"SELECT COUNT(*) FROM {one}").fetchone()[0] for one in TABLES}


def require_whole(store: Store, num_prompts: int, *, num_open: int = 0) -> None:
    """That so many preferences are there, counted, each in its task, and nothing else.

    Those of an import leave nothing to rank.
    """
    counts = store.counts()
    assert counts == {
        "prompts": num_prompts,
        "responses": 2 * num_prompts,
        "rankings": num_prompts,
        "tasks": num_prompts,
        "open": num_open,
    }
    found = stored(store)
    assert {name: found[name] for name in ("prompts", "responses", "rankings", "tasks")} == {
        name: counts[name] for name in ("prompts", "responses", "rankings", "tasks")
    }
    assert found["import_tasks"] == 0
    assert store.connections.db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert store.connections.db.execute("PRAGMA foreign_key_check").fetchall() == []


def add(store: Store, text: str, import_id: int) -> str:
    """One prompt with two responses and a ranking by eve, as an import stores them."""
    prompt = build_prompt(text)
    best, worst = build_responses(prompt, ["yes", "no"])
    judged = Ranking(
        id=f"r {text}", prompt_id=prompt.id, annotator="eve", kind="human",
        tiers=((best.id,), (worst.id,)),
    )  # fmt: skip
    store.add_prompts([prompt], import_id=import_id)
    store.add_responses([best, worst], import_id=import_id)
    store.add_rankings([judged], import_id=import_id)
    return prompt.id
