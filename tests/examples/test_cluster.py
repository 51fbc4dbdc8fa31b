"""The cluster files are checked as far as they can be without a cluster."""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.ppo.memory import plan_memory as plan_ppo
from policies.ppo.settings import PPOSettings
from reward.memory import plan_sharded
from reward.settings import RewardSettings
from rlhf.cli import main
from rlhf.config import flatten
from rlhf.config.paths import with_changes
from rlhf.planning.advice import advice
from rlhf.planning.plan import GIB
from rlhf.planning.planner import read_shape
from rlhf.planning.strategies import DDP, FSDP, USABLE, Load, stage_bytes
from rlhf.planning.traffic import step_bytes
from rlhf.run.provenance import IMAGE

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
MODELS = {"6B": CLUSTER.parent / "six_billion" / "llama_6b", "70B": CLUSTER / "llama_70b"}
DEPLOYED = "deploy/canary.yaml"
YAML = sorted(path.name for path in CLUSTER.glob("*.yaml"))


def load(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))


def require_command(words: list[str]) -> None:
    """The words start PPO under torchrun with settings that exist, and go on by themselves."""
    place = words.index("rlhf.cli")
    assert words[place - 1] == "-m"
    flags = {word.partition("=")[0] for word in words[place + 1 :] if word.startswith("--")}
    assert {"--config", "--model", "--reward", "--reference", "--out", "--resume"} == flags


def test_the_table_of_what_fits_is_the_planners() -> None:
    text = (CLUSTER / "README.md").read_text(encoding="utf-8")
    table = text.partition("## What fits")[2].partition("The planner was compared")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    rows = [row for row in rows if row and row[0] in MODELS]
    assert [(row[0], int(row[1])) for row in rows] == [
        *(("6B", count) for count in (1, 8, 64)),
        *(("70B", count) for count in (64, 128, 256, 512)),
    ]
    for name, gpus, *cells, best in rows:
        shape, count = read_shape(str(MODELS[name])), int(gpus)
        load = Load(length=1024, batch=4, checkpointing=True, lora_rank=16, vllm=min(8, count))
        option = FSDP if count > 1 else DDP
        needs = [stage_bytes(stage, option, shape, load, count) for stage in ("reward", "ppo")]
        sent = [step_bytes(stage, option, shape, load, 1, count) for stage in ("reward", "ppo")]
        assert cells[:2] == [f"{size / GIB:.1f}" for size in needs]
        assert cells[2:] == [f"{size / GIB:.0f}" for size in sent]
        for said in best.split("; "):
            stage, _, words = said.partition(": ")
            full = advice(stage, shape, load, count, 80 * USABLE * GIB).sentence
            assert full.replace(",", "").startswith(f"{stage}: {words}")


@pytest.mark.parametrize("name", ["slurm.sbatch", "sagemaker_entry.sh"])
def test_scripts_are_bash(name: str) -> None:
    done = subprocess.run(["bash", "-n", CLUSTER / name], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


STUBS = {
    "scontrol": 'if [[ $1 == show ]]; then echo node-a; echo node-b; else echo "$@" >> "$LOG"; fi',
    "srun": 'echo "$@" >> "$LOG"; exit "${CODE:-0}"',
    "torchrun": 'echo "torchrun $@" >> "$LOG"',
}


def run_script(tmp_path: Path, name: str, *arguments: str, **extra: str) -> tuple[int, list[str]]:
    """Run a script with programs in a scheduler's place that only say what they were told."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program, body in STUBS.items():
        file = programs / program
        file.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        file.chmod(0o755)
    log = tmp_path / "log"
    search = f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": search, "LOG": str(log), **extra}
    done = subprocess.run(["bash", CLUSTER / name, *arguments], env=environment, check=False)
    return done.returncode, log.read_text(encoding="utf-8").splitlines()


SLURM = {
    "SLURM_JOB_NODELIST": "node-[a-b]",
    "SLURM_CPUS_PER_TASK": "96",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "77",
}


@pytest.mark.parametrize(
    ("status", "code", "requeued"), [("done", "0", False), ("interrupted", "75", True)]
)
def test_slurm_starts_one_torchrun_a_node_and_requeues_what_was_interrupted(
    tmp_path: Path, status: str, code: str, requeued: bool
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "stage.json").write_text(f'{{"status": "{status}"}}', encoding="utf-8")
    arguments = ("model", "reward", "reference", str(out))
    ended, said = run_script(tmp_path, "slurm.sbatch", *arguments, **SLURM, CODE=code)
    assert ended == int(code)
    words = shlex.split(said[0])
    assert "--nnodes=2" in words
    assert "--rdzv-endpoint=node-a:29500" in words
    require_command(words)
    assert (said[1:] == ["requeue 77"]) is requeued


def test_sagemaker_starts_torchrun_with_the_settings_of_the_job(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("sagemaker_ppo", CLUSTER / "sagemaker_ppo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flags = ("role", "image", "filesystem", "mount", "subnet", "group")
    words = [word for flag in flags for word in (f"--{flag}", "x")]
    settings = module.estimator_settings(module.parse_arguments(words))
    assert Path(settings["source_dir"]) == CLUSTER
    assert settings["environment"][IMAGE] == settings["image_uri"] == "x"
    assert (CLUSTER / settings["entry_point"]).is_file()
    given = [w for k, v in settings["hyperparameters"].items() for w in (f"--{k}", v)]
    environment = {
        "SM_HOSTS": '["algo-2", "algo-1"]',
        "SM_NUM_GPUS": "8",
        "TRAINING_JOB_NAME": "job",
    }
    ended, said = run_script(tmp_path, settings["entry_point"], *given, **environment)
    assert ended == 0
    assert "--nnodes=2 --nproc-per-node=8" in said[0]
    assert "--rdzv-endpoint=algo-1:29500" in said[0]
    require_command(shlex.split(said[0]))


def test_jobset_runs_two_pods_that_find_each_other() -> None:
    job = load("jobset.yaml")
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 2
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    words = shlex.split(container["args"][0])
    name = job["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-{replicated['name']}-0-0.{name}:29500" in words
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in words
    require_command(words)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_pytorchjob_has_the_container_that_the_operator_looks_for() -> None:
    job = load("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == job["spec"]["elasticPolicy"]["maxReplicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    require_command([*container["command"], *container["args"]])


@pytest.mark.parametrize("file", ["cluster/jobset.yaml", "cluster/pytorchjob.yaml", DEPLOYED])
def test_a_pod_says_by_its_digest_which_image_it_runs(file: str) -> None:
    """A container cannot see that itself; provenance keeps what RLHF_IMAGE says."""
    job = yaml.safe_load((CLUSTER.parent / file).read_text(encoding="utf-8"))

    def containers(part: Any) -> list[Any]:
        if isinstance(part, list):
            return [one for inside in part for one in containers(inside)]
        if not isinstance(part, dict):
            return []
        return [*part.get("containers", ()), *containers(list(part.values()))]

    (container,) = containers(job)
    said = {one["name"]: one["value"] for one in container["env"]}[IMAGE]
    assert said == container["image"]
    assert re.search(r"@sha256:[0-9a-f]{64}$", said)


def test_skypilot_runs_on_every_node() -> None:
    task = load("skypilot.yaml")
    known = {"name", "num_nodes", "resources", "file_mounts", "workdir", "setup", "run"}
    assert set(task) == known
    assert task["resources"]["accelerators"].endswith(":8")
    done = subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False)
    assert done.returncode == 0
    require_command(shlex.split(task["run"].replace("\\\n", " ")))


@pytest.mark.parametrize(
    ("command", "file"), [("ppo", "ppo.yaml"), ("train-reward", "reward.yaml")]
)
def test_settings_are_those_of_the_commands(
    command: str, file: str, tiny_model: Path, capsys
) -> None:
    words = ["--config", str(CLUSTER / file), "--model", str(tiny_model), "--out", "o"]
    more = {
        "ppo": ["--reward", str(tiny_model), "--reference", "f"],
        "train-reward": ["--rankings", "k"],
    }
    assert main([command, *words, *more[command], "--dry-run"]) == 0
    assert "sharding: fsdp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "gpus", "gib"),
    [
        (CLUSTER / "ppo.yaml", 16, 80),
        (CLUSTER / "reward.yaml", 8, 80),
        (MODELS["6B"].parent / "ddp_full.yaml", 8, 141),
        (MODELS["6B"].parent / "ddp_lora.yaml", 8, 24),
        (MODELS["6B"].parent / "fsdp_full.yaml", 8, 40),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_settings_fit_the_gpus_that_they_name(file: Path, gpus: int, gib: int) -> None:
    text = file.read_text(encoding="utf-8")
    said = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert f"on {gpus} GPUs of {gib} GB" in said
    values, model = {**flatten(yaml.safe_load(text)), "processes": gpus}, str(MODELS["6B"])
    if "ppo" in file.name:
        given = {"reward": (model,), "reference": Path("f")}
        plan = plan_ppo(with_changes(PPOSettings(model=model, out=Path("o"), **given), values))
        needs = float(plan.split("\npeak ")[1].split()[0])
    else:
        settings = RewardSettings(model=model, out=Path("o"), rankings=Path("k"))
        # gathered weights: the embeddings, and of layers three in bf16 and one's gradients
        shape = read_shape(model)
        gathered = 4 * shape.vocabulary * shape.hidden + 8 * shape.trunk_linear / shape.layers
        needs = plan_sharded(with_changes(settings, values)).peak / GIB
        needs += gathered / GIB if "fsdp" in text else 0.0
    assert needs <= USABLE * gib


def test_every_training_has_settings_that_fit() -> None:
    files = [*CLUSTER.glob("*.yaml"), *MODELS["6B"].parent.glob("*.yaml")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    assert {name for name, text in texts.items() if "\nsharding:" in text} == {
        *("ppo.yaml", "reward.yaml", "ddp_full.yaml", "ddp_lora.yaml", "fsdp_full.yaml")
    }


def test_the_page_names_every_file() -> None:
    page = (CLUSTER / "README.md").read_text(encoding="utf-8")
    for path in CLUSTER.iterdir():
        assert path.name in ("README.md", "__pycache__") or path.name in page
    ast.parse((CLUSTER / "sagemaker_ppo.py").read_text(encoding="utf-8"))
    assert len(YAML) == 5
