"""Supervised fine-tuning: trl's `SFTTrainer` inside our run folder.

It learns demonstrations, or the best reference output of each prompt (best-of-n fine-tuning,
rejection sampling in arXiv 2307.09288, section 3.2.3). The loss is that of the answers' tokens
alone. Where there are test prompts, the held-out loss is measured before and after.
"""

import time
from itertools import chain
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from policies.sft.best_of import Choice, choose_best, open_best_of
from policies.sft.demonstrations import Rows, read_demonstrations
from policies.sft.settings import SFTSettings
from policies.trl_training.rows import trl_rows
from policies.trl_training.train import (
    count_tokens,
    ending,
    finish,
    forecast_amount,
    held_out_loss,
    require_fitting,
    train,
    trainer_arguments,
    trainer_stage,
)
from rlhf.modeling.models import describe_model, load_causal_lm, require_trainable
from rlhf.modeling.readers import tokenizer_of
from rlhf.run.rundir import StageInputs


def fine_tune(settings: SFTSettings) -> dict[str, Any]:
    """Run the whole stage and return its report; the report of a finished one is only read.

    Raises:
        InputError: the demonstrations, the reference outputs, the model or --out cannot be used.
        GuardError: the loss is not a number.
    """
    began = time.monotonic()
    require_trainable(settings.model)
    rows, inputs, choice = _read_examples(settings)
    tokenizer = tokenizer_of(inputs["model"])
    lengths = {
        split: [
            count_tokens(tokenizer, row["prompt"], row["completion"][0]["content"])
            for row in of_split
        ]
        for split, of_split in rows.items()
    }
    require_fitting(chain(*lengths.values()), settings.max_length, "demonstrations")
    arguments = trainer_arguments(settings, SFTConfig)
    with trainer_stage("sft", settings, arguments, inputs) as run:
        if run.is_done:
            return run.read_report() | {"already_done": True}
        trainer = _build_trainer(settings, arguments, rows, tokenizer)
        before = held_out_loss(trainer)
        use = train(trainer, run, settings, len(rows["train"]))
        after = held_out_loss(trainer)
        report = {
            "demonstrations": {split: len(of_split) for split, of_split in rows.items()},
            **({"best_of": choice.counts} if choice else {}),
            "held_out_loss": {"before": before, "after": after},
            "amount": forecast_amount(settings, lengths),
            **ending(trainer, settings, inputs, use, began),
        }
        network = trainer.accelerator.unwrap_model(trainer.model)
        finish(trainer, network, tokenizer, run.model, report)
    return report


def _read_examples(settings: SFTSettings) -> tuple[Rows, StageInputs, Choice | None]:
    """The examples, their sources, and how they were chosen among the reference outputs."""
    given = settings.chat_template_kwargs
    if settings.best_of is None:
        assert settings.demonstrations is not None
        rows, source_hash = read_demonstrations(settings.demonstrations)
        source = {"path": str(settings.demonstrations), "hash": source_hash}
        model = describe_model(settings.model, given)
        return rows, {"demonstrations": source, "model": model}, None
    store = open_best_of(settings.best_of)
    choice = choose_best(store)
    model = describe_model(settings.model, given or store.template_kwargs)
    source = {"path": str(settings.best_of), "hash": store.content_hash}
    reward = {name: store.manifest["reward"][name] for name in ("path", "hash")}
    return choice.rows, {"reference": source, "reward": reward, "model": model}, choice


def _build_trainer(
    settings: SFTSettings, arguments: SFTConfig, rows: Rows, tokenizer: PreTrainedTokenizerBase
) -> SFTTrainer:
    data = {
        split: Dataset.from_list(trl_rows(of_split, tokenizer, ["completion"]))
        for split, of_split in rows.items()
        if of_split
    }
    return SFTTrainer(
        model=load_causal_lm(settings.model),
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data.get("test"),
        processing_class=tokenizer,
    )
