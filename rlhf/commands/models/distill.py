"""`rlhf distill`."""

from typing import Any

from policies.deployment.distill.settings import OF_POLICIES
from policies.deployment.distill.settings import DistillSettings as Settings
from rlhf.commands.idle_settings import refuse_idle
from rlhf.commands.wording import advice_on_speed, next_command
from rlhf.records.wording import counted

EXAMPLE = """rlhf distill --teacher runs/first/ppo \\
    --student runs/first/ppo/policy --half \\
    --outputs runs/first/teacher-outputs --out runs/first/distill"""


def run(settings: Settings) -> dict[str, Any]:
    """Train a smaller policy or reward model to imitate a larger one (distillation)."""
    from rlhf.parallel.distributed import launch

    launch(settings.processes)
    from policies.deployment.model_folders import is_scorer

    if is_scorer(settings.teacher):
        from policies.deployment.distill.reward import distill_reward

        refuse_idle(settings, OF_POLICIES, f"with the reward model {settings.teacher}")
        return distill_reward(settings)
    from policies.deployment.distill.train import distill

    return distill(settings)


def memory_plan(settings: Settings) -> str:
    """The memory plan of the run; no weights are loaded."""
    from policies.deployment.distill.student import half_config
    from policies.deployment.model_folders import find_folders, is_scorer
    from rlhf.modeling.models import load_config
    from rlhf.parallel.distributed import choose_precision
    from rlhf.planning.plan import Pass
    from rlhf.planning.planner import read_shape, shape_of
    from rlhf.planning.training_plan import distill_plan, distill_reward_plan

    length, config = settings.max_length, load_config(settings.student)
    plan = distill_reward_plan if is_scorer(settings.teacher) else distill_plan
    return plan(
        read_shape(find_folders(settings.teacher)[0]),
        shape_of(half_config(config) if settings.half else config, settings.student),
        Pass(settings.micro_batch_size * length, length, settings.gradient_checkpointing),
        bf16=choose_precision(settings.precision) == "bf16",
        processes=settings.processes,
    ).text


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """The size of the student, how near it came to the teacher, and how to compare them."""
    parameters = result["parameters"]
    share = 100 * parameters["student"] / parameters["teacher"]
    trained = (
        f"Trained {counted(result['steps'], 'step')} a student of {parameters['student']:,} "
        f"parameters, {share:.0f} % of its teacher's."
    )
    if result["kind"] == "reward model":
        return "\n".join([trained + _scores(result["held_out"]), *advice_on_speed(result)])
    divergence = result["divergence"]
    nearer = (
        ""
        if divergence["before"] is None
        else f" On held-out outputs its divergence from the teacher went from "
        f"{divergence['before']:.3f} to {divergence['after']:.3f} nats per token."
    )
    following = next_command(
        "evaluate",
        policy=settings.out,
        against=settings.teacher,
        reference="REF",
        reward="RM",
        out=settings.out.parent / "evaluate-distill",
    )
    return "\n".join([trained + nearer, *advice_on_speed(result), following])


def _scores(held_out: dict[str, Any] | None) -> str:
    """How near a reward model's student came to it, if there were test prompts."""
    if held_out is None:
        return ""
    pairs = held_out["pairs"]
    ordered = (
        f", and it orders {100 * pairs['agreement']:.0f} % of {counted(pairs['pairs'], 'pair')} as "
        "its teacher"
        if pairs["pairs"]
        else ""  # one response to each prompt
    )
    return (
        f" On held-out responses its rewards are off by {held_out['error']:.2f} (the teacher's "
        f"have a standard deviation of {held_out['spread']:.2f}){ordered}."
    )
