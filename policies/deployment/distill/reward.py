"""Distillation of a reward model: a smaller one learns its scores of responses by regression.

Nobody has judged the responses: the teacher's scores take the place of labels. The loss is the mean
squared error. Where there are test prompts, student and teacher are compared on their stored
outputs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from trl.trainer.sft_config import SFTConfig

from policies.deployment.distill.settings import DistillSettings
from policies.deployment.distill.student import half_of
from policies.deployment.quantization_error import count_agreement
from policies.reference.store import ReferenceStore, open_store, require_training_prompts
from policies.trl_training.train import (
    ending,
    finish,
    require_fitting,
    train,
    trainer_arguments,
    trainer_stage,
)
from reward.scoring.rankings import training_gain
from reward.scoring.scorer import TOKENS_PER_BATCH, member_folders
from reward.scoring.texts import PromptResponses, load_text_reward
from rlhf.errors import InputError
from rlhf.modeling.heads import empty_classifier, reads_pairs
from rlhf.modeling.models import describe_model, load_config, new_reward_model, require_trainable
from rlhf.modeling.readers import Reader, reads_thinking, tokenizer_of
from rlhf.modeling.tokens import encode_prompt, pad_right, tokenizer_fingerprint
from rlhf.parallel.distributed import start
from rlhf.records.ranked import SPLITS
from rlhf.records.schema import Response, Split
from rlhf.run.rundir import StageInputs, require_done

Rewards = list[list[float]]


@dataclass(frozen=True)
class Scored:
    """Responses to each prompt, and the teacher's rewards of them."""

    items: list[PromptResponses]
    rewards: Rewards


def distill_reward(settings: DistillSettings) -> dict[str, Any]:
    """Run the whole stage and return its report; the report of a finished one is only read.

    Raises:
        InputError: the teacher, the student, the outputs or --out cannot be used.
        GuardError: the loss is not a number.
    """
    began = time.monotonic()
    require_trainable(settings.student)
    if reads_pairs(load_config(settings.student)):
        raise InputError(
            f"{settings.student} is an encoder, and only decoders can be students",
            "Give a language model, or a reward model that was made from one.",
        )
    store = open_store(require_done(settings.outputs, "reference", "outputs").outputs)
    require_training_prompts(store)
    given = settings.chat_template_kwargs or store.template_kwargs
    folders = member_folders(settings.teacher)
    teacher, model = describe_model(folders[0], given), describe_model(settings.student, given)
    source = {"path": str(settings.outputs), "hash": store.content_hash}
    inputs: StageInputs = {"teacher": teacher, "model": model, "outputs": source}
    tokenizer = tokenizer_of(model)
    reader = Reader(tokenizer, reads_thinking(folders[0]))
    arguments = trainer_arguments(settings, SFTConfig)  # whose names the shared settings have
    with trainer_stage("distill", settings, arguments, inputs) as run:
        if run.is_done:
            return run.read_report() | {"already_done": True}
        scored = {split: _score(store, split, settings, given) for split in SPLITS}
        rows = _rows(scored["train"], reader)
        lengths = ((len(row["input_ids"]),) for row in rows)
        require_fitting(lengths, settings.max_length, "responses")
        network = _new_student(settings, tokenizer, reader, rows)
        trainer = Trainer(
            model=network,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            data_collator=_collator(int(tokenizer.pad_token_id)),
            compute_loss_func=squared_error,
        )
        use = train(trainer, run, settings, len(rows))
        network = trainer.accelerator.unwrap_model(trainer.model)
        report = {
            "kind": "reward model",
            "outputs": {split: sum(map(len, of.rewards)) for split, of in scored.items()},
            "held_out": _compare_held_out(trainer, scored["test"], reader),
            "normalisation": {"gain": training_gain(settings.teacher)},
            "parameters": {
                "teacher": sum(map(_count_parameters, folders)),
                "student": network.num_parameters(),
            },
            **ending(trainer, settings, inputs, use, began),
        }
        finish(trainer, network, tokenizer, run.model, report)
    return report


def squared_error(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """Σ (student − teacher)² over the responses of an optimizer step, divided by their number.

    Args:
        outputs: of the classifier, with logits (B, 1).
        labels: (B) the teacher's rewards.
        num_items_in_batch: responses of the step in all processes; None: those of this batch.
    """
    squares: Tensor = (outputs.logits.squeeze(-1).float() - labels).square()
    return squares.sum() / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def compare_scores(teacher: Rewards, student: Rewards) -> dict[str, Any]:
    """How near a student's rewards are to the teacher's.

    Returns:
        error: the root of the mean squared difference; spread: the standard deviation of the
        teacher's rewards, which is the error of always saying their mean; pairs: the share of pairs
        of responses to one prompt that both order in the same way.
    """
    theirs, ours = np.concatenate(teacher), np.concatenate(student)
    return {
        "error": float(np.sqrt(np.square(ours - theirs).mean())),
        "spread": float(theirs.std()),
        "pairs": count_agreement(teacher, student),
    }


def stored_responses(store: ReferenceStore, split: Split) -> list[PromptResponses]:
    """The prompts of a split with their stored outputs, as records with the sampled token ids."""
    model = store.manifest["model"]
    return [
        (
            group[0].prompt,
            tuple(
                Response(
                    id=str(row.sample_index),
                    prompt_id=row.prompt.id,
                    text=row.text,
                    model=store.model,
                    tokenizer_fingerprint=model["tokenizer"],
                    token_ids=tuple(row.response_ids),
                    finished=row.finished,
                )
                for row in group
            ),
        )
        for group in store.by_prompt(split)
    ]


def _count_parameters(folder: str) -> int:
    return empty_classifier(load_config(folder)).num_parameters()


def _score(
    store: ReferenceStore, split: Split, settings: DistillSettings, given: dict[str, Any]
) -> Scored:
    """The teacher's rewards of the stored outputs of a split."""
    responses = stored_responses(store, split)
    if not responses:
        return Scored([], [])
    accelerator = start(settings.precision, settings.seed)
    score = load_text_reward(settings.teacher, accelerator, TOKENS_PER_BATCH, given=given)
    return Scored(responses, score(responses))


def _rows(scored: Scored, reader: Reader) -> list[dict[str, Any]]:
    """Every prompt with one response as the student reads them, and the teacher's reward."""
    fingerprint = tokenizer_fingerprint(reader.tokenizer)
    rows = []
    for (prompt, responses), rewards in zip(scored.items, scored.rewards, strict=True):
        ids = encode_prompt(reader.tokenizer, prompt)
        for response, reward in zip(responses, rewards, strict=True):
            read = reader.encode(response, fingerprint, ids)
            rows.append({"input_ids": [*ids, *read], "labels": reward})
    return rows


def _new_student(
    settings: DistillSettings,
    tokenizer: PreTrainedTokenizerBase,
    reader: Reader,
    rows: Sequence[dict[str, Any]],
) -> PreTrainedModel:
    student = new_reward_model(settings.student, int(tokenizer.pad_token_id), settings.seed)
    if settings.half:
        student = half_of(student, [row["input_ids"] for row in rows])
    student.config.reward_bias = 0.0  # the teacher's is in what the student learns
    student.config.reads_thinking = reader.reads_thinking
    return student


def _collator(pad_id: int) -> Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]]:
    """Joins rows into a batch padded on the right."""

    def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        batch = pad_right([row["input_ids"] for row in rows], pad_id)
        labels = torch.tensor([row["labels"] for row in rows], dtype=torch.float32)
        return {"input_ids": batch.ids, "attention_mask": batch.mask.long(), "labels": labels}

    return collate


def _compare_held_out(trainer: Trainer, scored: Scored, reader: Reader) -> dict[str, Any] | None:
    """The student's rewards of held-out responses beside the teacher's; None without any."""
    if not scored.items:
        return None
    return compare_scores(scored.rewards, _predict(trainer, _rows(scored, reader), scored))


def _predict(trainer: Trainer, rows: list[dict[str, Any]], scored: Scored) -> Rewards:
    """The student's rewards of scored responses."""
    flat = np.asarray(trainer.predict(Dataset.from_list(rows)).predictions).reshape(-1)
    offsets = np.cumsum([len(of_prompt) for of_prompt in scored.rewards])
    return [part.tolist() for part in np.split(flat, offsets[:-1])]
