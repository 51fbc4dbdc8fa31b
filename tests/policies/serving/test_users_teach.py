"""Thumbs of a thousand users of an app train a reward model, and the next users like more of it."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labeling_app.db.store import Store
from policies.serving.thumbs.comparison import compare_thumbs
from rlhf.cli import main
from rlhf.run.rundir import RunDir
from tests.servers.chat import ChatServer
from tests.servers.commands import run_process
from tests.servers.served_policy import ServedPolicy, served_policy

PLACES = ["trip", "house", "garden", "train", "hotel", "music", "dog", "meeting"]
PEOPLE = ["sister", "friend", "boss", "teacher", "doctor"]
CHEERFUL = ["lovely", "warm and kind", "happy", "a joy"]
GLOOMY = ["awful", "cold and sad", "late", "a pity"]
USERS, LATER_USERS = 1000, 200
SLIPS = 0.1  # the share of thumbs that people give by mistake


class MoodyServer(ChatServer):
    """Answers cheerfully or gloomily, by chance."""

    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__()
        self.streams = False
        words = random.Random(0).choices([*CHEERFUL, *GLOOMY], k=4999)
        self.answers = [f"It was {word}." for word in words]


def judge(server: ServedPolicy, users: range) -> tuple[int, int]:
    """Each user asks a question and gives a thumb: how many answers were cheerful and gloomy.

    People like cheerful answers, and one in ten gives the wrong thumb.
    """
    counts, lock = [0, 0], threading.Lock()

    def use(user: int) -> None:
        chance = random.Random(user)
        question = f"How was the {chance.choice(PLACES)} of the {chance.choice(PEOPLE)}?"
        said = server.ask(question)
        is_cheerful = any(w in said["choices"][0]["message"]["content"] for w in CHEERFUL)
        likes = is_cheerful != (chance.random() < SLIPS)
        thumb = {"id": said["id"], "thumbs": "up" if likes else "down"}
        assert server.post("/feedback", thumb).status_code == 201
        with lock:
            counts[not is_cheerful] += 1

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(use, users))
    return counts[0], counts[1]


@pytest.mark.slow
def test_a_thousand_users_teach_a_reward_model(tiny_model: Path, tmp_path: Path) -> None:
    db, later_db, out = tmp_path / "labels.db", tmp_path / "later.db", tmp_path / "reward"
    with MoodyServer() as upstream:
        with served_policy("--endpoint", upstream.url, "--db", db) as server:
            before = judge(server, range(USERS))
        with Store(db) as store:
            assert store.counts()["rankings"] == USERS
        rankings = tmp_path / "rankings"
        assert main(["export", "--db", str(db), "--out", str(rankings)]) == 0
        training = ["train-reward", "--rankings", str(rankings), "--model", str(tiny_model)]
        training += ["--out", str(out), "--epochs", "3", "--learning-rate", "3e-3"]
        done = run_process(*training, "--adapter", "none", "--precision", "fp32")
        assert done.returncode == 0, done.stderr
        report = RunDir(out).read_report()
        best_of = ("--best-of", "4", "--reward", out, "--precision", "fp32")
        with served_policy("--endpoint", upstream.url, "--db", later_db, *best_of) as server:
            after = judge(server, range(USERS, USERS + LATER_USERS))
    accuracy = report["judgements"]["thumbs"]["accuracy"]["value"]
    assert accuracy > 0.75  # of 103 held-out thumbs, of which one in ten is wrong
    found = compare_thumbs({"policy": after, "against": before})
    assert found["against"]["rate"] == pytest.approx(0.5, abs=0.05)
    assert found["policy"]["rate"] > 0.85  # 1 - 1/2⁴ with a perfect reward
    assert found["better"] == "policy"
