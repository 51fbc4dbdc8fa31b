"""`rlhf quantize`: fewer bits a weight, kept only if little is lost.

The run folder appears when everything in it is finished; a refused one never does.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.deployment.forms import linear_layers, quantize_weights
from policies.deployment.model_folders import find_folders
from policies.deployment.quantization_error import compare_policies, compare_reward_models
from policies.deployment.settings import QuantizeSettings
from policies.reference.prompts import load_prompts
from reward.scoring.files import require_new
from reward.scoring.rankings import training_gain
from rlhf.errors import ConfigError, GuardError, InputError
from rlhf.modeling.models import (
    WEIGHTS,
    describe_model,
    in_memory,
    is_reward_model,
    load_causal_lm,
    load_config,
    load_reward_model,
    save_model,
)
from rlhf.modeling.readers import tokenizer_of
from rlhf.modeling.weights.whole import quantization_of
from rlhf.parallel.distributed import start_alone
from rlhf.planning.price import cost_of
from rlhf.records.jsonl import new_folder, write_json, write_jsonl
from rlhf.records.schema import RankedPrompt
from rlhf.run.metrics import progress
from rlhf.run.rundir import StageInputs, open_stage, stage_status

REMEDY = "Nothing was written. Use a form with more bits, or allow more."


def quantize(settings: QuantizeSettings) -> dict[str, Any]:
    """Run the whole stage and return its report.

    Raises:
        InputError: the model, the prompts or --out cannot be used.
        GuardError: more is lost than the settings allow; nothing is left in --out.
    """
    began = time.monotonic()
    require_new(settings.out)
    model = find_model(settings)
    is_reward = is_reward_model(model["path"])
    records, source = read_held_out(settings, is_reward=is_reward)
    inputs: StageInputs = {"model": model, "prompts": source}
    accelerator = start_alone(settings.precision, settings.seed)
    with new_folder(settings.out) as partial:
        run = open_stage(partial, "quantize", settings, inputs, resume=False)
        with stage_status(run):
            folder = run.model if is_reward else run.policy
            _write_weights(model, folder, settings, is_reward=is_reward)
            quantized = describe_model(str(folder))
            if is_reward:
                comparison = compare_reward_models(accelerator, model, quantized, records)
            else:
                prompts = [record.prompt for record in records]
                comparison, responses = compare_policies(
                    accelerator, model, quantized, prompts, settings
                )
                write_jsonl(run.answers, responses)
            require_little_lost(comparison, settings)
            report = {
                "form": settings.to,
                "kind": "reward model" if is_reward else "policy",
                "prompts": len(records),
                "bytes": {
                    "before": weight_bytes(Path(model["path"])),
                    "after": weight_bytes(folder),
                },
                **comparison,
                **({"normalisation": {"gain": training_gain(settings.run)}} if is_reward else {}),
                "cost": cost_of(run, settings.price_per_hour),
                "seed": settings.seed,
                "inputs": inputs,
                "seconds": round(time.monotonic() - began, 1),
            }
            write_json(run.report_json, report)
    return report


@dataclass(frozen=True)
class Loss:
    """Points that were lost, and of what."""

    points: float
    measure: str


def lost_points(comparison: Mapping[str, Any]) -> list[Loss]:
    """The loss of a report in points: of win rate below 50, or of pairs ordered as before."""
    losses = []
    if "win_rate" in comparison:
        rate = comparison["win_rate"]
        losses.append(Loss(50 - 100 * rate["value"], f"win rate on {rate['n']} prompts"))
    if "pairs" in comparison:
        pairs = comparison["pairs"]
        losses.append(
            Loss(
                100 - 100 * pairs["agreement"],
                f"agreement on {pairs['pairs']} pairs of responses",
            )
        )
    return losses


def find_model(settings: QuantizeSettings) -> dict[str, str]:
    """The description of the model to quantize, by its run or its folder.

    Raises:
        InputError: there is no such model, its stage did not finish, it is an ensemble, or it is
            quantized already.
        ConfigError: --reward judges policies, and this is a reward model.
    """
    name = settings.run
    folder, *other_folders = find_folders(name)
    if other_folders:
        raise InputError(
            f"{name} is an ensemble of {1 + len(other_folders)} reward models",
            f"Quantize one of them, such as {other_folders[0]}.",
        )
    if quantization_of(load_config(folder)) is not None:
        raise InputError(
            f"{name} is quantized already", "Give the model that `rlhf quantize` was given."
        )
    if settings.reward and is_reward_model(folder):
        raise ConfigError(
            f"--reward judges a policy's answers, and {name} is a reward model",
            "Leave --reward out.",
        )
    return describe_model(folder, settings.chat_template_kwargs)


def read_held_out(
    settings: QuantizeSettings, *, is_reward: bool
) -> tuple[list[RankedPrompt], dict[str, str]]:
    """The prompts to compare on, and where they come from; test prompts where the source says so.

    Raises:
        InputError: there are none, or none with two responses for a reward model to order.
    """
    path = settings.prompts
    records, content_hash = load_prompts(path)
    test = [record for record in records if record.prompt.split == "test"]
    if path.is_dir() or test:  # a file may have no splits
        records = test
    if is_reward:
        records = [record for record in records if len(record.responses) > 1]
    if not records:
        noun = "test prompts" if path.is_dir() else "prompts"
        having = " with two responses" if is_reward else ""
        raise InputError(
            f"{path} has no {noun}{having} to compare on",
            "Give another --prompts: an export with a test split, "
            + ("with responses." if is_reward else "or a JSON Lines file of prompts."),
        )
    return records[: settings.num_prompts], {"path": str(path), "hash": content_hash}


def require_little_lost(comparison: Mapping[str, Any], settings: QuantizeSettings) -> None:
    """Refuse a quantized model that has lost more than the settings allow.

    Raises:
        GuardError: names what was lost, and how much.
    """
    if comparison.get("pairs", {"pairs": 1})["pairs"] == 0:
        raise GuardError(
            "The reward model gives all responses to a prompt the same reward: there is no order "
            "to lose",
            "Nothing was written. Give the model that training has finished, or other --prompts.",
        )
    for loss in lost_points(comparison):
        if loss.points > settings.max_loss:
            raise GuardError(
                f"{settings.to} loses {loss.points:.1f} points of {loss.measure}, more than "
                f"--max-loss {settings.max_loss:g}",
                REMEDY,
            )
    change = comparison.get("log_prob", {"mean": 0.0})["mean"]
    if change > settings.max_log_prob_change:
        raise GuardError(
            f"{settings.to} changes the log-prob of a token by {change:.3f} nats on average, more "
            f"than --max-log-prob-change {settings.max_log_prob_change:g}",
            REMEDY,
        )


def _write_weights(
    model: dict[str, str], folder: Path, settings: QuantizeSettings, *, is_reward: bool
) -> None:
    load = load_reward_model if is_reward else load_causal_lm
    with in_memory(load(model["path"])) as network:
        with progress("rounding layers", len(linear_layers(network))) as bar:
            quantize_weights(network, settings.to, bar.advance)
        save_model(network, tokenizer_of(model), folder)


def weight_bytes(folder: Path) -> int:
    """The size of a model's weights on disk; 0 of a model on the hub."""
    return sum(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern))
