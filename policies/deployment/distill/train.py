"""On-policy distillation (arXiv 2306.13649): trl's `GKDTrainer` inside our run folder.

The student minimizes a divergence between the teacher's and its own distribution of every next
token, in part of the batches of its own answers, in the others of stored outputs. Both models read
the same tokens. trl divides a batch's sum by the number of its stored tokens, also where the
student answers. Where there are test prompts, the divergence on their stored outputs is measured
before and after.
"""

import time
import warnings
from dataclasses import replace
from itertools import chain
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.deployment.distill.settings import DistillSettings
from policies.deployment.distill.student import half_of
from policies.reference.store import ReferenceStore, open_store, require_training_prompts
from policies.trl_training.train import (
    Length,
    ending,
    finish,
    forecast_amount,
    held_out_loss,
    require_fitting,
    train,
    trainer_arguments,
    trainer_stage,
)
from rlhf.errors import InputError
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.heads import empty_causal_lm
from rlhf.modeling.models import (
    describe_model,
    load_causal_lm,
    load_config,
    policy_folder,
    require_trainable,
)
from rlhf.modeling.readers import tokenizer_of
from rlhf.planning.flops import count_flops
from rlhf.records.ranked import SPLITS
from rlhf.run.rundir import StageInputs, require_done

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that trl's experimental part may change
    from trl.experimental.gkd import GKDConfig, GKDTrainer

Rows = dict[str, list[dict[str, Any]]]


def distill(settings: DistillSettings) -> dict[str, Any]:
    """Run the whole stage and return its report; the report of a finished one is only read.

    Raises:
        InputError: the teacher, the student, the outputs or --out cannot be used.
        GuardError: the loss is not a number.
    """
    began = time.monotonic()
    require_trainable(settings.student)
    store = open_store(require_done(settings.outputs, "reference", "outputs").outputs)
    require_training_prompts(store)
    settings = sampling_like(settings, store)
    given = settings.chat_template_kwargs or store.template_kwargs
    teacher = describe_model(policy_folder(settings.teacher, "--teacher"), given)
    model = describe_model(settings.student, given)
    require_one_vocabulary(store, teacher, model)
    rows = _read_rows(store)
    lengths = {split: list(map(_length, of_split)) for split, of_split in rows.items()}
    require_fitting(chain(*lengths.values()), settings.max_length, "stored outputs")
    source = {"path": str(settings.outputs), "hash": store.content_hash}
    inputs: StageInputs = {"teacher": teacher, "model": model, "outputs": source}
    arguments = _arguments(settings)
    with trainer_stage("distill", settings, arguments, inputs) as run:
        if run.is_done:
            return run.read_report() | {"already_done": True}
        tokenizer = tokenizer_of(model)
        trainer = _build_trainer(settings, arguments, rows, tokenizer, teacher["path"])
        before = held_out_loss(trainer)
        use = train(trainer, run, settings, len(rows["train"]))
        network = trainer.accelerator.unwrap_model(trainer.model)
        report = {
            "kind": "policy",
            "outputs": {split: len(of_split) for split, of_split in rows.items()},
            "divergence": {"before": before, "after": held_out_loss(trainer)},
            "parameters": {
                "teacher": count_parameters(teacher["path"]),
                "student": network.num_parameters(),
            },
            "amount": _amount(settings, lengths, store),
            **ending(trainer, settings, inputs, use, began),
        }
        finish(trainer, network, tokenizer, run.policy, report)
    return report


def sampling_like(settings: DistillSettings, store: ReferenceStore) -> DistillSettings:
    """The settings with the sampling of the stored outputs where none is given."""
    stored = store.sampling
    return replace(
        settings,
        temperature=settings.temperature or stored.temperature,
        max_new_tokens=settings.max_new_tokens or stored.max_new_tokens,
    )


def count_parameters(folder: str) -> int:
    """The parameters of a language model, tied ones once; no weights are loaded."""
    return empty_causal_lm(load_config(folder)).num_parameters()


def require_one_vocabulary(
    store: ReferenceStore, teacher: dict[str, str], student: dict[str, str]
) -> None:
    """Refuse models that do not read the stored tokens alike.

    Raises:
        InputError: tokenizers, chat templates or sizes of the vocabulary differ.
    """
    for model in (store.manifest["model"], student):
        if model["tokenizer"] != teacher["tokenizer"]:
            raise InputError(
                f"{model['path']} and the teacher {teacher['path']} have different tokenizers or "
                f"chat templates ({model['tokenizer']}, {teacher['tokenizer']})",
                "Distillation compares the probabilities of tokens: give a --student and --outputs "
                "of the teacher's family.",
            )
    sizes = [
        load_config(description["path"]).get_text_config().vocab_size
        for description in (teacher, student)
    ]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"The teacher has {sizes[0]} rows in its output matrix, {student['path']} has "
            f"{sizes[1]}",
            "Give a --student with as many.",
        )


def _read_rows(store: ReferenceStore) -> Rows:
    """Every stored output with its prompt, as the token ids that were sampled."""
    return {
        split: [
            {
                "prompt": "",  # trl's collator wants the column, and takes the ids
                "input_ids": [*row.prompt_ids, *row.response_ids],
                "completion_mask": [0] * len(row.prompt_ids) + [1] * len(row.response_ids),
            }
            for group in store.by_prompt(split)
            for row in group
        ]
        for split in SPLITS
    }


def _length(row: dict[str, Any]) -> Length:
    response_tokens = sum(row["completion_mask"])
    return len(row["input_ids"]) - response_tokens, response_tokens


def _amount(
    settings: DistillSettings, lengths: dict[str, list[Length]], store: ReferenceStore
) -> dict[str, Any]:
    prompts = {split: len(store.by_prompt(split)) for split in SPLITS}
    return forecast_amount(
        settings,
        lengths,
        prompts=prompts["train"],
        held_out=prompts["test"],
        samples=store.manifest["samples_per_prompt"],
        on_policy=settings.on_policy,
    )


def _arguments(settings: DistillSettings) -> GKDConfig:
    return trainer_arguments(
        settings,
        GKDConfig,
        lmbda=settings.on_policy,
        beta=settings.divergence,
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
    )


def _build_trainer(
    settings: DistillSettings,
    arguments: GKDConfig,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    teacher: str,
) -> GKDTrainer:
    student: PreTrainedModel = load_causal_lm(settings.student)
    if settings.half:
        student = half_of(student, [row["input_ids"] for row in rows["train"]])
    student.generation_config.eos_token_id = list(end_token_ids(tokenizer))
    frozen = load_causal_lm(teacher).requires_grad_(False)
    count_flops(frozen)
    data = {split: Dataset.from_list(of) for split, of in rows.items() if of}
    return GKDTrainer(
        model=student,
        teacher_model=frozen,
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data.get("test"),
        processing_class=tokenizer,
    )
