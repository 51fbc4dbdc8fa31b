"""What one process of PPO holds at its peak, beside the plan: alone, and as one of two.

Each layout is a run of two steps with the same small model of random weights: one process that
samples with vLLM; two that share a model by FSDP, with float32 weights or bf16 ones, and gather it
to sample with `generate`; two that share it by tensor parallelism; two with FSDP and a whole engine
each; and two that share one engine, each with a part of every matrix. The peak of resident memory
of each process comes from the kernel (VmHWM), as does that of a process that only imports what the
run imports, which the plan of `rlhf ppo --dry-run` does not count.

    .venv-vllm/bin/python -P examples/benchmarks/scale/rollouts.py [--layers N] [--only WORDS]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
REAL_MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
IMPORTS = "import policies.ppo.train, policies.ppo.setup, policies.sampling.generate"
GIB = 2**30
FSDP = ("--processes", "2", "--sharding", "fsdp")
VLLM = ("--sampling.engine", "vllm")
FP32 = ("--precision", "fp32")
LAYOUTS = {
    "one process, vLLM": (*FP32, *VLLM),
    "two, FSDP, generate": (*FP32, *FSDP),
    "two, FSDP, bf16 weights, generate": ("--precision", "bf16-weights", *FSDP),
    "two, tensor parallel, generate": (
        *(*FP32, "--processes", "2", "--parallel.tensor-parallel", "2"),
    ),
    "two, FSDP, an engine each": (*FP32, *FSDP, *VLLM),
    "two, FSDP, one engine": (*FP32, *FSDP, *VLLM, "--sampling.engine-tensor-parallel", "2"),
}


def build_inputs(folder: Path, layers: int) -> None:
    """Save a model of random weights, a reward model, prompts, and stored outputs."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from rlhf.modeling.models import new_reward_model, save_model
    from rlhf.modeling.tokens import load_tokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(REAL_MODEL, trust_remote_code=False)
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2304}
    heads: dict[str, Any] = {
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_hidden_layers": layers,
    }
    tokens: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens, **ends)).save_pretrained(
        folder / "model"
    )
    tokenizer.save_pretrained(folder / "model")
    ours = load_tokenizer(str(folder / "model"))
    reward = new_reward_model(str(folder / "model"), int(ours.pad_token_id), seed=1)
    save_model(reward, ours, folder / "reward")
    prompts = [{"prompt": f"What is {n} and {n}?", "split": "train"} for n in range(16)]
    lines = "\n".join(map(json.dumps, prompts))
    (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")
    command = ["reference", "--prompts", "prompts.jsonl", "--model", "model", "--reward", "reward"]
    more = ["--out", "reference", "--sampling.max-new-tokens", "16", "--precision", "fp32"]
    run_rlhf([*command, *more], folder)


def run_rlhf(arguments: list[str], folder: Path) -> dict[int, int]:
    """Run a command in `folder`; the peak bytes of its processes, by process id."""
    return run([sys.executable, "-m", "rlhf.cli", *arguments], folder)


def run(command: list[str], folder: Path) -> dict[int, int]:
    """Run a program in `folder`; the peak bytes of its processes, by process id."""
    keeping = {"PYTHONPATH": str(REPOSITORY), "MALLOC_MMAP_THRESHOLD_": "65536"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **keeping}, stdout=log, stderr=log
        )
        peaks: dict[int, int] = {}
        while process.poll() is None:
            for number in family(process.pid):
                peaks[number] = max(peaks.get(number, 0), peak_bytes(number))
            time.sleep(0.1)
    if process.returncode:
        sys.exit((folder / "log").read_text())
    return peaks


def family(process: int) -> list[int]:
    """A process and all that it has started."""
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [process, *(descendant for child in text.split() for descendant in family(int(child)))]


def peak_bytes(process: int) -> int:
    """The largest resident memory of a process so far; 0 after its end."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def planned_gib(arguments: list[str], folder: Path) -> float:
    """The peak of each process by `--dry-run`, in GiB."""
    command = [sys.executable, "-m", "rlhf.cli", *arguments, "--dry-run", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    plan: str = json.loads(done.stdout.splitlines()[-1])["memory_plan"]
    line = next(row for row in plan.splitlines() if row.startswith("peak "))
    return float(line.split()[1])


def measure(layout: str, folder: Path, imports: dict[bool, float]) -> dict[str, float]:
    """Peaks of a layout in GiB: measured, what imports alone take of it, and planned."""
    flags = LAYOUTS[layout]
    uses_vllm = "vllm" in flags
    if uses_vllm not in imports:
        program = IMPORTS + ("; from vllm import LLM" if uses_vllm else "")
        imports[uses_vllm] = max(run([sys.executable, "-c", program], folder).values()) / GIB
    command = ["ppo", "--model", "model", "--reward", "reward", "--reference", "reference"]
    command += ["--steps", "2", "--batch.episodes-per-step", "4", *flags]
    command += ["--out", layout.replace(", ", "-").replace(" ", "-")]
    planned = planned_gib(command, folder)
    measured = max(run_rlhf(command, folder).values()) / GIB
    return {"measured": measured, "imports": imports[uses_vllm], "planned": planned}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--layers", type=int, default=12, help="of the model: 6 have 79 million weights"
    )
    parser.add_argument("--only", default="", help="measure layouts whose names have these words")
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    arguments = parser.parse_args()
    peaks, imports = {}, dict[bool, float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_inputs(folder, arguments.layers)
        for layout in (title for title in LAYOUTS if arguments.only in title):
            peak = peaks[layout] = measure(layout, folder, imports)
            expected = peak["imports"] + peak["planned"]
            if not arguments.json:
                line = f"{layout}: {peak['measured']:.2f} GiB; imports {peak['imports']:.2f}"
                line += f" + plan {peak['planned']:.2f} = {expected:.2f} GiB"
                print(f"{line}, {peak['measured'] / expected:.2f} of that", flush=True)
    if arguments.json:
        versions = {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps({"gib": peaks, "versions": versions}, indent=1))


if __name__ == "__main__":
    main()
