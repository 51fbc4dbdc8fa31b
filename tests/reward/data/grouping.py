"""Groups of records in memory, checked as those of an export are."""

from collections import Counter
from collections.abc import Sequence

from reward.data.groups import (
    Encoder,
    Group,
    admit,
    encode_records,
    refuse_repeated,
    refuse_too_long,
)
from rlhf.records.schema import RankedPrompt


def build_groups(
    records: Sequence[RankedPrompt], encoder: Encoder
) -> tuple[list[Group], dict[str, int]]:
    """Groups of all prompts with a judgment of weight above 0, and counts for the report."""
    counts = Counter[str]()
    refuse_repeated([record.prompt.id for record in records])
    found = encode_records(records, encoder)
    groups = [group for one, group in found if admit(one, group, encoder, counts) and group]
    refuse_too_long(counts, len(records), encoder)
    return groups, dict(counts)
