"""How fast each `--engine` of `rlhf ppo` samples: milliseconds a token, medians of runs.

Prompts are the first of examples/evidence/primed; all responses are in work at one time. Engines
take turns, so that a machine which others use slows all of them alike; each one's first run only
warms up.

    .venv-vllm/bin/python examples/benchmarks/engines.py [--prompts 48] [--runs 3] [--json]

`make vllm` builds that environment; without vllm the other two engines are measured.
"""

import argparse
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from policies.sampling.generate import Sampler

REPOSITORY = Path(__file__).parents[2]
PROMPTS = REPOSITORY / "examples" / "evidence" / "primed" / "prompts.jsonl"
NEW_TOKENS = 24


def main() -> None:
    """Measure, and print a line for each engine."""
    import torch

    from policies.reference.prompts import load_prompts
    from policies.sampling.continuous import ContinuousSampler
    from policies.sampling.generate import GenerateSampler, encode_prompts
    from policies.sampling.vllm_engine import VLLM
    from rlhf.modeling.attention.packing import pack_prefixes
    from rlhf.modeling.models import load_causal_lm, load_config
    from rlhf.modeling.tokens import load_tokenizer
    from rlhf.parallel.distributed import start

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(REPOSITORY / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    accelerator = start(arguments.precision, 0)
    tokenizer = load_tokenizer(arguments.model)
    records = [record.prompt for record in load_prompts(PROMPTS)[0][: arguments.prompts]]
    config = load_config(arguments.model)
    prompts = encode_prompts(tokenizer, config, records, NEW_TOKENS)
    model = load_causal_lm(arguments.model).to(accelerator.device).eval()
    pack_prefixes(model)
    samplers: dict[str, Sampler] = {
        "generate": GenerateSampler(accelerator),
        "continuous": ContinuousSampler(accelerator),
    }
    if find_spec("vllm"):
        longest = max(map(len, prompts)) + NEW_TOKENS
        samplers["vllm"] = VLLM(arguments.model, accelerator, longest, len(prompts))
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for number in range(arguments.runs + 1):
        for name, sampler in samplers.items():
            taken = milliseconds_a_token(sampler, model, tokenizer, prompts)
            if number:
                times[name].append(taken)
    for name, taken in times.items():
        ratio = median(times["generate"]) / median(taken)
        runs = ", ".join(f"{milliseconds:.2f}" for milliseconds in taken)
        line = f"{name:10}  {median(taken):6.2f} ms a token ({runs}), {ratio:.2f} x generate"
        print(line, file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        threads = torch.get_num_threads()
        print(json.dumps({"precision": arguments.precision, "threads": threads, "times": times}))


def milliseconds_a_token(
    sampler: "Sampler",
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[list[int]],
) -> float:
    """Wall time of one batch over the tokens that it gave."""
    from policies.sampling.generate import sample_responses
    from rlhf.records.schema import Sampling

    sampling = Sampling(temperature=0.8, max_new_tokens=NEW_TOKENS, seed=0)
    began = time.perf_counter()
    samples = sample_responses(sampler, model, tokenizer, prompts, sampling, len(prompts))
    return 1000 * (time.perf_counter() - began) / sum(len(sample.token_ids) for sample in samples)


if __name__ == "__main__":
    sys.path[0] = str(REPOSITORY)  # beside this file lies a reward.py that is not the package
    main()
