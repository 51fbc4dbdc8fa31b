"""Whether `rlhf benchmark` says what a plain loop around transformers takes by its own clock.

A policy answers by `generate`, a reward model reads prompts with answers. After every batch that
`rlhf benchmark` measures the plain loop does one of the same size, timed here, so that a machine
which others use slows both alike. Seconds of the processor are compared, too: others do not take
them. In fp32 both do the same arithmetic; in bf16 only the command's sampler has float32 logits.

    python -P examples/benchmarks/peers/plain.py [--batch-size 8] [--repeats 5] [--json]

Set OMP_NUM_THREADS=1 where other work uses the machine.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from policies.deployment.timing import Batch, Row

REPOSITORY = Path(__file__).parents[3]
MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"


def main() -> None:
    """Measure, and print a line for the policy and one for the reward model."""
    from policies.deployment.settings import BenchmarkSettings
    from policies.deployment.timing import measure_policy, measure_scorer
    from rlhf.modeling.models import new_reward_model, save_model
    from rlhf.modeling.tokens import load_tokenizer
    from rlhf.parallel.distributed import start_alone

    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="fp32")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    settings = BenchmarkSettings(
        runs=(given.model,),
        out=Path("unused"),
        batch_sizes=(given.batch_size,),
        prompt_tokens=(given.prompt_tokens,),
        answer_tokens=(given.answer_tokens,),
        repeats=given.repeats,
        precision=given.precision,
    )
    accelerator = start_alone(settings.precision, settings.seed)
    is_bf16 = accelerator.mixed_precision == "bf16"
    measurements = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(given.model)
        network = new_reward_model(given.model, int(tokenizer.pad_token_id), 0)
        save_model(network, tokenizer, Path(folder))
        answer, answering = plain_answers(given, is_bf16=is_bf16), "tokens_per_second"
        measurements[answering] = pair(
            answer, lambda on: measure_policy(given.model, accelerator, settings, on)
        )
        score, scoring = plain_scores(given, folder, is_bf16=is_bf16), "scores_per_second"
        measurements[scoring] = pair(
            score, lambda on: measure_scorer(folder, folder, accelerator, settings, on)
        )
    units = {answering: given.batch_size * given.answer_tokens, scoring: given.batch_size}
    results = {
        name: describe(name, units[name], *measurement)
        for name, measurement in measurements.items()
    }
    for name, result in results.items():
        line = (
            f"{name}: {result['reported']:.2f} by rlhf benchmark, {result['plain']:.2f} by the "
            f"plain loop; plain seconds over those reported {result['ratio']:.3f} (median of "
            f"{', '.join(f'{ratio:.2f}' for ratio in result['runs'])}), of the processor "
            f"{result['processor_ratio']:.3f}"
        )
        print(line, file=sys.stderr if given.json else sys.stdout)
    if given.json:
        versions = {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps({**results, "bf16": is_bf16, "versions": versions}))


@dataclass
class Clocks:
    """Seconds of every batch on the wall, and of the processor but for the command's first one."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def pair(
    plain: Callable[[], None], measure: "Callable[[Callable[[Batch], None]], list[Row]]"
) -> "tuple[Row, Clocks, Clocks]":
    """The row of `rlhf benchmark`, the seconds of its batches, and those of the plain ones."""
    ours, theirs = Clocks(), Clocks()
    plain()  # not counted
    ended = 0.0

    def alternate(batch: "Batch") -> None:
        nonlocal ended
        if ours.wall:  # nothing but a batch since the last plain one
            ours.processor.append(time.process_time() - ended)
        ours.wall.append(batch.seconds)
        wall, processor = time.perf_counter(), time.process_time()
        plain()
        theirs.wall.append(time.perf_counter() - wall)
        ended = time.process_time()
        theirs.processor.append(ended - processor)

    [row] = measure(alternate)
    return row, ours, theirs


def describe(name: str, units: int, row: "Row", ours: Clocks, theirs: Clocks) -> dict[str, Any]:
    """The reported speed, that of the plain loop, and the plain seconds over those reported."""
    ratios = [plain / own for own, plain in zip(ours.wall, theirs.wall, strict=True)]
    of_processor = [p / o for o, p in zip(ours.processor, theirs.processor[1:], strict=True)]
    return {
        "reported": row[name],
        "plain": units * len(theirs.wall) / sum(theirs.wall),
        "ratio": round(median(ratios), 4),
        "runs": [round(ratio, 4) for ratio in ratios],
        "processor_ratio": round(median(of_processor), 4),
    }


def plain_answers(given: argparse.Namespace, *, is_bf16: bool) -> Callable[[], None]:
    """A batch of answers by `generate` alone."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if is_bf16 else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=dtype, trust_remote_code=False
    ).eval()
    ids = random_ids(given.batch_size, given.prompt_tokens)
    length = {name: given.answer_tokens for name in ("max_new_tokens", "min_new_tokens")}

    def answer() -> None:
        mask = torch.ones_like(ids)
        sequences = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0, **length
        )
        assert sequences.shape == (given.batch_size, given.prompt_tokens + given.answer_tokens)

    return answer


def plain_scores(given: argparse.Namespace, folder: str, *, is_bf16: bool) -> Callable[[], None]:
    """One forward pass of a classifier."""
    import torch
    from transformers import AutoModelForSequenceClassification

    load = AutoModelForSequenceClassification.from_pretrained
    model: Any = load(folder, dtype=torch.float32).eval()
    ids = random_ids(given.batch_size, given.prompt_tokens + given.answer_tokens)

    def score() -> None:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            assert model(ids, attention_mask=torch.ones_like(ids)).logits.shape == (len(ids), 1)

    return score


def random_ids(rows: int, length: int) -> "torch.Tensor":
    """Token ids that are neither padding nor an end."""
    import torch

    return torch.randint(3, 40_000, (rows, length), generator=torch.Generator().manual_seed(0))


if __name__ == "__main__":
    sys.path[0] = str(REPOSITORY)
    main()
