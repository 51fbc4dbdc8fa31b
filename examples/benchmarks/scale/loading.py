"""How long two processes load a model for FSDP, and what each of them holds meanwhile.

Saves a Llama of random weights from a config in bf16, in several files; it is 1 GiB in float32, in
which it is trained. Then two gloo processes load it as PPO loads a policy, with the trial of packed
rows, and shard it together with its optimizer. Seconds are those from the meeting of both until
both are done. Memory is what comes on top of the imports, at the peak: a process's own (RssAnon,
looked at every 5 ms), and all that is resident (VmHWM): also pages of files, of which the system
maps as many as it likes around those that are read. `--code` alternates with another checkout, to
compare.

    python -P examples/benchmarks/scale/loading.py [--quick] [--json] [--code FOLDER] [--pairs N]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).parents[3]
PROCESSES = 2
GIB = 2**30
WORKER = "--load"  # what this script is told as one of the processes


def build_model(folder: Path, layers: int) -> int:
    """Save a model of random weights in bf16; returns its bytes in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32_000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")
    return 4 * model.num_parameters()


def load(folder: str) -> None:
    """Load and shard in this process, and print what that took."""
    import torch
    from accelerate import Accelerator

    from rlhf.modeling.attention.packing import pack_prefixes
    from rlhf.modeling.models import load_causal_lm
    from rlhf.parallel.distributed import start
    from rlhf.parallel.sharding import Sharding, prepare

    def load_once(accelerator: Accelerator, name: str) -> None:
        sharding = Sharding("fsdp")
        model = load_causal_lm(name, held=sharding.held(trained=True), trained=True)
        pack_prefixes(model)
        prepare(accelerator, model, torch.optim.AdamW(model.parameters(), fused=True), sharding)

    accelerator = start("fp32", 0)
    load_once(accelerator, f"{folder}/small")  # imports what is imported on first use
    accelerator.free_memory()
    own = [read_memory("RssAnon")]
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            own.append(read_memory("RssAnon"))

    watcher = threading.Thread(target=look)
    watcher.start()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is that of now
    before = read_memory("VmRSS")
    accelerator.wait_for_everyone()
    began = time.perf_counter()
    load_once(accelerator, f"{folder}/large")
    accelerator.wait_for_everyone()
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    metrics = {"seconds": seconds, "own": max(own) - own[0], "all": read_memory("VmHWM") - before}
    print(json.dumps(metrics))


def read_memory(field: str) -> int:
    """A size of this process in bytes, by the kernel's name for it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def run(code: Path, folder: Path) -> list[dict[str, float]]:
    """Load in two processes; return what each has measured."""
    from tests.servers.commands import free_port

    common = {
        **{"PYTHONPATH": str(code), "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(PROCESSES)),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-P", __file__, WORKER, str(folder)],
            cwd=code,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    with ThreadPoolExecutor(PROCESSES) as pool:  # all pipes are read at once, so that none fills
        outputs = list(pool.map(subprocess.Popen.communicate, started))
    if any(process.returncode for process in started):
        sys.exit("\n".join(errors for _, errors in outputs))
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def main() -> None:
    """Save the model, load it several times, and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sixth of the layers, once")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--code", type=Path, help="another checkout, to compare")
    parser.add_argument("--pairs", type=int, default=3, help="how often each is measured")
    arguments = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    checkouts = {"here": REPOSITORY}
    if arguments.code:
        checkouts = {"there": arguments.code.resolve(), **checkouts}
    runs: dict[str, list[list[dict[str, float]]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as name:
        size = build_model(Path(name) / "large", 2 if arguments.quick else 16)
        build_model(Path(name) / "small", 1)
        for _ in range(1 if arguments.quick else arguments.pairs):
            for where, code in checkouts.items():
                runs[where].append(run(code, Path(name)))
    print(f"{size / GIB:.2f} GiB of weights in float32")
    for where, measurements in runs.items():
        held = [
            f"{median(measurement[rank][kind] for measurement in measurements) / GIB:.2f} {label}"
            for rank in range(PROCESSES)
            for kind, label in (("own", f"GiB of rank {rank}'s own"), ("all", "resident"))
        ]
        seconds = median(measurement[0]["seconds"] for measurement in measurements)
        print(f"{where}: {seconds:.1f} s, {', '.join(held)} (medians of {len(measurements)})")
    if arguments.json:
        versions = {name: version(name) for name in ("torch", "transformers", "safetensors")}
        value = median(measurement[0]["seconds"] for measurement in runs["here"])
        print(json.dumps({"value": value, "runs": runs, "bytes": size, "versions": versions}))


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        load(sys.argv[2])
    else:
        main()
