"""People's votes in an evaluation: which pairs to ask about, and what their answers prove.

The pairs are the first answers of the original and of the policy to every prompt. The votes come
from the labelling app, where nobody could see which answer was whose.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from policies.length_control import length_controlled_rate
from policies.report import with_verdict, write_content
from policies.statistics import judge_wins, votes_needed
from rlhf.errors import InputError
from rlhf.ranked import read_ranked_file
from rlhf.records import Prompt, Response
from rlhf.rundir import RunDir

Pair = tuple[Prompt, Response, Response]


def pairs_to_ask(run: RunDir) -> list[Pair]:
    """Every prompt of an evaluation with the original's and the policy's first answer.

    Pairs of equal texts are left out: nobody can prefer one.
    """
    report = run.read_report()
    sampled = report["samples_per_prompt"] * (2 if "rival" in report else 1)
    pairs = []
    for record in read_ranked_file(run.answers):
        original, new = record.responses[0], record.responses[-sampled]
        if original.text != new.text:
            pairs.append((record.prompt, original, new))
    return pairs


def add_votes(run: RunDir, votes: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Write people's verdict into report.json and report.html of an evaluation.

    Args:
        run: a finished evaluation.
        votes: for each vote the prompt's id and the new answer's share: 1, ½ or 0.

    Returns:
        The win rate and the counts of the votes, as report.json holds them.

    Raises:
        InputError: nobody has voted yet.
    """
    if not votes:
        raise InputError(
            f"Nobody has voted on the pairs of {run.path} yet",
            "Queue them with --to-db DB, let people compare (rlhf label --db DB), and come back.",
        )
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for prompt_id, share in votes:
        by_prompt[prompt_id].append(share)
    content = run.read_report()
    longer = {prompt.id: _length(new) - _length(old) for prompt, old, new in pairs_to_ask(run)}
    shares = np.array([np.mean(values) for values in by_prompt.values()])
    differences = np.array([float(longer[prompt_id]) for prompt_id in by_prompt])
    seed = content["seed"]
    needed = votes_needed(np.array([share for _, share in votes]))
    content["win_rate"]["people"] = {
        **judge_wins(shares, seed=seed).to_json(),
        "length_controlled": length_controlled_rate(shares, differences, seed=seed).to_json(),
    }
    content["votes"] = {
        "given": len(votes),
        "prompts": len(by_prompt),
        "still_needed": None if needed is None else max(0, needed - len(votes)),
    }
    for record, sample in zip(read_ranked_file(run.answers), content["samples"], strict=True):
        if record.prompt.id in by_prompt:
            share = float(np.mean(by_prompt[record.prompt.id]))
            sample["scores"]["people"] = {"policy": share, "reference": 1 - share}
    written = write_content(with_verdict(content), run.report_json, run.report_html)
    return {name: written[name] for name in ("verdict", "votes")} | {
        "win_rate": {"people": written["win_rate"]["people"]}
    }


def _length(response: Response) -> int:
    return len(response.token_ids or ())
