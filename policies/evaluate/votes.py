"""People's votes in an evaluation: which pairs to ask about, and what they prove.

The pairs are the first responses of the policy and of what it is compared with, the original and
the rival if there is one, to every prompt. The votes come from the labeling app, where nobody could
see which response was whose.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from policies.evaluate.answer_order import split_by_model
from policies.evaluate.measures.length_control import length_controlled_rate
from policies.evaluate.measures.statistics import judge_wins, votes_needed
from policies.evaluate.report import with_verdict, write_content
from rlhf.errors import InputError
from rlhf.planning.price import with_price_per_point
from rlhf.records.ranked import read_ranked_file
from rlhf.records.schema import Prompt, Response
from rlhf.run.rundir import RunDir

Pair = tuple[Prompt, Response, Response]


class PolicyVote(NamedTuple):
    """A person's vote on a pair: `share` is 1 for the policy's response, ½ for a tie, else 0."""

    prompt_id: str
    share: float
    person: str


class NoVotesError(InputError):
    """People were asked, and nobody has voted yet."""


def pairs_to_ask(run: RunDir) -> dict[str, list[Pair]]:
    """Every prompt of an evaluation with the other model's and the policy's first response.

    The other models are `reference` and, where another model was compared too, `rival`. Pairs of
    equal texts are left out: nobody can prefer one. What is left is no sample of its model, so it
    has no sampling settings, without which `rlhf reference` does not reuse it.
    """
    report = run.read_report()
    samples, has_rival = report["samples_per_prompt"], "rival" in report
    with run.reading_report():
        responses = [
            (record.prompt, split_by_model(record.responses, samples, has_rival=has_rival))
            for record in read_ranked_file(run.answers)
        ]
    return {
        opponent: [
            (
                prompt,
                replace(of[opponent][0], sampling=None),
                replace(of["policy"][0], sampling=None),
            )
            for prompt, of in responses
            if of[opponent][0].text != of["policy"][0].text
        ]
        for opponent in (("reference", "rival") if has_rival else ("reference",))
    }


def add_votes(run: RunDir, votes: Mapping[str, Sequence[PolicyVote]]) -> dict[str, Any]:
    """Write people's verdict into report.json and report.html of an evaluation.

    Args:
        run: a finished evaluation.
        votes: on the pairs with each other model.

    Returns:
        The win rates and the counts of the votes, as report.json holds them.

    Raises:
        NoVotesError: nobody has voted yet.
    """
    content = run.read_report()
    if not (any(votes.values()) or _has_votes(content)):
        raise NoVotesError(
            f"Nobody has voted on the pairs of {run.path} yet",
            "Queue them with --to-db DB, let people compare (rlhf label --db DB), and come back.",
        )
    parts = {"reference": content, "rival": content.get("rival", {})}
    pairs = pairs_to_ask(run)
    _forget_votes(content)
    for opponent, given in votes.items():
        if given:
            _judge(parts[opponent], given, pairs[opponent], content["seed"])
            same = len(content["samples"]) - len(pairs[opponent])
            parts[opponent]["votes"]["same_answers"] = same
            parts[opponent]["win_rate"]["people"]["same_answers"] = same
    by_prompt = _shares(votes["reference"])
    for record, sample in zip(read_ranked_file(run.answers), content["samples"], strict=True):
        if record.prompt.id in by_prompt:
            share = by_prompt[record.prompt.id]
            sample["scores"]["people"] = {"policy": share, "reference": 1 - share}
    if "cost" in content:  # a point of win rate by another judge has another price
        content["cost"] = with_price_per_point(content["cost"], content["win_rate"])
    written = write_content(with_verdict(content), run.report_json, run.report_html)
    rival = {"rival": _by_people(written["rival"])} if "rival" in written else {}
    return {"verdict": written["verdict"], **_by_people(written), **rival}


def _has_votes(content: Mapping[str, Any]) -> bool:
    return "votes" in content or "votes" in content.get("rival", {})


def _forget_votes(content: dict[str, Any]) -> None:
    """Remove an earlier verdict of people: votes may have been withdrawn since."""
    for part in (content, content.get("rival", {})):
        part.pop("votes", None)
        part.get("win_rate", {}).pop("people", None)
    for sample in content["samples"]:
        sample["scores"].pop("people", None)


def _shares(votes: Sequence[PolicyVote]) -> dict[str, float]:
    """The policy's share of the votes on each prompt."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for vote in votes:
        by_prompt[vote.prompt_id].append(vote.share)
    return {prompt_id: float(np.mean(shares)) for prompt_id, shares in by_prompt.items()}


def _judge(
    part: dict[str, Any], votes: Sequence[PolicyVote], pairs: Sequence[Pair], seed: int
) -> None:
    """Add win rate and counts of these votes to the part of report.json of one other model.

    Prompts are what counts, as in every interval: several votes on one pair resemble each other.
    """
    by_prompt = _shares(votes)
    longer = {prompt.id: float(_length(new) - _length(old)) for prompt, old, new in pairs}
    shares = np.array(list(by_prompt.values()))
    differences = np.array([longer[prompt_id] for prompt_id in by_prompt])
    part["win_rate"]["people"] = {
        **judge_wins(shares, seed=seed),
        "length_controlled": length_controlled_rate(shares, differences, seed=seed).to_json(),
    }
    needed = votes_needed(shares)
    more = None if needed is None else max(0, needed - len(shares)) * len(votes) / len(shares)
    part["votes"] = {
        "given": len(votes),
        "people": len({vote.person for vote in votes}),
        "prompts": len(shares),
        "still_needed": None if more is None else math.ceil(more),
    }


def _by_people(part: Mapping[str, Any]) -> dict[str, Any]:
    if "people" not in part["win_rate"]:
        return {}
    return {"votes": part["votes"], "win_rate": {"people": part["win_rate"]["people"]}}


def _length(response: Response) -> int:
    return len(response.token_ids or ())
