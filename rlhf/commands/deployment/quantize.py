"""`rlhf quantize`."""

from typing import Any

from policies.deployment.settings import OF_POLICIES
from policies.deployment.settings import QuantizeSettings as Settings
from rlhf.commands.idle_settings import refuse_idle
from rlhf.records.wording import counted

EXAMPLE = """rlhf quantize runs/first/ppo --to int8 --prompts rankings \\
    --reward runs/first/reward --out runs/first/int8"""
MEGABYTE = 1e6


def run(settings: Settings) -> dict[str, Any]:
    """Quantize a policy or a reward model, and refuse the result if too much is lost."""
    from policies.deployment.model_folders import is_scorer
    from policies.deployment.quantize import quantize

    if is_scorer(settings.run):
        refuse_idle(settings, OF_POLICIES, f"with the reward model {settings.run}")
    elif settings.reward is None:
        refuse_idle(settings, ["max_loss"], f"on the policy {settings.run} without --reward")
    return quantize(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """The size before and after, what changed, and how to use the result."""
    before, after = (result["bytes"][when] / MEGABYTE for when in ("before", "after"))
    was = f", from {before:,.0f} MB" if before else ""
    is_reward = result["kind"] == "reward model"
    lines = [f"Wrote the {result['kind']} in {settings.to}: {after:,.0f} MB{was}."]
    if is_reward:
        lines.append(_reward_changes(result))
        use = f"--reward {settings.out}"
    else:
        lines += _policy_changes(result)
        use = f"vllm serve {settings.out / 'policy'}"
    return "\n".join([*lines, f"Use it: {use}"])


def _reward_changes(result: dict[str, Any]) -> str:
    pairs, reward = result["pairs"], result["reward"]
    return (
        f"It orders {100 * pairs['agreement']:.1f} % of {counted(pairs['pairs'], 'pair')} of "
        f"held-out responses as before. Rewards, whose standard deviation is "
        f"{reward['spread']:.2f}, changed by {reward['mean']:.3f} on average, at most "
        f"{reward['max']:.3f}."
    )


def _policy_changes(result: dict[str, Any]) -> list[str]:
    change = result["log_prob"]
    lines = [
        f"Log-probs of {counted(change['tokens'], 'token')} of the unquantized policy's responses "
        f"changed by {change['mean']:.3f} nats on average, at most {change['max']:.2f}."
    ]
    if "win_rate" in result:
        from rlhf.run.intervals import in_words

        rate = result["win_rate"]
        lines.append(f"Win rate against the unquantized policy: {in_words(rate)}.")
    return lines
