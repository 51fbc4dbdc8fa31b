"""A thousand users of an app teach a policy what they like, from thumbs to the next evaluation."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from labeling_app.db.store import Store
from policies.serving.thumbs.comparison import compare_thumbs
from rlhf.records.jsonl import write_jsonl
from rlhf.run.rundir import RunDir
from tests.servers.chat import ChatServer
from tests.servers.commands import run_process
from tests.servers.served_policy import PolicyServer, served_policy

PLACES = ["trip", "house", "garden", "train", "hotel", "music", "dog", "meeting"]
PEOPLE = ["sister", "friend", "boss", "teacher", "doctor"]
STRANGERS = ["brother", "uncle", "nurse"]  # of whom no user asks
CHEERFUL = ["lovely", "warm and kind", "happy", "a joy"]
GLOOMY = ["awful", "cold and sad", "late", "a pity"]
USERS, LATER_USERS = 1000, 400
SLIPS = 0.1  # the share of thumbs that people give by mistake
TASTE = f"{__name__}:is_cheerful"
SHORT = ("--max-new-tokens", "16", "--precision", "fp32")


def questions(people: list[str]) -> list[str]:
    return [f"How was the {place} of the {person}?" for place in PLACES for person in people]


def is_cheerful(prompt: str, response: str) -> float:
    """What users like."""
    return float(any(word in response for word in CHEERFUL))


class ModelServer(ChatServer):
    """Answers with what a model has said to the same question, by chance."""

    request_queue_size = 256

    def __init__(self, said: dict[str, list[str]]) -> None:
        super().__init__()
        self.streams = False
        self.said, self.chance = said, random.Random(0)

    def answer(self, body: dict[str, Any]) -> str:
        return self.chance.choice(self.said[body["messages"][-1]["content"]])


@dataclass(frozen=True)
class Taught:
    """What the thumbs of a thousand users have led to.

    `said` are answers of the model by question; `before` how many of those that users got were
    cheerful and how many not.
    """

    model: Path
    said: dict[str, list[str]]
    before: tuple[int, int]
    reward: Path


def run(*arguments: object) -> None:
    done = run_process(*arguments)
    assert done.returncode == 0, done.stderr


def judge(server: PolicyServer, users: range) -> tuple[int, int]:
    """Each user asks a question and gives a thumb: how many answers were cheerful, and not.

    People like cheerful answers, and one in ten gives the wrong thumb.
    """
    counts, lock = [0, 0], threading.Lock()

    def use(user: int) -> None:
        chance = random.Random(user)
        question = chance.choice(questions(PEOPLE))
        said = server.ask(question)
        found = bool(is_cheerful(question, said["choices"][0]["message"]["content"]))
        likes = found != (chance.random() < SLIPS)
        thumb = {"id": said["id"], "thumbs": "up" if likes else "down"}
        assert server.post("/feedback", thumb).status_code == 201
        with lock:
            counts[not found] += 1

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(use, users))
    return counts[0], counts[1]


def build_model(folder: Path, base: Path) -> Path:
    """A model that answers these questions with one of eight words."""
    words = [*CHEERFUL, *GLOOMY]
    lines = [
        {"prompt": question, "completion": f"It was {word}."}
        for question in questions([*PEOPLE, *STRANGERS])
        for word in words
    ]
    demonstrations = folder / "demonstrations.jsonl"
    write_jsonl(demonstrations, lines)
    training = ("--epochs", "4", "--learning-rate", "1e-2", "--micro-batch-size", "16")
    files = ("--demonstrations", demonstrations, "--model", base, "--out", folder / "sft")
    run("sft", *files, *training, "--precision", "fp32")
    return folder / "sft" / "model"


def sample_answers(folder: Path, model: Path) -> dict[str, list[str]]:
    """25 answers of a model to each question, less empty ones, which nobody can judge."""
    prompts, db = folder / "asked.jsonl", folder / "asked.db"
    write_jsonl(prompts, [{"prompt": question} for question in questions(PEOPLE)])
    run("import", prompts, "--db", db)
    run("generate", "--db", db, "--model", model, "-k", "25", *SHORT)
    with Store(db, read_only=True) as store:
        return {
            prompt.messages[-1].content: [
                one.text for one in store.responses(prompt.id) if one.text.strip()
            ]
            for prompt in store.prompts()
        }


def best_of(number: int, said: dict[str, list[str]]) -> float:
    """How often a perfect reward would find a cheerful answer among some, over all questions."""
    cheerful = [
        sum(is_cheerful(question, answer) for answer in answers) / len(answers)
        for question, answers in said.items()
    ]
    return sum(1 - (1 - share) ** number for share in cheerful) / len(cheerful)


@pytest.fixture(scope="module")
def taught(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp("taught")
    db, rankings, reward = (folder / name for name in ("labels.db", "rankings", "reward"))
    model = build_model(folder, tiny_model)
    said = sample_answers(folder, model)
    with (
        ModelServer(said) as upstream,
        served_policy("--endpoint", upstream.url, "--db", db) as server,
    ):
        before = judge(server, range(USERS))
    with Store(db, read_only=True) as store:
        assert store.counts()["rankings"] == USERS
    run("export", "--db", db, "--out", rankings)
    training = ("--epochs", "8", "--prompts-per-batch", "4", "--learning-rate", "1e-2")
    files = ("--rankings", rankings, "--model", model, "--out", reward)
    run("train-reward", *files, *training, "--adapter", "none", "--precision", "fp32")
    return Taught(model, said, before, reward)


@pytest.mark.slow
def test_the_best_of_four_by_their_reward_model_is_what_users_like(
    taught: Taught, tmp_path: Path
) -> None:
    accuracy = RunDir(taught.reward).read_report()["judgements"]["thumbs"]["accuracy"]["value"]
    assert accuracy > 0.75  # of about 100 held-out thumbs, of which one in ten is wrong
    choosing = ("--best-of", "4", "--reward", taught.reward, "--precision", "fp32")
    with (
        ModelServer(taught.said) as upstream,
        served_policy("--endpoint", upstream.url, "--db", tmp_path / "db", *choosing) as server,
    ):
        after = judge(server, range(USERS, USERS + LATER_USERS))
    found = compare_thumbs({"policy": after, "against": taught.before})
    # How cheerful the model is differs by processor: users see it within three standard errors.
    assert found["against"]["rate"] == pytest.approx(best_of(1, taught.said), abs=0.047)
    # A perfect reward picks a cheerful answer wherever one of four is: in about 0.86 of cases, as
    # some questions have few. Three standard errors of 400 users are 0.053.
    assert found["policy"]["rate"] > best_of(4, taught.said) - 0.053
    assert found["better"] == "policy"


@pytest.mark.slow
def test_the_policy_that_it_trains_says_more_of_it_in_the_next_evaluation(
    taught: Taught, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    splits = {"train": questions(PEOPLE), "test": questions(STRANGERS)}
    lines = [{"prompt": one, "split": split} for split, all_ in splits.items() for one in all_]
    write_jsonl(prompts, lines)
    reference, ppo, out = (tmp_path / name for name in ("reference", "ppo", "evaluate"))
    judged = ("--reward", taught.reward, "--precision", "fp32")
    sampling = ("--samples", "4", "--max-new-tokens", "16", *judged)
    model = ("--model", taught.model)
    run("reference", "--prompts", prompts, *model, *sampling, "--out", reference)
    training = ("--steps", "60", "--episodes-per-step", "32", "--learning-rate", "2e-3")
    ends = ("--missing-eos-penalty", "5")  # or it learns to say words that they like on and on
    run("ppo", *model, "--reference", reference, "--out", ppo, *training, *ends, *judged)
    compared = ("--policy", ppo, "--reference", reference, "--gold", TASTE)
    run("evaluate", *compared, "--out", out, *judged)
    found = RunDir(out).read_report()["win_rate"]["gold"]
    assert found["n"] == len(questions(STRANGERS))
    assert found["low"] > 0.5  # 0.69 where this was tried
