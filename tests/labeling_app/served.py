"""Answers of served policies, and what people said of them."""

from labeling_app.data_io.served import store_served_feedback
from labeling_app.db.answers.served import insert_served, start_comparison
from labeling_app.db.store import Store
from rlhf.records.schema import Response, content_id
from rlhf.records.served import ServedResponse
from tests.labeling_app.conftest import build_prompt

# of the section of the page Quality that compares them
TITLE = "What people like better in use"


def build_served(name: str, text: str = "Hello!", question: str = "Hi?", **more) -> ServedResponse:
    """The answer of a policy to a question, kept under a name."""
    prompt = build_prompt(question)
    response = Response(
        id=content_id("served", name), prompt_id=prompt.id, text=text, model="runs/a"
    )
    fields = {"id": name, "conversation": name, "variant": "policy", **more}
    return ServedResponse(prompt=prompt, response=response, **fields)


def serve_and_judge(store: Store, other: str, **thumbs: tuple[int, int]) -> None:
    """A comparison at a share of 10 %, with thumbs up and down of both policies."""
    sides = {"policy": "runs/<new>", "against": other}
    number = start_comparison(store.connections, sides, 0.1)
    for variant, (up, down) in thumbs.items():
        for place in range(up + down):
            name = f"{number}-{variant}-{place}"
            served = build_served(name, variant=variant, comparison=number)
            insert_served(store.connections.db, served)
            said = "up" if place < up else "down"
            store_served_feedback(store, "shop", {"id": name, "thumbs": said})
