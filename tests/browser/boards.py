"""Prompts to rank, a board as a browser shows it, and what the database holds of it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page
from sqlite_utils import Database

MODEL = "secret-model-7b"
# where a page takes it for HTML, it runs
RUNS = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def line(prompt: str, texts: list[str]) -> dict:
    return {"prompt": prompt, "responses": [{"text": text, "model": MODEL} for text in texts]}


FOUR = [line(f"question {n}", [f"answer {n}{x}" for x in "pqrs"]) for n in range(8)]


def wait_for_task(page: Page, text: str = "") -> None:
    page.wait_for_selector(f".rb-prompt:has-text('{text}')")
    page.wait_for_selector(".rb-list .rb-card")


def on_screen(page: Page) -> list[tuple[str, str]]:
    """(rank, text) of every ranked card, from top to bottom."""
    return [
        (card.query_selector(".rb-rank").inner_text(), card.query_selector(".rb-text").inner_text())
        for card in page.query_selector_all(".rb-list .rb-card")
    ]


def wait_for_rest(page: Page) -> None:
    """Wait until the cards of the last move have come to rest."""
    moving = "document.querySelector('.rb').getAnimations({subtree: true}).length"
    page.wait_for_function(f"{moving} === 0")


@contextmanager
def database(path: Path) -> Iterator[Database]:
    db = Database(path)
    try:
        yield db
    finally:
        db.close()


def in_database(path: Path) -> list[dict]:
    """Every live ranking with texts in place of ids."""
    with database(path) as db:
        texts = {row["id"]: row["text"] for row in db["responses"].rows}
        found = []
        for row in db.query("SELECT * FROM rankings WHERE live = 1 ORDER BY seq"):
            row["tiers"] = [[texts[i] for i in tier] for tier in json.loads(row["tiers"])]
            row["shown"] = [texts[i] for i in json.loads(row["shown"])]
            row["flags"] = [
                f"{flag}@{texts[i]}" if i else flag
                for flag, _, i in (item.partition("@") for item in json.loads(row["flags"]))
            ]
            found.append(row)
        return found


def tiers_on_screen(page: Page) -> list[list[str]]:
    tiers: dict[str, list[str]] = {}
    for rank, text in on_screen(page):
        tiers.setdefault(rank, []).append(text)
    return list(tiers.values())
