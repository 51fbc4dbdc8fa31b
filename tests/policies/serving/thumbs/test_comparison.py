"""What thumbs say about two policies, at `rlhf status --db`."""

import json
import time
from pathlib import Path

import pytest

from labeling_app.data_io.served import store_served_feedback
from labeling_app.db.answers.served import forget_served, insert_served, start_comparison
from labeling_app.db.store import Store
from policies.serving.thumbs.comparison import compare_thumbs
from rlhf.cli import main
from rlhf.commands.runs.status import describe_comparison
from rlhf.records.schema import Message, Prompt, Response, content_id
from rlhf.records.served import ServedResponse
from tests.labeling_app.served import build_served
from tests.policies.serving.thumbs.evidence import independent_evidence

NAMES = {"policy": "runs/new", "against": "base"}


def named(**thumbs: tuple[int, int]) -> dict:
    found = compare_thumbs(thumbs)
    for side, name in NAMES.items():
        found[side]["name"] = name
    return found


def test_rates_difference_and_p_value():
    found = compare_thumbs({"policy": (60, 40), "against": (30, 70)})
    assert found["policy"] == {"up": 60, "down": 40, "rate": 0.6}
    assert found["difference"]["value"] == pytest.approx(0.3)
    assert found["p_value"] == pytest.approx(1 / independent_evidence(60, 40, 30, 70), rel=1e-6)
    low, high = found["difference"]["low"], found["difference"]["high"]
    assert 0 < low < 0.3 < high < 1
    assert found["better"] == "policy"
    other = compare_thumbs({"policy": (30, 70), "against": (60, 40)})
    assert other["better"] == "against"
    assert other["difference"]["low"] == pytest.approx(-high)
    assert compare_thumbs({"policy": (3, 1), "against": (1, 3)})["better"] is None
    json.dumps(found, allow_nan=False)


def test_in_words():
    assert describe_comparison(named(policy=(60, 40), against=(30, 70))).splitlines() == [
        "runs/new: 100 thumbs, 60 % up",
        "base: 100 thumbs, 30 % up",
        "Difference +30 points (95 % interval +8 to +51, which holds whenever you look).",
        "People like runs/new better.",
    ]
    assert describe_comparison(named(policy=(1, 0), against=(0, 1))).splitlines()[-1] == (
        "Which one people like better is not known yet."
    )
    assert describe_comparison(named(policy=(1, 0), against=(0, 0))).splitlines() == [
        "runs/new: 1 thumb, 100 % up",
        "base: 0 thumbs",
        "No comparison yet: one of them has no thumbs.",
    ]


def test_status_shows_every_comparison(tmp_path: Path, capsys, refused):
    db = tmp_path / "labels.db"
    with Store(db) as store:
        number = start_comparison(store.connections, NAMES, 0.1)
        for side, ups in (("policy", 7), ("against", 2)):
            for place in range(10):
                prompt = Prompt.create((Message(role="user", content="Hi?"),), "train", "served")
                name = f"{side}-{place}"
                response = Response(
                    id=content_id(name), prompt_id=prompt.id, text="Hello!", model="m"
                )
                served = ServedResponse(
                    id=name, conversation=name, variant=side, prompt=prompt, response=response,
                    comparison=number,
                )  # fmt: skip
                insert_served(store.connections.db, served)
                thumbs = "up" if place < ups else "down"
                store_served_feedback(store, "app", {"id": name, "thumbs": thumbs})
    assert main(["status", "--db", str(db)]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "runs/new: 10 thumbs, 70 % up",
        "base: 10 thumbs, 20 % up",
        "Difference +50 points (95 % interval -55 to +100, which holds whenever you look).",
    ]
    assert main(["status", "--db", str(db), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["comparisons"]
    assert (found["share"], found["policy"]["up"], found["against"]["down"]) == (0.1, 7, 8)
    assert "--full has no effect without a run" in refused("status", "--db", db, "--full")
    assert "No label database at" in refused("status", "--db", tmp_path / "none.db")
    with Store(tmp_path / "ranked.db") as store:
        prompts = [
            Prompt.create((Message(role="user", content=words),), "train", "") for words in "ab"
        ]
        store.add_prompts(prompts)
        store.add_responses(
            Response(id=f"{n}{text}", prompt_id=prompt.id, text=text, model="m")
            for n, prompt in enumerate(prompts)
            for text in ("x", "y")
        )
    assert main(["status", "--db", str(tmp_path / "ranked.db")]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path / 'ranked.db'} holds 2 prompts, 4 responses and 0 rankings; 2 of 2 tasks are "
        "open.\nNo response is of a served policy: rlhf serve --policy RUN --db "
        f"{tmp_path / 'ranked.db'}\n"
    )


def test_status_shows_a_policy_that_is_served_alone(tmp_path: Path, capsys):
    db = tmp_path / "labels.db"
    with Store(db) as store:
        for place in range(11):
            insert_served(store.connections.db, build_served(f"c-{place}"))
        for place in range(10):
            said = {"id": f"c-{place}", "thumbs": "up" if place < 8 else "down"}
            store_served_feedback(store, "app", said)
        forget_served(store.connections, time.time() + 60)  # what was counted stays
        insert_served(store.connections.db, build_served("c-11"))
    assert main(["status", "--db", str(db)]) == 0
    # Wilson's interval for 8 of 10 by the table of Newcombe (1998).
    assert capsys.readouterr().out == (
        "runs/a: 12 responses, 8 thumbs up, 2 down, 80 % (95 % interval 49–94 %) up\n"
    )
    assert main(["status", "--db", str(db), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["served"]
    assert (found["model"], found["responses"], found["up"], found["down"]) == ("runs/a", 12, 8, 2)
