"""Lines of files to import, and what was read from them."""

import json
from pathlib import Path

from labeling_app.data_io.formats import Defaults, read_entry
from rlhf.records.schema import RankedPrompt

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
TEXTS = {"response_1": "no", "response_2": "yes", "response_3": "maybe"}
BY_U1 = {"user_id": "u1", "status": "submitted"}
# one record of Argilla, ranked by two users
ARGILLA = {
    "id": "7",
    "fields": {"prompt": "Hi?", **TEXTS},
    "metadata": {},
    "suggestions": {"preference": {"value": ["response_1"], "score": None, "agent": "m"}},
    "responses": {
        "preference": [
            {"value": ["response_2", "response_3", "response_1"], **BY_U1},
            {"value": ["response_1", "response_2", "response_3"], **BY_U1, "user_id": "u2"},
        ],
        "comment": [{"value": "hard", **BY_U1}],
    },
    "vectors": {},
    "_server_id": "s",
}


def write(path: Path, lines: list) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def judged(entry) -> list[list[list[str]]]:
    """The rankings of an entry, as texts."""
    texts = {response.id: response.text for response in entry.responses}
    return [[[texts[i] for i in tier] for tier in ranking.tiers] for ranking in entry.rankings]


def exported(text: str, *, response: dict | None = None, **ranking: object) -> dict:
    """A line of an export about two responses, with some fields of the first, or of the ranking."""
    entry = read_entry({"prompt": text, "chosen": "yes", "rejected": "no"}, Defaults())
    record = RankedPrompt(prompt=entry.prompt, responses=entry.responses, rankings=entry.rankings)
    line = record.to_json()
    line["responses"][0].update(response or {})
    line["rankings"][0].update(ranking)
    return line


def pairwise(number: int, *sides: tuple[str, str]) -> dict:
    """A task of Label Studio, and who preferred which side."""
    made = {"created_at": "2024-03-09T22:16:08Z", "lead_time": 12.5}
    return {
        "id": number,
        "data": {"prompt": f"question {number}", "answer1": "yes", "answer2": "certainly"},
        "annotations": [
            {
                **made,
                "completed_by": {"email": name},
                "result": [{"type": "pairwise", "value": {"selected": side}}],
            }
            for name, side in sides
        ],
    }
