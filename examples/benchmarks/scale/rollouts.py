"""What one process of PPO holds at its peak: alone, and as one of two that share a model by FSDP.

Four commands run for two steps each, with the same small model of random weights: one process that
samples with vLLM; two that gather the model to sample with `generate`; two with a whole engine
each; and two that share one engine, each with a part of every matrix. The peak of resident memory
of each process comes from the kernel (VmHWM), as does that of a process that only imports torch and
vLLM.

    .venv-vllm/bin/python -P examples/benchmarks/scale/rollouts.py [--json]
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
IMPORTS = "import torch, transformers, vllm, policies.ppo.train; from vllm import LLM"
GIB = 2**30
LAYOUTS = {
    "one process, vLLM": ("--sampling.engine", "vllm"),
    "two, FSDP, generate": ("--processes", "2", "--sharding", "fsdp"),
    "two, FSDP, an engine each": (
        *("--processes", "2", "--sharding", "fsdp", "--sampling.engine", "vllm"),
    ),
    "two, FSDP, one engine": (
        *("--processes", "2", "--sharding", "fsdp", "--sampling.engine", "vllm"),
        *("--sampling.engine-tensor-parallel", "2"),
    ),
}


def build_inputs(folder: Path) -> None:
    """Save a model of 130 million random weights, a reward model, prompts, and stored outputs."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from rlhf.modeling.models import new_reward_model, save_model
    from rlhf.modeling.tokens import load_tokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(REAL_MODEL, trust_remote_code=False)
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2304}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 12}
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    ends = {"eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True}
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
    return [process, *(one for child in text.split() for one in family(int(child)))]


def peak_bytes(process: int) -> int:
    """The largest resident memory of a process so far; 0 after its end."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(one.split()[1]) * 1024 for one in lines if one.startswith("VmHWM")), 0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_inputs(folder)
        found["imports"] = max(run([sys.executable, "-c", IMPORTS], folder).values()) / GIB
        for number, (layout, flags) in enumerate(LAYOUTS.items()):
            command = ["ppo", "--model", "model", "--reward", "reward", "--reference", "reference"]
            sizes = ["--steps", "2", "--batch.episodes-per-step", "4", "--precision", "fp32"]
            peaks = run_rlhf([*command, *sizes, "--out", f"ppo-{number}", *flags], folder)
            found[layout] = max(peaks.values()) / GIB
            if not arguments.json:
                print(f"{layout}: {found[layout]:.2f} GiB", flush=True)
    alone = found["one process, vLLM"]
    shares = {name: found[name] / alone for name in LAYOUTS}
    if arguments.json:
        versions = {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps({"gib": found, "share": shares, "versions": versions}, indent=1))
        return
    print(f"imports alone: {found['imports']:.2f} GiB")
    print("of one process:", *(f"{name} {share:.2f};" for name, share in shares.items()))


if __name__ == "__main__":
    main()
