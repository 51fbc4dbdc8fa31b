"""Direct preference optimization (arXiv 2305.18290): trl's `DPOTrainer` inside our run folder.

    L = −log σ(β·[log π(y_w|x)/π_ref(y_w|x) − log π(y_l|x)/π_ref(y_l|x)])

With all weights, trl computes the original model's log-probs of all pairs before the first step;
with an adapter, the original model is the policy with its adapter switched off. No second model is
in memory. Log-probs are at temperature 1, and a response ends as the chat template closes a turn,
or with the tokenizer's end token where that has no special one; also one that was cut at the length
limit.
"""

import shutil
import time
from itertools import chain
from typing import Any

from accelerate import PartialState
from datasets import Dataset, load_from_disk
from transformers import PreTrainedTokenizerBase
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from policies.dpo.pairs import PairCounts, Rows, read_pairs
from policies.dpo.settings import DPOSettings
from policies.trl_training.rows import trl_rows
from policies.trl_training.train import (
    Length,
    count_tokens,
    ending,
    finish,
    forecast_amount,
    held_out,
    require_fitting,
    train,
    trainer_arguments,
    trainer_stage,
)
from rlhf.modeling.adapters import lora_config
from rlhf.modeling.models import describe_model, load_causal_lm, require_trainable
from rlhf.modeling.readers import tokenizer_of
from rlhf.run.rundir import RunDir, StageInputs

KEPT = {  # of a step: the trainer's names and ours; rewards are β · log π/π_ref
    "rewards/chosen": "rewards/chosen",
    "rewards/rejected": "rewards/rejected",
    "rewards/margins": "rewards/margin",
    "rewards/accuracies": "accuracy",
    "logps/chosen": "log_prob/chosen",
    "logps/rejected": "log_prob/rejected",
}
SIDES = ("chosen", "rejected")
PAIRS = "pairs"  # in the folder of checkpoints, while the run works


def optimize_preferences(settings: DPOSettings) -> dict[str, Any]:
    """Run the whole stage and return its report; the report of a finished one is only read.

    Raises:
        InputError: the rankings, the model or --out cannot be used.
        GuardError: the loss is not a number.
    """
    began = time.monotonic()
    require_trainable(settings.model)
    rows, counts, source_hash = read_pairs(settings.rankings)
    model = describe_model(settings.model, settings.chat_template_kwargs)
    tokenizer = tokenizer_of(model)
    lengths = _lengths(rows, tokenizer)
    longest = [max(pair, key=sum) for of in lengths.values() for pair in of]
    require_fitting(longest, settings.max_length, "pairs")
    source = {"path": str(settings.rankings), "hash": source_hash}
    inputs: StageInputs = {"rankings": source, "model": model}
    arguments = _arguments(settings)
    with trainer_stage("dpo", settings, arguments, inputs) as run:
        if run.is_done:
            return run.read_report() | {"already_done": True}
        trainer = _build_trainer(settings, arguments, _on_disk(rows, tokenizer, run), tokenizer)
        use = train(trainer, run, settings, len(rows["train"]), KEPT)
        report = {
            "pairs": counts,
            "held_out": _held_out(trainer),
            "amount": _amount(settings, lengths, counts),
            **ending(trainer, settings, inputs, use, began),
        }
        network = trainer.accelerator.unwrap_model(trainer.model)
        if settings.lora.rank:
            network = network.merge_and_unload()
        finish(trainer, network, tokenizer, run.policy, report)
        if trainer.is_world_process_zero():
            shutil.rmtree(run.checkpoints / PAIRS)
    return report


def _arguments(settings: DPOSettings) -> DPOConfig:
    return trainer_arguments(
        settings,
        DPOConfig,
        loss_type=[settings.loss],
        beta=settings.beta,
        precompute_ref_log_probs=not settings.lora.rank,
        precompute_ref_batch_size=settings.micro_batch_size,
    )


def _lengths(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[Length]]]:
    """Tokens of the prompt and of each response, of every pair of a split."""
    return {
        split: [
            [count_tokens(tokenizer, row["prompt"], row[side][0]["content"]) for side in SIDES]
            for row in of_split
        ]
        for split, of_split in rows.items()
    }


def _amount(
    settings: DPOSettings, lengths: dict[str, list[list[Length]]], counts: PairCounts
) -> dict[str, Any]:
    responses = {split: list(chain(*pairs)) for split, pairs in lengths.items()}
    train = counts["train"]
    return forecast_amount(
        settings,
        responses,
        prompts=train["prompts"],
        held_out=counts["test"].get("prompts", 0),
        pairs=train["pairs"] / train["prompts"],
    )


def _on_disk(rows: Rows, tokenizer: PreTrainedTokenizerBase, run: RunDir) -> dict[str, Dataset]:
    """The pairs as files that all processes read: trl hands what it precomputes on beside them."""
    folder = run.checkpoints / PAIRS
    if PartialState().is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        for split, of_split in rows.items():
            if of_split:
                shown = trl_rows(of_split, tokenizer, SIDES)
                Dataset.from_list(shown).save_to_disk(str(folder / split))
    PartialState().wait_for_everyone()
    return {split: load_from_disk(str(folder / split)) for split, of in rows.items() if of}


def _build_trainer(
    settings: DPOSettings,
    arguments: DPOConfig,
    data: dict[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
) -> DPOTrainer:
    rank = settings.lora.rank
    return DPOTrainer(
        model=load_causal_lm(settings.model),
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data.get("test"),
        processing_class=tokenizer,
        peft_config=lora_config(rank, 2 * rank) if rank else None,
    )


def _held_out(trainer: DPOTrainer) -> dict[str, float] | None:
    """Loss and accuracy on the pairs of test prompts; None where there are none.

    A pair is right where the policy has made the chosen response more likely than the rejected one,
    both against the original model.
    """
    metrics = held_out(trainer)
    if metrics is None:
        return None
    return {"loss": metrics["eval_loss"], "accuracy": metrics["eval_rewards/accuracies"]}
