"""A database on disk and short ways to fill it."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from labeling_app.annotators import passwords as auth
from labeling_app.annotators.users import User
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.store import Store
from labeling_app.quality.report import open_work
from labeling_app.web.lead.frame import LeadFrame
from labeling_app.web.lead.measured import FILTERS, measure
from labeling_app.web.lead.quality import PATH, TEMPLATE
from rlhf.records.schema import Message, Prompt, Ranking, Response, content_id

Result = TypeVar("Result")


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run it in a thread of its own: playwright keeps a loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def build_prompt(text: str, split: str = "train") -> Prompt:
    return Prompt.create((Message(role="user", content=text),), split, "test")


def quality_page(store: Store, *, is_old: bool = False) -> str:
    """The HTML of the page Quality."""
    frame = LeadFrame()
    frame.add_filters(**FILTERS)
    sender = User(name="lea", role="lead", disabled=False, epoch=0)
    values = {
        "measured": measure(store.connections.path),
        "is_old": is_old,
        "work": open_work(store),
        "served": [],
        "alone": [],
    }
    return frame.render(TEMPLATE, sender, PATH, **values)


def build_responses(
    prompt: Prompt, texts: list[str], model: str = "secret-model"
) -> list[Response]:
    return [
        Response(
            id=content_id(prompt.id, model, text),
            prompt_id=prompt.id,
            text=text,
            model=model,
            sample_index=index,
        )
        for index, text in enumerate(texts)
    ]


def build_ranking(prompt_id: str, tiers: Iterable[Iterable[str]], **fields: Any) -> Ranking:
    values = {"id": "r1", "annotator": "ann", "kind": "human", **fields}
    return Ranking(prompt_id=prompt_id, tiers=tuple(map(tuple, tiers)), **values)


def work_of(queue: TaskQueue, name: str) -> list[str]:
    """The prompts that somebody is asked, each ranked in the order shown."""
    queue.add_annotator(name)
    found = []
    while (task := queue.next_task(name)) is not None:
        found.append(task.messages[-1]["content"])
        queue.submit(name, Submission(id=f"{name}{task.id}", task_id=task.id, tiers=((0,), (1,))))
    return found


def fill_up(disk: Path) -> None:
    """Leave no free byte."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"\0" * 4096)
        except OSError:
            return


@pytest.fixture(autouse=True)
def _quick_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A password is hashed at a cost of its own; test_passwords.py is about what it is."""
    monkeypatch.setattr(auth, "COST", auth.Cost(2**4, 8, 1))


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    return build_prompt


@pytest.fixture
def make_responses() -> Callable[..., list[Response]]:
    return build_responses


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "labels.db") as opened:
        yield opened


@pytest.fixture
def queue(store: Store) -> TaskQueue:
    return TaskQueue(store)


@pytest.fixture
def import_lines(
    store: Store, tmp_path: Path, run_json: Callable[..., dict]
) -> Callable[..., dict]:
    """Import lines from `more.jsonl` into the database: the report."""

    def run(*lines: dict) -> dict:
        path = tmp_path / "more.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        return run_json("import", path, "--db", store.connections.path)

    return run


@pytest.fixture
def fill(store: Store) -> Callable[[int, int], list[Prompt]]:
    """Add prompts with that many responses each."""

    def add(num_prompts: int, num_responses: int) -> list[Prompt]:
        prompts = [build_prompt(f"prompt {index}") for index in range(num_prompts)]
        with store.connections.write():
            store.add_prompts(prompts)
            for prompt in prompts:
                texts = [f"{prompt.text}, answer {index}" for index in range(num_responses)]
                store.add_responses(build_responses(prompt, texts))
        return prompts

    return add


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
