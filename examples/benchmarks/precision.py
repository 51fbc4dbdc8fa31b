"""How far two readings of one response differ in bf16, and what an update costs.

Samples responses of SmolLM2-135M in bf16, scores them as `rlhf reference` does (weights held in
bf16) and as `rlhf ppo` does (float32 weights under autocast, other batches), and times a gradient.

    python -P examples/benchmarks/precision.py [--quick] [--json]

-P, as beside this file lies a reward.py that is not the package. To compare two commits, set
PYTHONPATH to one checkout and the other.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from policies.reference.audit import score_responses
from policies.sampling.generate import GenerateSampler, encode_prompts, sample_responses
from rlhf.modeling.log_probs import Sequences, response_log_probs
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import load_tokenizer, pad_left, pad_right
from rlhf.parallel.distributed import start
from rlhf.records.jsonl import read_jsonl
from rlhf.records.schema import Message, Prompt, Sampling

MODEL = "models/SmolLM2-135M-Instruct"
PROMPTS = Path("examples/evidence/primed/prompts.jsonl")
SAMPLING = Sampling(temperature=0.8, max_new_tokens=24, seed=0)


def main() -> None:
    """Measure, and print a line for people or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 prompts in place of 32")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    choices = parser.parse_args()
    result = measure(8 if choices.quick else 32)
    print(json.dumps(result) if choices.json else describe(result))


def measure(size: int) -> dict[str, Any]:
    """Differences of log-probs in nats a token, and seconds of a forward and backward pass."""
    accelerator, tokenizer = start("bf16", 0), load_tokenizer(MODEL)
    policy = load_causal_lm(MODEL).eval()
    original = load_causal_lm(MODEL, torch.bfloat16).eval()
    prompts = encode_prompts(tokenizer, policy.config, read_prompts(size), 24)
    samples = sample_responses(
        GenerateSampler(accelerator), policy, tokenizer, prompts, SAMPLING, 16
    )
    responses = [sample.token_ids for sample in samples]
    stored = score_responses(accelerator, original, tokenizer, prompts, responses, 0.8, 16)
    again = score_responses(accelerator, policy, tokenizer, prompts, responses, 0.8, 6)
    sampler = [torch.tensor(sample.log_probs) for sample in samples]
    gap = (torch.cat(stored) - torch.cat(again)).abs()
    batch = Sequences(pad_left(prompts[:8], 0), pad_right(responses[:8], 0))
    return {
        "value": float(gap.mean()),
        "largest": float(gap.max()),
        "sampler_gap": float((torch.cat(sampler) - torch.cat(again)).abs().mean()),
        "update_seconds": statistics.median(seconds(accelerator, policy, batch) for _ in range(3)),
        "tokens": len(gap),
        "runs": 3,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def read_prompts(size: int) -> Sequence[Prompt]:
    """Prompts from all over the file."""
    rows = list(read_jsonl(PROMPTS))
    chosen = rows[:: len(rows) // size][:size]
    return [
        Prompt.create(tuple(Message(**message) for message in row["messages"]), row["split"], "")
        for row in chosen
    ]


def seconds(accelerator: Any, policy: Any, batch: Sequences) -> float:
    """A gradient of the log-probs of eight responses, as in an update."""
    begun = time.perf_counter()
    with accelerator.autocast():
        log_probs = response_log_probs(policy, batch, 0.8)
    log_probs.first(batch.responses.mask).sum().backward()
    policy.zero_grad()
    return time.perf_counter() - begun


def describe(result: dict[str, Any]) -> str:
    """One line."""
    return (
        f"stored and recomputed log-probs differ by {result['value']:.4f} nats a token, "
        f"{result['largest']:.3f} at most ({result['tokens']} tokens); sampler_gap "
        f"{result['sampler_gap']:.4f}; gradient of 8 responses {result['update_seconds']:.2f} s"
    )


if __name__ == "__main__":
    main()
