"""The model that a training starts from: a language model, or a reward model with its head."""

from pathlib import Path
from typing import Any

from reward.scoring.scorer import member_folders, members_in
from reward.settings import RewardSettings
from rlhf.config.paths import with_changes
from rlhf.errors import ConfigError, InputError
from rlhf.modeling.models import is_reward_model, policy_folder, require_trainable
from rlhf.modeling.readers import reads_thinking
from rlhf.run.rundir import RunDir


def resolve_model(settings: RewardSettings) -> RewardSettings:
    """The settings with the folder of the model, which --model may name by its run.

    Without --data.reads-thinking, thinking is read as the reward model has read it, else not.

    Raises:
        InputError: the run did not finish or has no model, or the model is an ensemble or another
            kind of classifier.
        ConfigError: --head fitted would replace a trained head.
    """
    name = settings.model
    is_run = RunDir(Path(name)).read_stage().get("stage") == "reward"
    folder, *others = member_folders(name) if is_run else members_in(policy_folder(name, "--model"))
    if others:
        member = Path(name) / ("member-0" if is_run else "member-1")
        raise InputError(
            f"{name} is an ensemble of {1 + len(others)} reward models, and a training starts "
            "from one",
            f"Give one of them, such as {member}.",
        )
    require_trainable(folder)
    is_trained = is_reward_model(folder)
    if is_trained and settings.head == "fitted":
        raise ConfigError(
            f"--head fitted would replace the trained head of {name}",
            "Leave --head out: a reward model keeps its head.",
        )
    reads = settings.data.reads_thinking
    if reads is None:
        reads = is_trained and reads_thinking(folder)
    return with_changes(settings, {"model": folder, "data.reads_thinking": reads})


def describe_origin(model: dict[str, str]) -> dict[str, Any]:
    """The report's `started_from`: `kind`, `path`, `hash`, and the original `language_model`.

    The latter has a path and a hash; it is None for a reward model without a run of this project.

    Args:
        model: as `describe_model` describes it.
    """
    described = {"path": model["path"], "hash": model["hash"]}
    if not is_reward_model(model["path"]):
        return {"kind": "language model", **described, "language_model": described}
    return {"kind": "reward model", **described, "language_model": _language_model(model["path"])}


def reference_fingerprint(model: dict[str, str]) -> str:
    """The hash of the original language model, on whose outputs the scale is fitted.

    Args:
        model: as `describe_model` describes it.
    """
    return str((describe_origin(model)["language_model"] or model)["hash"])


def _language_model(folder: str) -> dict[str, str] | None:
    """The language model at the start of the chain of runs that led to a reward model."""
    run = RunDir(Path(folder).parent)
    stage = run.read_stage()
    if run.model != Path(folder) or stage.get("stage") != "reward":
        return None
    start = stage["inputs"]["model"]
    before = run.read_report().get("started_from", {"language_model": start})
    behind: dict[str, str] | None = before["language_model"]
    return behind and {"path": behind["path"], "hash": behind["hash"]}
