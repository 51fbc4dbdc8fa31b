"""Whether the database has prompts of the splits that a loop needs, before anything is trained."""

from shlex import quote

from labeling_app.db.store import Store
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.loop.stages import stages_of_round
from rlhf.errors import InputError


def require_splits(settings: LoopSettings) -> None:
    """Refuse a database without prompts to train on or to evaluate on.

    The reference outputs of the first round are made from its export, so prompts that are imported
    later are not in them.

    Raises:
        InputError: a split is missing.
    """
    [evaluate] = [stage for stage in stages_of_round(settings, 0) if stage.name == "evaluate"]
    uses = {evaluate.settings().split: "the evaluation compares the policies on"}
    uses.setdefault("train", "the policy is trained on")
    db = settings.database
    with Store(db, read_only=True) as store:
        missing = [split for split in uses if not store.has_prompts(split)]
    for split in missing:
        way = "" if split == "train" else ", or set stages: evaluate: split: train in the file"
        raise InputError(
            f"{db} has no prompts of the split {split!r}, which {uses[split]}",
            f"Upload some on the Data page with the split {split}, or type: rlhf import "
            f"prompts.jsonl --split {split} --db {quote(str(db))}{way}.\n"
            "  Then start the loop again.",
        )
