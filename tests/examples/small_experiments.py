"""The experiments of examples/evidence, and each at the smallest size."""

import gzip
import json
from importlib import import_module
from pathlib import Path

import pytest

from tests.servers.commands import REPOSITORY

EVIDENCE = REPOSITORY / "examples" / "evidence"
PARTS = ("ethics", "heads")  # of experiments
FOLDERS = {one.stem: one.parent for one in EVIDENCE.glob("*/*.py") if one.stem not in PARTS}
SAMPLING = {"max_new_tokens": 8, "precision": "fp32"}
PPO = {"episodes_per_step": 4, "precision": "fp32", "save_every": 100}
FITTED = {"head": "fitted", "epochs": 0, "precision": "fp32"}
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
PEOPLE = {
    "question": "Continue: {}",
    "turns": [["I sat.", "I sat. It was warm."]],
    "pairs": 3,
    "test": 2,
    "validation": 1,
    "judged_on": "test",
    "steps": [2],
    "score": {"precision": "fp32"},
}
STORIES = {"question": "Begin with: {}", "turns": []}
METHODS = {
    "ppo": {"command": "ppo", "chosen": 1, "tries": [{}, {"steps": 2}]},
    "rloo": {
        "command": "ppo",
        "chosen": 0,
        "tries": [{"advantages": "rloo", "batch.samples_per_prompt": 2}],
    },
    "dpo": {"command": "dpo", "chosen": 0, "tries": [{"precision": "fp32"}]},
    "best-of-2 fine-tuning": {"command": "sft", "chosen": 0, "tries": [{"precision": "fp32"}]},
}
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
    "people": {**PEOPLE, "ptx": {"settings": {"ptx.per_episode": 0.5}}},
    "methods": {"labels": 2, "methods": METHODS},
    "method_settings": {
        "of": {"labels": 2, "tuning_seed": 3, "max_nats_per_token": 0.25, "methods": METHODS}
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
    "student": {
        "teacher_outputs": {"samples": 2, **SAMPLING},
        "distill": {"half": True, "precision": "fp32", "max_new_tokens": 8},
        "quantize": {"to": "int8", "samples": 1, "max_loss": 100, **SAMPLING},
        "benchmark": {
            "batch_sizes": [1, 2],
            "prompt_tokens": [4],
            "answer_tokens": [2],
            "repeats": 1,
            "precision": "fp32",
        },
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


def write_passages(file: Path) -> Path:
    """Two questions with a passage of two paragraphs, the same one, under its title."""
    passage = "The river\n\n" + "A river runs to the sea. " * 9 + "\n\n" + "It is wide. " * 9
    line = json.dumps({"prompt": f"Answer.\n\nQuestion: Where?\n\nPassages:\n{passage}"})
    file.write_bytes(gzip.compress(f"{line}\n{line}\n".encode()))
    return file
