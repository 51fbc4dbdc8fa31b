"""`rlhf score --rankings`: how often a reward agrees with judgments that it was not trained on.

The report is that of `rlhf train-reward`, for any reward model, function or endpoint. Lengths are
in the reward model's tokens; those of functions and endpoints, which have none, are in words.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from reward.accuracy import pair_accuracy
from reward.data.groups import Group, rank_pairs
from reward.report.health import Verdict, collect_verdicts, describe_health
from reward.report.health_page import write_page
from reward.scoring.files import load_reward_of, require_new
from reward.scoring.scorer import member_folders
from reward.settings import ScoreSettings
from rlhf.endpoints.signals import PREFIX, with_prefix
from rlhf.errors import InputError
from rlhf.modeling.models import describe_model
from rlhf.modeling.readers import load_reader
from rlhf.modeling.tokens import encode_prompt, tokenizer_fingerprint
from rlhf.planning.price import cost_of_seconds
from rlhf.records.jsonl import new_folder, write_json
from rlhf.records.schema import RankedPrompt
from rlhf.run.rundir import RunDir

Encoded = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
Encode = Callable[[RankedPrompt], Encoded]


def score_rankings(
    settings: ScoreSettings, records: Sequence[RankedPrompt], source: str
) -> dict[str, Any]:
    """Score judged responses, write report.json and report.html into --out, return the report.

    Args:
        settings: of the command.
        records: prompts with responses and rankings.
        source: where they come from, for the report.

    Raises:
        InputError: no pair is judged, --out exists, or the reward cannot be used.
    """
    began = time.monotonic()
    require_new(settings.out)
    judged = [record for record in map(_judged, records) if record.responses]
    if not judged:
        raise InputError(
            f"{source} holds no judgment of two responses",
            "Give preferences: ranked exports, or lines with chosen and rejected.",
        )
    encode, unit = _encoder(settings)
    groups = [_group(record, encode) for record in judged]
    rewards = load_reward_of(settings)([(record.prompt, record.responses) for record in judged])
    gain = training_gain(settings.reward)
    differences = [[value / gain for value in row] for row in rewards]
    records_by_id = {record.prompt.id: record for record in judged}

    def texts(verdict: Verdict) -> dict[str, str]:
        record, pair = records_by_id[verdict.group.prompt_id], verdict.pair
        preferred, other = (record.responses[index].text for index in (pair.first, pair.second))
        return {"prompt": record.prompt.text, "preferred": preferred, "other": other}

    verdicts = collect_verdicts(groups, differences)
    accuracy = pair_accuracy(groups, rewards)
    report = {
        "reward": settings.reward,
        "judged": {"prompts": len(groups), "from": source},
        "accuracy": accuracy and asdict(accuracy),
        "ties": sum(len(group.pairs) - group.num_preferences for group in groups),
        **describe_health(verdicts, texts, unit=unit),
        "cost": cost_of_seconds(time.monotonic() - began, settings.price_per_hour),
    }
    with new_folder(settings.out) as folder:
        run = RunDir(folder)
        write_page(run.report_html, report, [value for row in rewards for value in row])
        write_json(run.report_json, report)
    return report


def training_gain(reward: str, *, first_member: bool = False) -> float:
    """The factor that `train-reward` put on a model's rewards; 1 for any other reward.

    A difference of rewards divided by it is the log-odds that the loss was trained on. For an
    ensemble, the mean of its members' factors, or that of its first member.
    """
    folder = Path(reward)
    if not folder.is_dir():
        return 1.0
    run = RunDir(Path(member_folders(reward)[0]).parent)
    members = [RunDir(path.parent) for path in sorted(run.path.glob("member-*/report.json"))]
    reports = [member.read_report() for member in members or [run] if member.report_json.is_file()]
    gains = [report["normalisation"]["gain"] for report in reports if "normalisation" in report]
    return fmean(gains[:1] if first_member else gains) if gains else 1.0


def _judged(record: RankedPrompt) -> RankedPrompt:
    """A record without thumbs and without responses that nobody compared."""
    rankings = tuple(ranking for ranking in record.rankings if sum(map(len, ranking.tiers)) > 1)
    names = {name for ranking in rankings for tier in ranking.tiers for name in tier}
    responses = tuple(response for response in record.responses if response.id in names)
    return replace(record, rankings=rankings, responses=responses)


def _group(record: RankedPrompt, encode: Encode) -> Group:
    position = {response.id: index for index, response in enumerate(record.responses)}
    pairs = tuple(pair for ranking in record.rankings for pair in rank_pairs(ranking, position))
    return Group(record.prompt.id, *encode(record), pairs)


def _encoder(settings: ScoreSettings) -> tuple[Encode, str]:
    """How texts are encoded to measure their lengths, and the unit of these lengths."""
    if with_prefix(settings.reward).startswith((PREFIX, "http://", "https://")):
        return _words, "words"
    [folder, *_] = member_folders(settings.reward)
    reader = load_reader(describe_model(folder, settings.chat_template_kwargs))
    fingerprint = tokenizer_fingerprint(reader.tokenizer)

    def tokens(record: RankedPrompt) -> Encoded:
        ids = encode_prompt(reader.tokenizer, record.prompt)
        read = (reader.encode(response, fingerprint, ids) for response in record.responses)
        return tuple(ids), tuple(map(tuple, read))

    return tokens, "tokens"


def _words(record: RankedPrompt) -> Encoded:
    """A number for each word; only how many there are matters."""
    responses = tuple(tuple(range(len(response.text.split()))) for response in record.responses)
    return tuple(range(len(record.prompt.text.split()))), responses
