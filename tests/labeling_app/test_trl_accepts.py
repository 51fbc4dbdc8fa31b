"""trl's RewardTrainer prepares an exported dataset as it is, margin included."""

from collections.abc import Iterator

import pytest
import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from labeling_app.exporting import export
from rlhf.records import Ranking


@pytest.fixture
def exported(store, make_prompt, make_responses, tmp_path) -> Iterator[str]:
    prompts = [make_prompt(f"question {n}") for n in range(4)]
    store.add_prompts(prompts)
    for prompt in prompts:
        responses = make_responses(prompt, ["good", "fair", "bad"])
        store.add_responses(responses)
        tiers = tuple((response.id,) for response in responses)
        ranking = Ranking(
            id=prompt.id, prompt_id=prompt.id, annotator="ann", kind="human", tiers=tiers,
            strengths=(1, 2),
        )  # fmt: skip
        store.add_rankings([ranking])
    return str(tmp_path)


@pytest.mark.parametrize("format", ["trl", "trl-conversational"])
def test_reward_trainer_takes_it(store, exported, tiny_model, tmp_path, format):
    export(store, tmp_path / "out", format)
    files = str(tmp_path / "out" / "train.jsonl")
    cache = str(tmp_path / "cache")
    dataset = load_dataset("json", data_files=files, split="train", cache_dir=cache)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", bf16=False,
            activation_checkpointing=False, disable_tqdm=True, max_steps=1,
            per_device_train_batch_size=4, save_strategy="no",
        ),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )  # fmt: skip
    prepared = trainer.train_dataset
    assert len(prepared) == 12
    assert sorted(set(prepared["margin"])) == [1.0, 2.0, 3.0]
    assert all(row["chosen_ids"] != row["rejected_ids"] for row in prepared)
    assert trainer.train().training_loss > 0
