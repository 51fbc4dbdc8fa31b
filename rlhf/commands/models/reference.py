"""`rlhf reference`."""

from pathlib import Path
from typing import Any

from policies.reference.settings import ReferenceSettings as Settings
from rlhf.commands.wording import next_command
from rlhf.records.wording import counted

EXAMPLE = """rlhf reference --prompts rankings --model models/SmolLM2-135M-Instruct \\
    --reward runs/first/reward --out runs/first/reference"""

ASSUMED_TOKENS = 256


def run(settings: Settings) -> dict[str, Any]:
    """Store the original model's responses to every prompt, with the log-prob of each token.

    Give --prompts and --model together; for existing reference outputs, --reward or --inspect.
    """
    if settings.inspect:
        from policies.reference.summary import inspect_store

        return inspect_store(settings.out)
    from policies.reference.build import build_reference
    from policies.reference.rewards import add_rewards
    from rlhf.parallel.distributed import launch

    launch(settings.processes)
    return add_rewards(settings) if settings.model is None else build_reference(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """What was stored; with --inspect, a full description of the reference store.

    With --shard, how many of the shards there are.
    """
    if settings.inspect:
        return _describe_store(result)
    if "rows" not in result:
        [[done, number]] = [item for item in result["shards"].items() if item[0] != "of"]
        return f"{number} of {result['shards']['of']} shards are {done}; other jobs do the rest."
    rows, reward, out = result["rows"], settings.reward, settings.out
    stored = (
        f"Stored {counted(rows, 'response')} to {counted(result['prompts'], 'prompt')} with "
        f"log-probs in {out}: {result['mean_length']:.0f} tokens on average, "
        f"{100 * result['finished'] / rows:.0f} % ended by themselves."
    )
    if reward is None:
        return "\n".join([stored, next_command("reference", reward="RM", out=out)])
    inputs: dict[str, str | Path] = {"model": result["model"]["path"], "reward": reward}
    following = next_command("ppo", **inputs, reference=out, out=out.parent / "ppo")
    return "\n".join([stored, f"They have the rewards of {reward}.", following])


def memory_plan(settings: Settings) -> str:
    """The memory of each process, with prompts of an assumed length."""
    if settings.model is None:
        return "Scoring existing reference outputs loads no language model."
    from policies.rewards import is_model
    from rlhf.modeling.models import model_folder
    from rlhf.parallel.distributed import choose_precision
    from rlhf.planning.plan import SampleBatch, ShardLayout
    from rlhf.planning.planner import read_shape
    from rlhf.planning.sampling_plan import reference_plan
    from rlhf.ranks import world_size

    is_sharded = settings.sharding in ("fsdp", "zero3")
    parts = settings.parallel.shard_group or max(settings.processes, world_size())
    reward = None
    if settings.reward is not None and is_model(settings.reward):
        reward = model_folder(settings.reward, "reward", "model")
    return reference_plan(
        read_shape(settings.model),
        read_shape(reward) if reward else None,
        SampleBatch(settings.batch_size, ASSUMED_TOKENS, settings.sampling.max_new_tokens),
        bf16=choose_precision(settings.precision) == "bf16",
        layout=ShardLayout(
            strategy=settings.sharding,
            parts=parts if is_sharded else settings.parallel.tensor_parallel,
            offload=settings.parallel.offload and is_sharded,
        ),
        vllm=settings.sampling.vllm_processes,
    ).text


def _describe_store(result: dict[str, Any]) -> str:
    """Format the result of `inspect_store` for the terminal."""
    prompts, sampling = result["prompts"], result["sampling"]
    lines = [
        f"{result['path']}: reference outputs of {result['model']}",
        f"{result['rows']} rows: {prompts['train']} training and {prompts['test']} test prompts × "
        f"{result['samples_per_prompt']}, in {result['shards']} shards; {result['reused']} reused",
        f"sampled at temperature {sampling['temperature']:g}, at most "
        f"{sampling['max_new_tokens']} tokens, precision {result['precision']}",
        "",
        _spread("prompt tokens", result["prompt_length"]),
        _spread("response tokens", result["length"]),
    ]
    if result["reward"]:
        lines.append(_spread("reward", result["reward"]) + f"   by {result['reward']['path']}")
    lines += [
        f"{'EOS rate':<16} {result['eos_rate']:.3f}",
        f"{'mean log-prob':<16} {result['mean_log_prob']:.3f} nats per token",
        f"{'mean entropy':<16} {result['mean_entropy']:.3f} nats per token",
    ]
    for example in result["examples"]:
        end = "" if example["finished"] else ", cut at the length limit"
        reward = "" if example["reward"] is None else f", reward {example['reward']:.2f}"
        facts = (
            f"{example['length']} tokens{end}, "
            f"{example['mean_log_prob']:.2f} nats per token{reward}"
        )
        lines += [
            "",
            f"[{example['split']}] {example['prompt']}",
            f"→ {example['response']}",
            f"  ({facts})",
        ]
    return "\n".join(lines)


def _spread(name: str, spread: dict[str, float]) -> str:
    keys = ("mean", "std", "min", "median", "p95", "max")
    return f"{name:<16} " + "   ".join(f"{key} {spread[key]:.4g}" for key in keys)
