"""What the experiments make of their data, and how they measure it."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.evidence.commands import at_once, rlhf
from examples.evidence.human_labels import ethics, people
from rlhf.errors import InputError
from rlhf.records.jsonl import write_jsonl
from rlhf.records.schema import RankedPrompt
from tests.examples.small_experiments import (
    CHANGES,
    load,
    load_record,
    write_chat,
    write_pairs,
    write_passages,
)
from tests.pipeline.loop import write_prompts
from tests.servers.commands import REPOSITORY, free_port

LABEL_TWICE = """
import os
import sys
from functools import partial

import torch

from examples.evidence.commands import at_once, rlhf
from examples.evidence.human_labels import ethics, people

os.sched_getaffinity = lambda process: {0, 1}
torch.cuda.is_available = lambda: False
served = zip(sys.argv[1::2], sys.argv[2::2])
at_once(*(partial(rlhf, "label", "--db", db, "--port", port) for db, port in served))
"""


def test_the_ceiling_is_what_the_best_order_satisfies(monkeypatch: pytest.MonkeyPatch) -> None:
    ceiling = load(monkeypatch, "real_chat").ceiling
    circle = [[0, 1, "first"], [1, 2, "first"], [0, 2, "second"]]  # 0 > 1 > 2 > 0: two of three
    line = [[0, 1, "second"], [1, 2, "first"], [0, 2, "tie"]]
    assert ceiling([circle]) == pytest.approx(2 / 3)
    assert ceiling([circle, line]) == pytest.approx(4 / 5)


def test_dialogues_become_turns_and_unusable_ones_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load(monkeypatch, "real_chat")
    lines = module.read(write_chat(tmp_path / "chat.jsonl.gz"))
    assert [module.is_usable(line, 200) for line in lines] == [True] * 6 + [False] * 2
    assert module.is_usable(lines[6], None)
    found = module.record(lines[0], "test")
    said = [(turn.role, turn.content) for turn in found.prompt.messages]
    assert said == [("user", "Hi"), ("assistant", "Hello."), ("user", "How was trip 0?")]
    [[best], [worst]] = found.rankings[0].tiers
    texts = {response.id: response.text for response in found.responses}
    assert (texts[best], texts[worst]) == ("It was a lovely trip.", "No.")


def test_the_fit_finds_the_curve_it_was_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(monkeypatch, "overoptimization")
    distances = np.array([0.0, 0.5, 1.0, 2.0])
    linear = [{"sqrt_nats": d, "gold": 0.3 + d * (0.8 - 0.2 * d)} for d in distances]
    logarithmic = [
        {"sqrt_nats": d, "gold": 0.3 + (d * (0.8 - 0.2 * np.log(d)) if d else 0)} for d in distances
    ]
    for form, points in (("linear", linear), ("log", logarithmic)):
        found = module.fit(points, 0.3, form)
        assert found == pytest.approx({"alpha": 0.8, "beta": 0.2})
        drawn = [point["gold"] for point in points[1:]]
        assert list(module.curve(distances[1:], 0.3, found, form)) == pytest.approx(drawn)
    assert module.fit(linear[:2], 0.3, "linear") is None


def test_methods_are_compared_at_the_same_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(monkeypatch, "methods")
    runs = [{"nats": 4.0, "gain": 1.0}, {"nats": 1.0, "gain": 0.8}]
    assert module.gain_at(0.5, runs) == pytest.approx(0.4)  # half of the way to the nearer run
    assert module.gain_at(1.5, runs) == pytest.approx(0.9)
    assert module.gain_at(2.0, runs) == pytest.approx(1.0)
    assert module.gain_at(2.1, runs) is None
    assert module.root(-0.01) == 0.0
    result = {
        "methods": {"ppo": {"runs": runs}},
        "best_of_n": [{"n": 1, "nats": 0.0, "gold": 0.5}, {"n": 2, "nats": 1.0, "gold": 0.8}],
    }
    assert module.at_equal_kl(result) == [
        ["gain by the judge at a reverse KL of", "ppo", "best-of-n sampling"],
        ["1 nat", "+0.80", "+0.30"],
        ["4 nats", "+1.00", "–"],
        ["7 nats", "–", "–"],
    ]


def test_the_setting_that_wins_most_within_the_distance_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose = load(monkeypatch, "method_settings").choose
    tried = [
        {"nats_per_token": 0.1, "judge": {"value": 0.6}},
        {"nats_per_token": 0.2, "judge": {"value": 0.7}},
        {"nats_per_token": 0.3, "judge": {"value": 0.9}},
    ]
    assert choose(tried, 0.25) == 1
    assert choose(tried, 0.15) == 0
    assert choose(tried[1:], 0.05) == 0  # none is within it: the nearest


def test_a_proxy_is_asked_about_every_two_answers_that_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accuracy = load(monkeypatch, "overoptimization").accuracy
    gold = np.array([[0.0, 0.1, 1.0], [0.0, 2.0, 1.0], [0.0, 0.0, 0.1]])
    rewards = np.array([[0.0, 5.0, 4.0], [1.0, 2.0, 0.0], [0.0, 1.0, 2.0]])
    # first prompt: one of two right, 0 and 0.1 are as good; second: two of three; third: no pair
    found = accuracy(rewards, gold, 0.1)
    assert found["value"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["n"] == 2


def test_rankings_of_a_prompt_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, record_of = load(monkeypatch, "experiment"), load_record(monkeypatch)
    lines = [{"prompt": p, "responses": ["a", "bb", "ccc", "dddd"], "pairs": []} for p in "pq"]
    asked = [record_of(line, "train") for line in lines]
    ranked = experiment.rank_by_signal(asked, lambda p, text: len(text), size=2, tie_within=0)
    assert len(ranked) == 4
    first, second = experiment.together(ranked[:3])
    assert [len(one.responses) for one in (first, second)] == [4, 2]
    texts = {response.id: response.text for response in first.responses}
    best = [texts[ranking.tiers[0][0]] for ranking in first.rankings]
    assert best == ["bb", "dddd"]
    assert RankedPrompt.from_json(json.loads(json.dumps(first.to_json()))) == first
    named = {one.prompt_id for one in (*first.responses, *first.rankings)}
    assert named == {first.prompt.id}


def test_what_an_ensemble_adds_is_measured_against_its_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose = load(monkeypatch, "ensemble").choose
    gold = np.array([[0.0, 3.0, 2.0]])
    # alone, the members take the third and the first answer; on average the second is best (5 / 2),
    # and so it is by the worse opinion (2)
    rewards = np.array([[[0.0, 3.0, 4.0]], [[3.0, 2.0, -4.0]]])
    found = choose(rewards, gold, 3)
    values = {name: one["value"] for name, one in found.items()}
    assert values == {"single": 1.0, "mean": 2.0, "worst case": 2.0}
    assert choose(rewards[:1], gold, 3)["single"]["value"] == 2.0


def test_labels_and_prompts_of_people_are_apart(tmp_path: Path) -> None:
    config = CHANGES["people"]
    pairs = ethics.read_pairs(str(write_pairs(tmp_path / "pairs.jsonl.gz")))
    assert {split: len(rows) for split, rows in pairs.items()} == dict.fromkeys(ethics.SPLITS, 7)
    assert [ethics.is_bare(row) for row in pairs["A"]] == [False] * 6 + [True]
    firsts = ethics.first_sentences(pairs["heldout"])
    assert firsts == [f"I went to heldout house {n}." for n in range(6)]
    prompts = [record.prompt for record in people.story_prompts(config, firsts)]
    assert [prompt.split for prompt in prompts] == ["train"] * 3 + ["test"] * 2
    turns = [(turn.role, turn.content) for turn in prompts[0].messages]
    assert turns[:2] == [("user", "Continue: I sat."), ("assistant", "I sat. It was warm.")]
    assert turns[2][1].removeprefix("Continue: ") in firsts
    validation = people.story_prompts({**config, "judged_on": "validation"}, firsts)
    assert [record.prompt.split for record in validation] == ["train"] * 3 + ["test"]
    assert not {one.prompt.id for one in validation[3:]} & {one.id for one in prompts}
    twice = [pairs["A"][0], {**pairs["A"][0], "rejected": "I went to A house 0. It rained."}]
    [record] = ethics.as_records(config, twice, "train")
    texts = {response.id: response.text for response in record.responses}
    assert [[texts[one] for (one,) in ranking.tiers] for ranking in record.rankings] == [
        [pair["chosen"], pair["rejected"]] for pair in twice
    ]
    assert len(texts) == 3


def test_passages_become_lines_of_text(tmp_path: Path) -> None:
    passages = write_passages(tmp_path / "passages.jsonl.gz")
    lines = people.write_texts(passages, tmp_path / "texts.txt").read_text().splitlines()
    assert [line[:8] for line in lines] == ["A river ", "It is wi"]  # no title, each once
    with pytest.raises(InputError, match=r"No such texts: missing\.gz"):
        people.write_texts(Path("missing.gz"), tmp_path / "texts.txt")


def test_noise_turns_training_rankings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load(monkeypatch, "experiment")
    record_of = load_record(monkeypatch)
    lines = [{"prompt": f"p{n}", "responses": ["a", "b"], "pairs": [[0, 1, "first"]]} for n in "ab"]
    records = [record_of(lines[0], "train"), record_of(lines[1], "test")]
    turned = experiment.with_noise(records, 1.0, seed=0)
    before, after = records[0].rankings[0].tiers, turned[0].rankings[0].tiers
    assert after == before[::-1]
    assert turned[1] == records[1]


def test_a_thumb_is_one_answer_and_a_pair_two_that_are_clearly_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, record_of = load(monkeypatch, "thumbs"), load_record(monkeypatch)
    line = {"prompt": "p", "responses": ["a", "bb", "ccc", "dddddd"], "pairs": []}
    records = [record_of({**line, "prompt": p}, "train") for p in "pqrstuvw"]
    flat = record_of({**line, "responses": ["a", "b", "cc"]}, "train")

    def length(prompt: str, text: str) -> float:
        return len(text)

    assert module.median_score(records[:1], length) == 2.5
    dice = np.random.default_rng(0)
    for record in records:
        texts = {response.id: response.text for response in record.responses}
        [thumb] = module.thumb(record, length, 2.5, dice).rankings
        [[answer]] = thumb.tiers
        assert thumb.flags == ("thumbs-up" if len(texts[answer]) > 2.5 else "thumbs-down",)
        [[better], [worse]] = module.pair(record, length, 2, dice).rankings[0].tiers
        assert len(texts[better]) > len(texts[worse]) + 2
    assert module.pair(flat, length, 2, dice) is None
    with pytest.raises(InputError, match="9 judgements are wanted and 8 prompts can be judged"):
        module.judge([*records, flat], 9, lambda r, d: module.pair(r, length, 2, d), 0)


def test_pairs_apart_say_what_they_said_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = load(monkeypatch, "pairs").apart
    experiment, record_of = load(monkeypatch, "experiment"), load_record(monkeypatch)
    line = {"prompt": "p", "responses": ["long one", "b", "cc"], "pairs": []}
    [ranked] = experiment.rank_by_signal(
        [record_of(line, "train")], lambda prompt, text: len(text), size=3, tie_within=1
    )
    texts = {response.id: response.text for response in ranked.responses}
    said = {
        tuple(tuple(texts[i] for i in tier) for tier in one.rankings[0].tiers)
        for one in apart([ranked])
    }
    best, tie = ("long one",), ("b", "cc")
    assert {tuple(map(lambda t: tuple(sorted(t)), one)) for one in said} == {
        (best, ("b",)),
        (best, ("cc",)),
        (tie,),
    }


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_parts_wait_for_each_other_and_return_in_order(two_cores: None) -> None:
    both = threading.Barrier(2, timeout=60)

    def part(name: str) -> tuple[str, bool]:
        both.wait()  # passes only where two are at work
        return name, threading.current_thread() is threading.main_thread()

    found = at_once(*(partial(part, name) for name in "abcd"))
    assert found == [(name, False) for name in "abcd"]


def test_on_one_core_parts_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    found = at_once(threading.current_thread, threading.current_thread)
    assert found == [threading.main_thread()] * 2


def test_commands_of_parts_have_processes_of_their_own(two_cores: None, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    databases = [tmp_path / f"{name}.db" for name in "ab"]
    began = children_seconds()
    found = at_once(*(partial(rlhf, "import", prompts, "--db", db) for db in databases))
    assert [one["db"] for one in found] == [str(db) for db in databases]
    assert children_seconds() > began


@pytest.mark.parametrize("first", [True, False])
def test_where_one_part_fails_the_others_are_stopped(
    two_cores: None, tmp_path: Path, first: bool
) -> None:
    port, begun = free_port(), []

    def fail() -> None:
        wait_until_it_listens(port)
        raise ValueError("no such data")

    db = tmp_path / "labels.db"
    import_pair(db)
    serve = partial(rlhf, "label", "--db", db, "--port", port)
    parts = (fail, serve) if first else (serve, fail)
    with pytest.raises(ValueError, match="no such data"):
        at_once(*parts, partial(begun.append, "third"))
    assert not commands_on(tmp_path)
    assert not begun


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_kill_takes_the_commands_with_it(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    served: list[str] = []
    for port in ports:
        import_pair(tmp_path / f"{port}.db")
        served += [str(tmp_path / f"{port}.db"), str(port)]
    with subprocess.Popen([sys.executable, "-c", LABEL_TWICE, *served], cwd=REPOSITORY) as process:
        for port in ports:
            wait_until_it_listens(port)
        assert len(commands_on(tmp_path)) == 2
        process.kill()
    deadline = time.monotonic() + 60
    while left := commands_on(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def import_pair(db: Path) -> None:
    """The least that can be labeled."""
    write_jsonl(db.with_suffix(".jsonl"), [{"prompt": "Why?", "chosen": "So.", "rejected": "No."}])
    rlhf("import", db.with_suffix(".jsonl"), "--db", db)


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wait_until_it_listens(port: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def commands_on(folder: Path) -> list[str]:
    """The running `rlhf` commands whose words name a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_text().split("\0")
        except OSError:  # it has ended
            continue
        if "rlhf.cli" in words and any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found
