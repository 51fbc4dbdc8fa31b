"""Where the queue goes on for a person is where a look at every task says it does."""

import random

from labeling_app.annotators.users import Users
from labeling_app.db.board.overlap import set_another_below, set_overlap
from labeling_app.db.board.queue_position import first_in_queue
from labeling_app.db.people.sources import give_source
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.rankings import num_done
from labeling_app.db.tasks import open_tasks, set_priorities
from rlhf.records.schema import Message, Prompt
from tests.labeling_app.conftest import build_responses

PEOPLE = ("ann", "bob", "cem")
SOURCES = ("news", "law")
TIERS = (((0,), (1,)), ((1,), (0,)))


def add_prompt(store, source: str, number: int) -> None:
    messages = (Message(role="user", content=f"{source} {number}"),)
    prompt = Prompt.create(messages, "train", source)
    store.add_prompts([prompt])
    store.add_responses(build_responses(prompt, ["a", "b"]))


def looked_for(store, name: str, source: str | None) -> tuple[float, int] | None:
    """The next task by a look at every one."""
    db = store.connections.db
    query = "SELECT task_id FROM assignments WHERE annotator = ? AND state <> 'expired'"
    had = {task_id for (task_id,) in db.execute(query, [name])}
    tasks = [
        (-row["priority"], row["id"])
        for row in db.query("SELECT * FROM tasks")
        if row["open"] > 0
        and row["only_for"] is None
        and row["purpose"] in ("rank", "compare")
        and row["reserved"] == source
        and row["id"] not in had
    ]
    return (-min(tasks)[0], min(tasks)[1]) if tasks else None


def counted(store, name: str) -> int:
    query = "SELECT COUNT(*) FROM rankings WHERE annotator = ? AND live = 1 AND task_id > 0"
    return store.connections.db.execute(query, [name]).fetchone()[0]


def test_everybody_goes_on_at_the_first_task_left_for_them(store, queue):
    chance = random.Random(0)
    late = TaskQueue(store, lease_seconds=-1.0)
    Users(store).add("lea", "lead", "long enough")
    for name in PEOPLE:
        queue.add_annotator(name)
    set_overlap(store.connections, 2)
    set_another_below(store.connections, 0.9)

    def rank(name: str, number: int) -> None:
        task = queue.next_task(name)
        if task:
            tiers = chance.choice(TIERS)
            queue.submit(name, Submission(id=f"r{number}", task_id=task.id, tiers=tiers))

    def skip(name: str, number: int) -> None:
        task = queue.next_task(name)
        if task:
            queue.skip(name, skip_id=f"s{number}", task_id=task.id, reason="", note="")

    def reorder(name: str, number: int) -> None:
        tasks = [task_id for task_id, *_ in open_tasks(store.connections)]
        chosen = chance.sample(tasks, len(tasks) // 3)
        set_priorities(store.connections, [(task_id, "") for task_id in chosen])

    operations = {
        rank: 20,
        skip: 4,
        lambda name, number: late.next_task(name): 4,  # a lease that nobody uses
        lambda name, number: queue.undo(name): 2,
        lambda name, number: add_prompt(store, chance.choice(SOURCES), number): 8,
        reorder: 1,
        lambda name, number: set_overlap(store.connections, chance.choice((1, 2, 3))): 1,
        lambda name, number: give_source(
            store.connections, "law", chance.sample(PEOPLE, chance.choice((0, 1, 2)))
        ): 1,
    }
    for number in range(400):
        [operation] = chance.choices(list(operations), list(operations.values()))
        operation(chance.choice(PEOPLE), number)
        for name in PEOPLE:
            assert num_done(store.connections, name) == counted(store, name)
            for source in (None, *SOURCES):
                with store.connections.write() as db:
                    found = first_in_queue(db, name, source)
                assert found == looked_for(store, name, source), (number, name, source)
    assert min(num_done(store.connections, name) for name in PEOPLE) > 30
