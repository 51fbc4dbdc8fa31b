"""Which model a run or folder holds, as the commands of deployment take them."""

from pathlib import Path

from reward.scoring.scorer import member_folders, members_in
from rlhf.modeling.models import STAND_INS, is_reward_model, policy_folder
from rlhf.run.rundir import RunDir


def find_folders(name: str) -> list[str]:
    """The folder of a policy or a reward model, or of every member of an ensemble.

    Args:
        name: a finished run of a training or of `rlhf quantize` or `distill`, or a model folder.

    Raises:
        InputError: the stage did not finish, or is another one.
    """
    run = RunDir(Path(name))
    stage = run.read_stage().get("stage")
    is_reward = stage == "reward" or (stage in STAND_INS and run.model.is_dir())
    return member_folders(name) if is_reward else members_in(policy_folder(name))


def is_scorer(name: str) -> bool:
    """Whether a run or folder holds a reward model, not a policy.

    Raises:
        InputError: there is no such model.
    """
    return is_reward_model(find_folders(name)[0])
