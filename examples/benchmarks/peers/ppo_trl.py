"""trl 1.12's PPOTrainer on the work of ppo.py, in an environment of its own; ppo.py starts it.

Its one argument is a JSON object: model, reward, prompts (a JSON file of token ids), gold (the
file of the sentiment signal) and settings. The last line of stdout is what each step took, and what
its samples earned. The phases are told apart by wrapping what samples a batch and what whitens the
advantages, which comes between scoring and update; a log ends a step.

What trl lets a user choose is chosen for speed: frozen models in bf16, one sampling batch, no
sample generations, no saving.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

Job = dict[str, Any]


class Watch(TrainerCallback):
    """Notes when each phase of a step ends, and what the step sampled."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self.job = job
        self.tokenizer = tokenizer
        self.gold = load_gold(job["gold"])
        self.steps: list[dict[str, float]] = []
        self.now: dict[str, float] = {}
        self.last = time.time()

    def lap(self, name: str) -> None:
        """Give the time since the last call to a phase."""
        now = time.time()
        self.now[name], self.last = now - self.last, now

    def sampled(self, sequences: torch.Tensor, context: int) -> None:
        """A batch was sampled."""
        self.lap("sample")
        end = self.tokenizer.eos_token_id
        rows = [
            row[: row.index(end)] if end in row else row for row in sequences[:, context:].tolist()
        ]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        self.now["gold"] = sum(self.gold("", text.strip()) for text in texts) / len(texts)

    def scored(self, mask: torch.Tensor) -> None:
        """Log-probs, values, rewards and advantages are there."""
        self.lap("score")
        self.now["length"] = float(mask.sum() / len(mask))

    def on_log(self, args: Any, state: Any, control: Any, logs: Job, **rest: Any) -> None:
        """A step is finished."""
        self.lap("update")
        names = {"objective/kl": "kl", "objective/scores": "reward"}
        metrics = {short: logs[name] for name, short in names.items()}
        metrics["seconds"] = sum(self.now[name] for name in ("sample", "score", "update"))
        metrics["wall"] = self.last - self.job["began"]
        self.steps.append({**self.now, **metrics})
        print(json.dumps(self.steps[-1]), file=sys.stderr)


def load_gold(file: str) -> Any:
    """The signal in a file, which this environment does not know as a package."""
    spec = importlib.util.spec_from_file_location("gold", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def listen(watch: Watch) -> None:
    """Wrap the functions of the trainer's module that begin and end phases."""
    sample, whiten = ppo_trainer.batch_generation, ppo_trainer.masked_whiten

    def batch_generation(model: Any, queries: Any, *rest: Any) -> Any:
        watch.last = time.time()
        batch = sample(model, queries, *rest)
        watch.sampled(batch[0], queries.shape[1])
        return batch

    def masked_whiten(values: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        whitened = whiten(values, mask, *rest, **named)
        watch.scored(mask)
        return whitened

    ppo_trainer.batch_generation, ppo_trainer.masked_whiten = batch_generation, masked_whiten


def train(job: Job) -> list[dict[str, float]]:
    """Build the trainer and run it."""
    tokenizer = AutoTokenizer.from_pretrained(
        job["reward"], padding_side="left", trust_remote_code=False
    )
    watch = Watch(job, tokenizer)
    listen(watch)
    trained = torch.bfloat16 if job["pure_bf16"] else torch.float32
    frozen = torch.bfloat16 if job["bf16"] else torch.float32

    def reward_model(dtype: torch.dtype) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            job["reward"], dtype=dtype, trust_remote_code=False
        )

    given = job["settings"]
    episodes, micro_batch = given["batch.episodes_per_step"], given["batch.micro_batch_size"]
    config = PPOConfig(
        output_dir=job["out"],
        total_episodes=given["steps"] * episodes,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=episodes // micro_batch,
        local_rollout_forward_batch_size=episodes,
        num_ppo_epochs=given["optim.epochs"],
        response_length=job["response"],
        temperature=job["temperature"],
        missing_eos_penalty=given["rewards.missing_eos_penalty"] or None,
        learning_rate=given["optim.learning_rate"],
        kl_coef=job["kl"],
        stop_token="eos",
        adam_beta2=0.95,
        adam_epsilon=1e-5,
        weight_decay=0.0,
        optim="adamw_torch_fused",
        bf16=job["bf16"] and not job["pure_bf16"],
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        seed=given["seed"],
    )
    prompts = json.loads(Path(job["prompts"]).read_text(encoding="utf-8"))
    PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=trained, trust_remote_code=False
        ),
        ref_model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=frozen, trust_remote_code=False
        ),
        reward_model=reward_model(frozen),
        value_model=reward_model(trained),
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        callbacks=[watch],
    ).train()
    return watch.steps


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
