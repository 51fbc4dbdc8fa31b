"""trl prepares exported datasets as they are: pairs with their margin, and KTO labels."""

from collections.abc import Iterator

import pytest
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from labeling_app.data_io.exporting import export
from rlhf.records.schema import Ranking


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


# trl reads the old name of this property itself
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_kto_trainer_takes_thumbs(store, exported, tiny_model, tmp_path):
    for record in list(store.ranked_prompts()):
        for response, flag in zip(record.responses, ("thumbs-up", "thumbs-down"), strict=False):
            thumb = Ranking(
                id=response.id, prompt_id=record.prompt.id, annotator="bob", kind="human",
                tiers=((response.id,),), flags=(flag,),
            )  # fmt: skip
            store.add_rankings([thumb])
    export(store, tmp_path / "out", "kto", annotators=["bob"])
    files = str(tmp_path / "out" / "train.jsonl")
    cache = str(tmp_path / "cache")
    dataset = load_dataset("json", data_files=files, split="train", cache_dir=cache)
    trainer = KTOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model),
        args=KTOConfig(
            output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", bf16=False,
            activation_checkpointing=False, disable_tqdm=True, max_steps=1,
            per_device_train_batch_size=4, save_strategy="no",
        ),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )  # fmt: skip
    assert sorted(trainer.train_dataset["label"]) == [False] * 4 + [True] * 4
    assert trainer.train().training_loss > 0
