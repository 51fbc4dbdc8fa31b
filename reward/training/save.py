"""After the last training step: fit the scale, save the model, write the report."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reward.data.annotators import weigh_annotators
from reward.data.loading import Data
from reward.model.normalize import Scale, fit_scale, fold_into_head
from reward.report.health import Verdict, describe_health, worst
from reward.report.health_page import write_page
from reward.settings import RewardSettings
from reward.training.evaluation import Best
from reward.training.origin import describe_origin
from reward.training.step import TrainState, score_groups
from rlhf.errors import GuardError, InputError
from rlhf.modeling.adapters import each_merged_weight, merged_weights, save_adapters
from rlhf.modeling.heads import empty_reward_model, head_name
from rlhf.modeling.models import load_reward_model, require_reward_model, save_model
from rlhf.parallel.gathered_model import gather_on_main, is_shard
from rlhf.parallel.master_weights import float32_model
from rlhf.parallel.sharding import unwrap
from rlhf.parallel.weight_files import Gather, WeightFiles
from rlhf.planning.forecast import stride
from rlhf.records.jsonl import write_json
from rlhf.records.ranked import find_prompts
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir

CLASSIFIER_PREFIX = "classifier."
REFERENCE_OUTPUTS = "the original model's responses in the dataset"
HELD_OUT = "held-out ranked responses"
MIN_REFERENCE_OUTPUTS = 32  # enough for a standard deviation to within an eighth


def measure_scale(
    state: TrainState, data: Data, held_out: list[list[float]]
) -> tuple[Scale, list[float]]:
    """The scale, and the scaled rewards of the responses that it was fitted on.

    Those are reference outputs if the dataset has MIN_REFERENCE_OUTPUTS, else held-out responses.
    """
    outputs = sum(len(group.responses) for group in data.reference)
    if outputs >= MIN_REFERENCE_OUTPUTS:
        source, rows = REFERENCE_OUTPUTS, score_groups(state, data.reference)
    else:
        too_few = f" (the original model has only {outputs} in the dataset)" if outputs else ""
        source, rows = HELD_OUT + too_few, held_out
    raw_rewards = [value - state.bias for row in rows for value in row]
    scale = fit_scale(raw_rewards, source)
    return scale, [value * scale.gain + scale.bias for value in raw_rewards]


def save_result(
    state: TrainState, run: RunDir, tokenizer: PreTrainedTokenizerBase, scale: Scale
) -> None:
    """Save a plain Hugging Face folder, with the gain in its head and the bias in its config.

    Adapters are merged into its weights, and also saved separately, for a shared base.

    Raises:
        GuardError: the saved weights differ when loaded again.
    """
    accelerator, module = state.accelerator, unwrap(float32_model(state.module, state.optimizer))
    classifier = module.classifier
    named = module.state_dict(keep_vars=True).items()
    weights = {name.removeprefix(CLASSIFIER_PREFIX): value for name, value in named}
    head = head_name(classifier)
    plain = empty_reward_model(classifier.config, scale.bias)
    if any(map(is_shard, weights.values())):
        files = WeightFiles(
            accelerator, plain, partial(scaled_weights, classifier, weights, scale.gain)
        )
        save_model(plain, tokenizer, run.model, files=files)
        require_same_files(run.model, files)
    elif accelerator.is_main_process:
        whole = {name: value.detach() for name, value in weights.items()}
        folded = fold_into_head(merged_weights(classifier, whole), head, scale.gain)
        save_model(plain, tokenizer, run.model, folded)
        require_same_weights(run.model, folded)
    if hasattr(classifier, "peft_config"):
        gathered = {
            name: gather_on_main(accelerator, value) if value.requires_grad else value
            for name, value in weights.items()
        }
        if accelerator.is_main_process:
            origin = run.read_stage()["inputs"]["model"]
            save_adapters(run.model, classifier, fold_into_head(gathered, head, scale.gain), origin)


def scaled_weights(
    classifier: PreTrainedModel, weights: dict[str, Tensor], gain: float, gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """The weights one by one, with adapters merged and the gain in the head."""
    head = head_name(classifier)
    for name, value in each_merged_weight(classifier, weights, gather):
        yield from fold_into_head({name: value.float()}, head, gain).items()


def require_same_files(folder: Path, files: WeightFiles) -> None:
    """As `require_same_weights`, of a sharded model; all processes call it.

    The model is loaded without its values, which are compared one by one.

    Raises:
        GuardError: a weight differs.
        InputError: a weight is missing.
    """
    wrong = files.find_differences(folder)
    if files.accelerator.is_main_process:
        require_reward_model(str(folder))
        _refuse(folder, wrong)


def require_same_weights(folder: Path, state: dict[str, Any]) -> None:
    """Load a saved reward model and compare every weight, including the head.

    Raises:
        GuardError: a weight is missing or differs.
    """
    loaded = load_reward_model(str(folder)).state_dict()
    wrong = [
        name
        for name, value in state.items()
        if name not in loaded or not torch.equal(loaded[name], value.to("cpu", loaded[name].dtype))
    ]
    _refuse(folder, wrong)


def _refuse(folder: Path, wrong: list[str]) -> None:
    if wrong:
        raise GuardError(
            f"{folder} does not load as it was saved: {len(wrong)} weights differ, such "
            f"as {wrong[0]}",
            "Do not use it; try another version of transformers and --resume.",
        )


def describe_run(
    settings: RewardSettings, data: Data, run: RunDir, scale: Scale, best: Best | None
) -> dict[str, Any]:
    """The report's entries on origin, data, annotators, loss, best step, scale and time."""
    rows = read_metrics(run.metrics_file)
    return {
        "started_from": describe_origin(run.read_stage()["inputs"]["model"]),
        "held_out": {"prompts": len(data.held_out), "from": data.held_out_source},
        "loss": {
            "first": rows[0]["loss"] if rows else None,
            "last": rows[-1]["loss"] if rows else None,
            "steps": len(rows),
        },
        "best": best and {"step": best.step, "loss": best.loss, "prompts": len(data.validation)},
        "normalisation": asdict(scale),
        "counts": data.counts,
        "trained_on": {
            "prompts": len(data.train),
            "labels": int(data.train.numbers("labels").sum()),
        },
        "annotators": weigh_annotators(data.train, settings.loss, data.annotators),
        "amount": forecast_amount(settings, data, len(rows)),
        "training_seconds": round(sum(row["seconds"] for row in rows), 1),
    }


def forecast_amount(settings: RewardSettings, data: Data, steps: int) -> dict[str, Any]:
    """The `rlhf.planning.forecast.Amount` that the training has read, for forecasts of others."""
    groups = [data.train[index] for index in range(0, len(data.train), stride(len(data.train)))]
    responses = [response for group in groups for response in group.responses]
    return {
        "prompts": len(data.train),
        "held_out": len(data.held_out),
        "responses": len(responses) / max(len(groups), 1),
        "prompt_tokens": sum(len(group.prompt) for group in groups) / max(len(groups), 1),
        "response_tokens": sum(map(len, responses)) / max(len(responses), 1),
        "epochs": steps / max(ceil(len(data.train) / settings.batch.prompts), 1),
    }


def write_report(
    run: RunDir,
    report: dict[str, Any],
    verdicts: list[Verdict],
    reference: list[float],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write report.json and report.html: the report, its health numbers and worst disagreements.

    Prompts are shown as the export has them, without what the chat template adds.
    """
    prompts = _find_worst(run, verdicts)

    def text(ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    def texts(verdict: Verdict) -> dict[str, str]:
        responses, pair = verdict.group.responses, verdict.pair
        return {
            "prompt": prompts.get(verdict.group.prompt_id) or text(verdict.group.prompt),
            "preferred": text(responses[pair.first]),
            "other": text(responses[pair.second]),
        }

    full = {**report, **describe_health(verdicts, texts)}
    write_page(run.report_html, full, reference)
    write_json(run.report_json, full)


def _find_worst(run: RunDir, verdicts: list[Verdict]) -> dict[str, str]:
    """The texts of the prompts of the worst disagreements, by id."""
    ids = {verdict.group.prompt_id for verdict in worst(verdicts)}
    try:
        prompts = find_prompts(Path(run.inputs["rankings"]["path"]), ids)
    except InputError:  # the export was moved while the model trained
        return {}
    return {name: prompt.text for name, prompt in prompts.items()}
