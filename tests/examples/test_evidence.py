"""Every experiment runs at the smallest size; the pages have the numbers of its results."""

import gzip
import json
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlhf.errors import InputError
from rlhf.records.schema import RankedPrompt
from tests.pipeline.loop import SIGNAL, write_prompts
from tests.servers.commands import REPOSITORY

EVIDENCE = REPOSITORY / "examples" / "evidence"
PAGES = "\n".join(page.read_text(encoding="utf-8") for page in sorted(EVIDENCE.glob("*.md")))
FOLDERS = {one.stem: one.parent for one in EVIDENCE.glob("*/*.py") if one.stem != "heads"}
NAMES = sorted(FOLDERS)
SAMPLING = {"max_new_tokens": 8, "precision": "fp32"}
PPO = {"episodes_per_step": 4, "precision": "fp32", "save_every": 100}
FITTED = {"head": "fitted", "epochs": 0, "precision": "fp32"}
TRL = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 1,
    "learning_rate": 1e-5,
    "bf16": False,
}
SMALL = {
    "ranking_size": 2,
    "tie_within": 0.0,
    "rankings": 6,
    "sampling": {"k": 4, **SAMPLING},
    "reference": {"samples": 2, **SAMPLING},
    "evaluate": {"samples": 1, "precision": "fp32"},
    "seed": 0,
    "seeds": [0],
    "reward": FITTED,
    "ppo": {"steps": 1, **PPO},
}
STORIES = {"question": "Begin with: {}", "turns": []}
CHANGES = {
    "overoptimization": {
        "train_prompts": 4,
        "rankings": [4, 8],
        "steps": [1, 2],
        "ppo": PPO,
        "score": {"precision": "fp32"},
    },
    "pairs": {"epochs": [1], "prompts_per_batch": 2, "reward": {"precision": "fp32"}},
    "thumbs": {"judgements": 4, "head": FITTED},
    "shaping": {"shapings": ["none", "par"]},
    "ensemble": {"score": {"precision": "fp32"}, "seeds": [0, 1], "noise": [0.0, 0.5], "n": [1, 4]},
    "real_chat": {
        "sets": {
            "chat": {"data": "chat.jsonl.gz", "train": 3, "test": 2, "max_characters": 200},
            "long answers": {"data": "data.jsonl.gz", "train": 3, "test": 2},
        },
        "trained": {"the head": FITTED, "all weights": {"precision": "fp32"}},
    },
    "alternatives": {"dpo": {**TRL, "beta": 0.1}, "sft": TRL, "best_of": 3},
    "people": {
        "question": "Continue: {}",
        "turns": [["I sat.", "I sat. It was warm."]],
        "pairs": 3,
        "test": 2,
        "validation": 1,
        "judged_on": "test",
        "steps": [2],
        "score": {"precision": "fp32"},
    },
    "methods": {
        "question": "Continue: {}",
        "turns": [],
        "pairs": 3,
        "test": 2,
        "validation": 1,
        "score": {"precision": "fp32"},
        "tuning_seed": 3,
        "max_nats_per_token": 0.25,
        "common": {"batch.episodes_per_step": 4, "precision": "fp32"},
        "methods": {
            "ppo": {"command": "ppo", "tries": [{"steps": 1}, {"steps": 2}]},
            "rloo": {
                "command": "ppo",
                "tries": [{"steps": 1, "advantages": "rloo", "batch.samples_per_prompt": 2}],
            },
            "dpo": {"command": "dpo", "tries": [{"precision": "fp32"}]},
            "best-of-2 fine-tuning": {"command": "sft", "tries": [{"precision": "fp32"}]},
        },
    },
    "annotators": {
        **STORIES,
        "annotators": {"honest-1": 1.0, "honest-2": 1.0, "adversarial": 0.0},
        "judges": 2,
        "pairs": 6,
        "test": 5,
        "reward": {"head": "fitted", "precision": "fp32"},
        "precision": "fp32",
        "heads": {"seeds": 2, "test": 5},
    },
    "label_value": {
        **STORIES,
        "labels": 16,
        "trained": ["the head", "all weights"],
        "test": 30,
        "precision": "fp32",
        "heads": {"seeds": 2, "test": 30},
    },
    "priorities": {
        **STORIES,
        "test": 5,
        "precision": "fp32",
        "methods": ["random", "entropy", "fisher", "delta-ucb"],
        "random_share": 0.2,
        "round": 2,
        "rounds": 3,
    },
    "kl_sources": {
        "sources": {
            "none": {"seeds": [0], "ppo": {"kl.source": "none"}},
            "reference 0.1": {"seeds": [0, 1], "ppo": {"kl.source": "reference"}},
            "adapter": {"seeds": [0], "ppo": {"kl.source": "adapter", "lora_rank": 2}},
        }
    },
}


def load(monkeypatch: pytest.MonkeyPatch, name: str):
    place = f"{FOLDERS[name].name}.{name}" if name in FOLDERS else name
    return import_module(f"examples.evidence.{place}")


def load_record(monkeypatch: pytest.MonkeyPatch):
    """Makes a record of a line of people's judgments of several responses."""
    module = load(monkeypatch, "real_chat")
    return lambda line, split: module.record(module.as_judged(line), split)


def command_of(name: str) -> str:
    """What one types to run an experiment."""
    return f"python -m examples.evidence.{FOLDERS[name].name}.{name}"


def run(monkeypatch: pytest.MonkeyPatch, name: str, config: dict, folder: Path) -> dict:
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["--config", str(folder / "config.yaml"), "--out", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    module = load(monkeypatch, name)
    plot = getattr(module, "plot", None)
    load(monkeypatch, "experiment").run(name, module.measure, module.tabulate, plot)
    assert (folder / "out" / f"{name}.png").is_file() == (plot is not None)
    return json.loads((folder / "out" / "result.json").read_text())


def write_judgements(file: Path) -> Path:
    """Six prompts with three answers each, of which the longer is always preferred, or they tie."""
    answers = ["a trip", "a lovely trip", "a trip by train"]
    pairs = [[0, 1, "second"], [1, 2, "tie"], [0, 2, "second"]]
    lines = [
        json.dumps({"prompt": f"How was trip {n}?", "responses": answers, "pairs": pairs})
        for n in range(6)
    ]
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    return file


def write_chat(file: Path) -> Path:
    """Six dialogues with a chosen and a rejected reply, and two that are left out."""
    dialogue = "Human: Hi\n\nAssistant: Hello.\n\nHuman: How was trip {}?"
    replies = {"chosen": "It was a lovely trip.", "rejected": "No."}
    rows = [{"prompt": dialogue.format(n), **replies} for n in range(6)]
    rows.append({**rows[0], "prompt": dialogue.format("x" * 200)})
    rows.append({**rows[0], "prompt": "Human: Hi\n\nAssistant: Hello."})
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return file


def write_pairs(file: Path, size: int = 6) -> Path:
    """Pairs of stories with one beginning, `size` a split, and one whose worse text is bare."""
    rows = []
    for split in ("A", "B", "heldout"):
        for number in range(size):
            prefix = f"I went to {split} house {number}."
            ends = {"chosen": f"{prefix} It was lovely.", "rejected": f"{prefix} I hated it."}
            rows.append({"prefix": prefix, "split": split, **ends})
        rows.append({"prefix": "I sat.", "split": split, **ends, "rejected": "I sat."})
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return file


WRITERS = {
    "people": write_pairs,
    "methods": write_pairs,
    "annotators": write_pairs,
    "priorities": write_pairs,
    "label_value": partial(write_pairs, size=32),
}


# trl asks transformers by the old name
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_an_experiment_runs_and_goes_on_where_it_was(
    name: str,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = {
        "model": str(tiny_model),
        "prompts": str(write_prompts(tmp_path / "prompts.jsonl")),
        "db": str(tmp_path / "labels.db"),
        "features": str(tmp_path / "features"),
        "data": str(WRITERS.get(name, write_judgements)(tmp_path / "data.jsonl.gz")),
    }
    config = {**SMALL, **base, "gold": SIGNAL, **CHANGES[name]}
    write_chat(tmp_path / "chat.jsonl.gz")
    for set_, part in config.get("sets", {}).items():
        config["sets"] = {**config["sets"], set_: {**part, "data": str(tmp_path / part["data"])}}
    first = run(monkeypatch, name, config, tmp_path)
    assert first["config"] == config
    again = run(monkeypatch, name, config, tmp_path)
    assert again.pop("wall_seconds") > first.pop("wall_seconds") > 0
    assert again == first
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, name, config | {"seed": 1}, tmp_path)
    assert "holds an experiment of another configuration" in capsys.readouterr().err


def test_an_experiment_without_its_data_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.jsonl.gz"
    config = {"seeds": [0], "sets": {"chat": {"data": str(missing)}}}
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "real_chat", config, tmp_path)
    remedy = "Give its path as `data` in a --config file."
    assert capsys.readouterr().err == f"No such data: {missing}\n  {remedy}\n"


@pytest.mark.slow
def test_the_configuration_for_one_gpu_goes_on_after_every_kill(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = yaml.safe_load(
        (FOLDERS["people"] / "one_gpu" / "people.yaml").read_text(encoding="utf-8")
    )
    config |= {"model": str(tiny_model), "data": str(write_pairs(tmp_path / "data.jsonl.gz"))}
    config |= {"pairs": 3, "test": 2, "validation": 1, "seeds": [0], "steps": [2]}
    config["reference"] |= {"max_new_tokens": 8}
    config["ppo"] |= {"steps": 3, "batch.episodes_per_step": 4}
    for part in ("reward", "score", "reference", "ppo", "evaluate"):
        config[part]["precision"] = "fp32"
    file, out = tmp_path / "config.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(config))
    module = "examples.evidence.human_labels.people"
    command = [sys.executable, "-m", module, "--config", file, "--out", out]
    kills = 0
    for begun in ("judge/metrics.jsonl", "ppo-0-3/metrics.jsonl", "evaluate-0-3/stage.json"):
        process = subprocess.Popen(command, cwd=REPOSITORY)
        while process.poll() is None and not (out / begun).is_file():
            time.sleep(0.05)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills == 3
    subprocess.run(command, cwd=REPOSITORY, check=True)
    result = json.loads((out / "result.json").read_text())
    assert [run["seed"] for run in result["runs"]] == [0]
    assert [run["steps"] for run in result["lengths"]] == [2, 3]


def test_every_experiment_has_its_configuration_and_its_place_on_a_page() -> None:
    assert set(NAMES) == set(CHANGES)
    for name in NAMES:
        assert command_of(name) in PAGES
        assert FOLDERS[name].joinpath(f"{name}.yaml").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_the_pages_have_the_numbers_of_the_results(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = FOLDERS[name] / "results" / f"{name}.json"
    if not place.is_file():
        section = PAGES.partition(command_of(name))[2].partition("\n## ")[0]
        assert "Not measured yet." in section
        return
    result = json.loads(place.read_text())
    config = yaml.safe_load((FOLDERS[name] / f"{name}.yaml").read_text())
    experiment = load(monkeypatch, "experiment")
    monkeypatch.chdir(REPOSITORY)
    assert experiment.resolved(result["config"]) == experiment.resolved(config)
    table = experiment.markdown(load(monkeypatch, name).tabulate(result))
    assert table in PAGES


def test_the_second_run_with_peoples_labels_differs_by_one_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = json.loads((FOLDERS["people"] / "results" / "people_ends.json").read_text())
    config = yaml.safe_load((FOLDERS["people"] / "people.yaml").read_text())
    config["ppo"]["rewards.missing_eos_penalty"] = 2.0
    experiment = load(monkeypatch, "experiment")
    monkeypatch.chdir(REPOSITORY)
    assert experiment.resolved(result["config"]) == experiment.resolved({**config, "steps": []})
    assert experiment.markdown(load(monkeypatch, "people").tabulate(result)) in PAGES


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


def test_the_setting_that_wins_most_within_the_distance_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose = load(monkeypatch, "methods").choose
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


def test_labels_and_prompts_of_people_are_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    people = load(monkeypatch, "people")
    config = CHANGES["people"]
    pairs = people.read_pairs(str(write_pairs(tmp_path / "pairs.jsonl.gz")))
    assert {split: len(rows) for split, rows in pairs.items()} == dict.fromkeys(people.SPLITS, 7)
    assert [people.is_bare(row) for row in pairs["A"]] == [False] * 6 + [True]
    firsts = people.first_sentences(pairs["heldout"])
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
    [record] = people.as_records(config, twice, "train")
    texts = {response.id: response.text for response in record.responses}
    assert [[texts[one] for (one,) in ranking.tiers] for ranking in record.rankings] == [
        [pair["chosen"], pair["rejected"]] for pair in twice
    ]
    assert len(texts) == 3


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
