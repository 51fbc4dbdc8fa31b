"""How long `rlhf train-reward` reads many rankings before its first step, and what each rank holds.

Makes an export of short texts, two responses to each prompt and one ranking of them, and a small
model of random weights. Then the command runs as a user would start it, on gloo processes, until
its first step is in metrics.jsonl, and is stopped: once as for a new export, and once more. The
memory of a rank's own (RssAnon), all that is resident (VmHWM, a mapped file included), and the
seconds of all ranks together on a processor, which other work on the machine hardly changes, come
from the kernel. `--code` runs another checkout, to compare.

    python -P examples/benchmarks/scale/rankings.py [--quick] [--json] [--code FOLDER]
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[3]
TOKENIZER = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
TEST_PROMPTS = 200
GIB = 2**30
WORDS = ("time", "people", "water", "house", "music", "light", "paper", "river", "green")


def build_lines(number: int) -> Iterator[dict[str, Any]]:
    """Lines of an export: prompts and two responses each of 8 to 24 words, ranked by one of ten."""
    generator = random.Random(0)

    def text() -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(8, 24)))

    for index in range(number):
        prompt, annotator = f"p{index:015}", f"annotator-{index % 10}"
        ids = [f"{prompt}-{answer}" for answer in "ab"]
        yield {
            "prompt": {
                "id": prompt,
                "messages": [{"role": "user", "content": text()}],
                "split": "train" if index >= TEST_PROMPTS else "test",
                "source": "benchmark",
            },
            "responses": [
                {"id": id_, "prompt_id": prompt, "text": text(), "model": "m"} for id_ in ids
            ],
            "rankings": [
                {
                    "id": f"{prompt}-r",
                    "prompt_id": prompt,
                    "annotator": annotator,
                    "kind": "human",
                    "tiers": [[ids[0]], [ids[1]]] if index % 3 else [[ids[1]], [ids[0]]],
                    "strengths": [1 + index % 3],
                }
            ],
        }


def write_export(folder: Path, number: int) -> Path:
    """Write an export of `number` rankings as `rlhf export` does."""
    from rlhf.records.fingerprints import folder_hash
    from rlhf.records.jsonl import write_json, write_jsonl

    folder.mkdir(parents=True)
    for split in ("train", "test"):
        chosen = (line for line in build_lines(number) if line["prompt"]["split"] == split)
        write_jsonl(folder / f"{split}.jsonl", chosen)
    prompts = {"train": number - TEST_PROMPTS, "test": TEST_PROMPTS}
    content = folder_hash(folder, ("*.jsonl",))
    manifest = {"format": "ranked", "prompts": prompts, "content_hash": content}
    write_json(folder / "manifest.json", manifest)
    return folder


def write_model(folder: Path) -> Path:
    """Save a model of a few thousand weights, with the tokenizer of a real one."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, trust_remote_code=False)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, **heads, intermediate_size=32, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_until_first_step(
    code: Path, rankings: Path, model: Path, out: Path, processes: int
) -> dict[str, Any]:
    """Start a training, wait for its first step and stop it; returns seconds and bytes."""
    shutil.rmtree(out, ignore_errors=True)
    paths = ("--rankings", str(rankings), "--model", str(model), "--out", str(out))
    options = ("--processes", str(processes), "--checkpoint.every", "none", "--precision", "fp32")
    command = [sys.executable, "-m", "rlhf.cli", "train-reward", *paths, *options]
    environment = {**os.environ, "PYTHONPATH": str(code), "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    own, resident, busy = dict[int, int](), dict[int, int](), dict[int, float]()
    with subprocess.Popen(command, env=environment, cwd=code, stderr=subprocess.PIPE) as agent:
        while not _has_step(out / "metrics.jsonl"):
            if agent.poll() is not None:
                raise RuntimeError(str(agent.stderr and agent.stderr.read().decode()))
            for rank in ranks_of(agent.pid, processes):
                memory = read_memory(rank)
                own[rank] = max(own.get(rank, 0), memory.get("RssAnon", 0))
                resident[rank] = max(resident.get(rank, 0), memory.get("VmHWM", 0))
                with suppress(psutil.NoSuchProcess):
                    times = psutil.Process(rank).cpu_times()
                    busy[rank] = times.user + times.system
            time.sleep(0.05)
        seconds = time.monotonic() - began
        agent.send_signal(signal.SIGTERM)
        agent.communicate()
    return {
        "seconds_to_first_step": round(seconds, 1),
        "processor_seconds": round(sum(busy.values()), 1),
        "own_bytes": sorted(own.values(), reverse=True),
        "resident_bytes": sorted(resident.values(), reverse=True),
    }


def _has_step(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def ranks_of(agent: int, processes: int) -> list[int]:
    """The processes of a training: the agent itself if there is one, else its children."""
    if processes == 1:
        return [agent]
    with suppress(psutil.NoSuchProcess):
        return [
            child.pid
            for child in psutil.Process(agent).children()
            if "train-reward" in child.cmdline()
        ]
    return []


def read_memory(process: int) -> dict[str, int]:
    """Every size in a process's status file, in bytes."""
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
        sizes = [line.split() for line in lines if line.endswith(" kB")]
        return {name.rstrip(":"): int(size) * 1024 for name, size, _ in sizes}
    return {}


def main() -> None:
    """Make the inputs, measure twice, and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 rankings")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--rankings", type=int, default=1_000_000, help="how many")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--code", type=Path, default=REPOSITORY, help="a checkout to measure")
    arguments = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    number = 2_000 if arguments.quick else arguments.rankings
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        rankings = write_export(Path(folder) / "rankings", number)
        model = write_model(Path(folder) / "model")
        for name in ("new export", "again"):
            out = Path(folder) / "out"
            inputs = (arguments.code.resolve(), rankings, model, out, arguments.processes)
            runs.append({"run": name, "rankings": number, **run_until_first_step(*inputs)})
            sizes = {
                key: " and ".join(f"{size / GIB:.2f}" for size in runs[-1][f"{key}_bytes"])
                for key in ("own", "resident")
            }
            print(
                f"{number:,} rankings, {name}: {runs[-1]['seconds_to_first_step']} s to the first "
                f"step, {runs[-1]['processor_seconds']} s on processors; GiB of each rank: "
                f"{sizes['own']} its own, {sizes['resident']} resident",
                flush=True,
            )
    if arguments.json:
        versions = {name: version(name) for name in ("torch", "transformers", "pyarrow")}
        value = runs[0]["seconds_to_first_step"]
        print(json.dumps({"value": value, "runs": runs, "versions": versions}))


if __name__ == "__main__":
    main()
