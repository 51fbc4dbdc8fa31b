"""The stage behind `rlhf score`: a file of responses in, the same lines with rewards out."""

import statistics
from pathlib import Path
from shlex import quote
from typing import Any

from reward.scoring.texts import PromptResponses, TextReward, load_text_reward
from reward.settings import ScoreSettings
from rlhf.endpoints.signals import with_prefix
from rlhf.errors import InputError
from rlhf.parallel.distributed import start_alone
from rlhf.records.jsonl import BadLineError, JsonObject, parse_line, read_lines, write_jsonl
from rlhf.records.schema import Message, Prompt, Response

TABLES = (".csv", ".tsv", ".parquet")


def score_file(settings: ScoreSettings) -> dict[str, Any]:
    """Score every response of a file and write its lines again with `reward` or `rewards`.

    Raises:
        InputError: the file, the reward or --out cannot be used, or a reward is not a number.
    """
    assert settings.file is not None  # or there would be --rankings
    require_new(settings.out)
    lines = read_responses(settings.file)
    rewards = load_reward_of(settings)([answers for _, answers in lines])
    scored = zip((line for line, _ in lines), rewards, strict=True)
    write_jsonl(settings.out, (_with_rewards(line, row) for line, row in scored))
    values = [value for row in rewards for value in row]
    return {
        "prompts": len(lines),
        "responses": len(values),
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "out": str(settings.out),
    }


def require_new(out: Path) -> None:
    """Refuse to overwrite.

    Raises:
        InputError: `out` exists.
    """
    if out.exists():
        raise InputError(f"{out} already exists", "Choose another --out.")


def load_reward_of(settings: ScoreSettings) -> TextReward:
    """The reward that the settings name.

    Raises:
        InputError: there is no such model, or the function cannot be imported.
    """
    return load_text_reward(
        with_prefix(settings.reward),
        start_alone(settings.precision, seed=0),
        settings.micro_tokens,
        settings.combine,
        given=settings.chat_template_kwargs,
    )


def read_responses(path: Path) -> list[tuple[JsonObject, PromptResponses]]:
    """Every line of a file as it is, with the prompt and the responses in it.

    Raises:
        InputError: the file does not exist, is a table or has no response.
        BadLineError: a line lacks its prompt or its responses.
    """
    file = quote(str(path))
    instead = f"Preferences are read by: rlhf score --rankings {file} --reward REWARD --out OUT"
    if path.suffix.lower() in TABLES:
        raise InputError(f"{path} is a table; FILE has one JSON object on each line", instead)
    lines = []
    for location, text in read_lines(path):
        line = parse_line(text, location)
        try:
            lines.append((line, _prompt_responses(line)))
        except InputError as error:
            remedy = instead if {"chosen", "rejected"} & line.keys() else error.remedy
            raise BadLineError(f"{location}: {error.problem}", remedy) from None
    if not any(responses for _, (_, responses) in lines):
        raise InputError(
            f"{path} has no response to score",
            'Write lines such as {"prompt": "Hello", "responses": ["Hi!", "Go away."]}.',
        )
    return lines


def _prompt_responses(line: JsonObject) -> PromptResponses:
    prompt = _prompt(line)
    given = line.get("responses", [line["response"]] if "response" in line else None)
    if not isinstance(given, list) or not all(
        isinstance(response, str | dict) for response in given
    ):
        raise InputError(
            f"A line needs 'response' or 'responses', found {sorted(line)}",
            "Give a text, a list of texts, or the responses of an export.",
        )
    responses = (
        Response.from_json(response)
        if isinstance(response, dict)
        else Response(id=str(number), prompt_id=prompt.id, text=response, model="")
        for number, response in enumerate(given)
    )
    return prompt, tuple(responses)


def _prompt(line: JsonObject) -> Prompt:
    given = line.get("messages", line.get("prompt"))
    if isinstance(given, dict):
        return Prompt.from_json(given)
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(turn, dict) for turn in given):
        raise InputError(
            f"A line needs 'prompt' or 'messages', found {sorted(line)}",
            'Give a text, or turns such as {"role": "user", "content": "Hello"}.',
        )
    return Prompt.create(tuple(map(Message.from_json, given)), "test", "")


def _with_rewards(line: JsonObject, rewards: list[float]) -> JsonObject:
    if "responses" in line:
        return {**line, "rewards": rewards}
    return {**line, "reward": rewards[0]}
