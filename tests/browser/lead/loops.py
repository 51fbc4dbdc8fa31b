"""Settings files and databases of loops for the tests of the Runs page."""

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from labeling_app.annotators.users import Users
from labeling_app.db.store import Store
from rlhf.cli import main
from tests.browser.conftest import App
from tests.browser.lead.pages import PASSWORD, SECONDS
from tests.pipeline.loop import write_prompts

OpenAs = Callable[..., Page]
PEOPLE = {"lea": "lead", "ann": "annotator"}
STAGES = """
stages:
  generate: {k: 2, max_new_tokens: 12, precision: fp32}
  round: {precision: fp32}
  train-reward: {precision: fp32}
  reference: {sampling: {samples: 2, max_new_tokens: 12}, precision: fp32}
  ppo: {steps: 2, batch: {episodes_per_step: 4}, precision: fp32}
  evaluate: {precision: fp32, samples: 2}
"""


def write_loop(folder: Path, model: Path | str, *lines: str) -> Path:
    """The settings file of a loop, and twelve prompts to import."""
    write_prompts(folder / "prompts.jsonl")
    top = [f"out: {folder}/out", f"model: {model}", *lines]
    file = folder / "loop.yaml"
    file.write_text("\n".join(top) + STAGES, encoding="utf-8")
    return file


def fill(folder: Path) -> None:
    """Make the database of the loop in a folder, with people and the prompts."""
    db = folder / "out" / "labels.db"
    db.parent.mkdir(exist_ok=True)
    assert main(["import", str(folder / "prompts.jsonl"), "--db", str(db)]) == 0
    add_people(db, "lea", "ann")


def add_people(db: Path, *names: str) -> None:
    with Store(db) as store:
        for name in names:
            Users(store).add(name, PEOPLE[name], PASSWORD)


def serve(file: Path, *arguments: str, kind: type[App] = App) -> App:
    return kind(file.parent / "out" / "labels.db", "--loop", str(file), *arguments)


def wait_for_status(page: Page, words: str) -> None:
    expect(page.locator(".status")).to_contain_text(words, timeout=1000 * SECONDS)
