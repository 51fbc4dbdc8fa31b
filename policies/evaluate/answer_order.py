"""The order of the answers in an evaluation's answers.jsonl: reference, policy, rival."""

from collections.abc import Sequence

from rlhf.records.schema import Response


def split_by_model(
    responses: Sequence[Response], samples: int, *, has_rival: bool
) -> dict[str, Sequence[Response]]:
    """Split one prompt's answers into reference, policy and rival by their order.

    Args:
        responses: those of the reference (any number), then the policy's, then the rival's.
        samples: number of answers of the policy, and of the rival.
        has_rival: whether there is one.
    """
    sampled = ("policy", "rival") if has_rival else ("policy",)
    first = len(responses) - samples * len(sampled)
    parts = {
        name: responses[first + number * samples :][:samples] for number, name in enumerate(sampled)
    }
    return {"reference": responses[:first], **parts}
