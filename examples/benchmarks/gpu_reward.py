"""A 6B-class reward model on one GPU: against trl, against the matmul rate, against the plan.

The model has the shape of examples/six_billion/llama_6b and random weights: speed and memory do not
depend on what they say. Sequences have about 2048 tokens, four responses to a prompt, bf16
autocast, gradient checkpointing. Printed are

    ratio         rankings per second of ours over trl's (examples/benchmarks/reward.py)
    utilisation   6 · parameters of the matrices · tokens / second, over the rate at which this
                  device multiplies large bf16 matrices; attention is not counted
    memory        peak of the device over the peak that `--dry-run` plans

    bash examples/benchmarks/gpu_reward.sh [--quick] [--json] [--prompts N]
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SHAPE = REPOSITORY / "examples" / "six_billion" / "llama_6b"
TOKENIZER = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
WORDS = ["time", "people", "water", "house", "music", "light", "paper", "river", "green"]
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4}
REPEATS = 10


def write_model(folder: Path, *, tiny: bool) -> None:
    """A model of the wanted shape with random weights, and a real tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhf.modeling.tokens import load_tokenizer

    config = AutoConfig.from_pretrained(SHAPE, trust_remote_code=False, **(TINY if tiny else {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.save_pretrained(folder)
    load_tokenizer(str(TOKENIZER)).save_pretrained(folder)


def write_judgments(file: Path, prompts: int, *, tiny: bool) -> None:
    """Prompts of about 1536 tokens with four ranked responses of about 512."""
    generator = random.Random(0)
    prompt, response = (60, 20) if tiny else (1500, 500)

    def text(words: int) -> str:
        return " ".join(generator.choices(WORDS, k=words))

    lines = [
        {
            "prompt": text(prompt),
            "responses": [text(response) for _ in range(4)],
            "tiers": [[0], [1], [2], [3]],
        }
        for _ in range(prompts)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def matmul_rate(size: int) -> float:
    """Floating-point operations per second of a large bf16 matrix product."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    left @ right

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    began = now()
    for _ in range(REPEATS):
        left @ right
    return REPEATS * 2 * size**3 / (now() - began)


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run trl and ours on the same data, and set ours against the device and the plan."""
    from reward.memory import plan_memory
    from reward.settings import BatchSettings, DataSettings, RewardSettings
    from rlhf.planning.plan import GIB
    from rlhf.planning.planner import read_shape

    script = REPOSITORY / "examples" / "benchmarks" / "reward.py"
    words = [sys.executable, str(script), "speed", "--json", "--model", str(folder / "model")]
    words += ["--data", str(folder / "data.jsonl"), "--prompts", str(arguments.prompts)]
    words += [
        "--kinds",
        "trl,packed",
        "--tokens",
        str(arguments.tokens),
        "--gradient-checkpointing",
    ]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, cwd=REPOSITORY)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    ours = result["runs"][-1]
    shape = read_shape(str(folder / "model"))
    rate = matmul_rate(256 if arguments.quick else 8192)
    settings = RewardSettings(
        rankings=folder,
        model=str(folder / "model"),
        out=folder,
        precision="bf16",
        batch=BatchSettings(gradient_checkpointing=True, micro_tokens=arguments.tokens),
        data=DataSettings(max_length=128 if arguments.quick else 2048),
    )
    planned = plan_memory(settings, shape).peak / GIB
    return {
        "ratio": result["ratio"],
        "utilisation": 6 * shape.trunk_linear * ours["tokens"] / ours["seconds"] / rate,
        "memory": ours["peak_gib"] / planned,
        "planned_gib": planned,
        "matmul_tflops": rate / 1e12,
        "runs": result["runs"],
    }


def main() -> None:
    """Write model and data, measure, print."""
    sys.path[0] = str(REPOSITORY)  # beside this file lies a reward.py that is not the package
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and texts, to see it run"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192, help="in one forward pass of ours")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.prompts, arguments.tokens = 2, 512
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", tiny=arguments.quick)
        write_judgments(folder / "data.jsonl", arguments.prompts, tiny=arguments.quick)
        result = measure(folder, arguments)
    print(
        f"x{result['ratio']:.2f} of trl  utilisation {result['utilisation']:.1%}  "
        f"peak {result['memory']:.2f} of the {result['planned_gib']:.1f} GiB planned"
    )
    if arguments.json:
        versions = {name: version(name) for name in ("torch", "transformers", "trl")}
        print(json.dumps({**result, "versions": versions}))


if __name__ == "__main__":
    main()
