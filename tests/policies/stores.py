"""Reference stores made by hand: what every row holds can be worked out from its numbers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from policies.reference.shards import ReferenceRow, shard_name, write_shard
from policies.reference.summary import write_manifest
from rlhf.records.jsonl import write_json
from rlhf.records.schema import Message, Prompt, Split
from rlhf.run.rundir import RunDir

MODEL = {"path": "models/original", "hash": "weights", "tokenizer": "words"}
REWARD = {"path": "runs/reward", "hash": "rm"}
FACTS = {
    "model": MODEL,
    "sampling": {"temperature": 0.7, "max_new_tokens": 3},
    "stored_top_k": 0,
    "precision": "fp32",
    "attention": "sdpa",
}


def build_row(number: int, sample: int, split: Split, reward: float | None = None) -> ReferenceRow:
    """Response `sample` to prompt `number`: one to three tokens, as likely as the prompt says."""
    length = 1 + (number + sample) % 3
    return ReferenceRow(
        prompt=Prompt.create((Message(role="user", content=f"p{number}"),), split, "test"),
        sample_index=sample,
        prompt_ids=[5] * (2 + number % 2),
        response_ids=[10 + number, *range(20, 19 + length)],
        text=f"answer {number}.{sample}",
        finished=(number + sample) % 2 == 0,
        reused=False,
        log_probs=[-0.5 * (1 + number)] * length,
        log_probs_at_1=[-0.25 * (1 + number)] * length,
        entropy=[1.0 + sample] * length,
        reward=reward,
    )


def build_rows(
    prompts: Sequence[int], samples: int, split: Split, *, rewarded: bool = False
) -> Iterator[ReferenceRow]:
    """All rows of some prompts; their reward is the prompt's number."""
    for number in prompts:
        for sample in range(samples):
            yield build_row(number, sample, split, float(number) if rewarded else None)


def build_store(
    out: Path,
    train: int = 3,
    test: int = 2,
    *,
    samples: int = 2,
    per_shard: int = 2,
    rewarded: bool = False,
) -> Path:
    """A finished stage that holds a store; the prompts of its test split follow on."""
    run = RunDir(out)
    names = []
    for split, numbers in (("train", range(train)), ("test", range(train, train + test))):
        for number, first in enumerate(range(0, len(numbers), per_shard)):
            names.append(shard_name(split, number))
            mine = numbers[first : first + per_shard]
            rows = list(build_rows(mine, samples, split, rewarded=rewarded))
            write_shard(run.outputs / names[-1], rows, REWARD["hash"] if rewarded else None)
    facts = {**FACTS, "reward": REWARD if rewarded else None}
    report = write_manifest(run.outputs, names, facts, samples)
    write_json(run.stage_file, {"stage": "reference", "status": "done", "inputs": {"model": MODEL}})
    write_json(run.report_json, report)
    return run.outputs
