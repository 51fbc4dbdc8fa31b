"""Whose answers stand where in the answers.jsonl of an evaluation."""

from collections.abc import Sequence

from rlhf.records.schema import Response


def split_by_side(
    responses: Sequence[Response], samples: int, *, has_rival: bool
) -> dict[str, Sequence[Response]]:
    """One prompt's answers of each side, told apart by their order.

    Args:
        responses: the reference's, of which there may be any number, the policy's, the rival's.
        samples: answers of the policy, and of the rival.
        has_rival: whether there is one.
    """
    sampled = ("policy", "rival") if has_rival else ("policy",)
    first = len(responses) - samples * len(sampled)
    parts = {
        name: responses[first + number * samples :][:samples] for number, name in enumerate(sampled)
    }
    return {"reference": responses[:first], **parts}
