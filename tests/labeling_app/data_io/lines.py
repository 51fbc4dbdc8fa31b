"""Lines of files to import, and what was read from them."""

import json
from pathlib import Path

ASK = {"role": "user", "content": "Hi?"}
GOOD = [{"role": "assistant", "content": "yes"}]
BAD = [{"role": "assistant", "content": "no"}]
PREFERENCES = {
    "trl explicit": {"prompt": "Hi?", "chosen": "yes", "rejected": "no"},
    "trl implicit": {"chosen": "Hi? yes", "rejected": "Hi? no"},
    "conversational explicit": {"prompt": [ASK], "chosen": GOOD, "rejected": BAD},
    "conversational implicit": {"chosen": [ASK, *GOOD], "rejected": [ASK, *BAD]},
    "binarised UltraFeedback": {"prompt": "Hi?", "chosen": [ASK, *GOOD], "rejected": [ASK, *BAD]},
    "HH-RLHF": {
        "chosen": "\n\nHuman: Hi?\n\nAssistant: yes",
        "rejected": "\n\nHuman: Hi?\n\nAssistant: no",
    },
    "UltraFeedback": {
        "instruction": "Hi?",
        "completions": [
            {"model": "a", "response": "no", "overall_score": 2.0},
            {"model": "b", "response": "yes", "overall_score": 7.5},
        ],
    },
    "own, best second": {"prompt": "Hi?", "responses": ["no", "yes"], "tiers": [[1], [0]]},
    "pairs": {"prompt": "Hi?", "responses": ["no", "yes"], "pairs": [[0, 1, "second"]]},
    "scores": {"prompt": "Hi?", "responses": ["no", "yes"], "scores": [-1, 0.5]},
}


def write(path: Path, lines: list) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def judged(entry) -> list[list[list[str]]]:
    """The rankings of an entry, as texts."""
    texts = {response.id: response.text for response in entry.responses}
    return [[[texts[i] for i in tier] for tier in ranking.tiers] for ranking in entry.rankings]
