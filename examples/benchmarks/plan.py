"""How far the memory plan is from the memory that is really taken.

Each case runs in its own process on the CPU: it notes the peak of resident memory after the
imports, loads the models, takes three training steps of two forward passes each (or samples once)
with the project's own modules, and compares the growth of the peak with the plan. Sharded cases are
two processes of a gloo group; the first one's memory counts.
`MALLOC_MMAP_THRESHOLD_` makes the allocator give freed tensors back, so that the peak is one of
tensors.

    python examples/benchmarks/plan.py [--quick] [--json]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rlhf.planning.planner import Shape

REPOSITORY = Path(__file__).parents[2]
REAL_MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Case:
    """One measurement: sequences of prompt and response tokens in one forward pass."""

    stage: str
    sequences: int
    prompt: int
    response: int
    bf16: bool = True
    checkpointing: bool = False
    sharding: str = "auto"


TINY_CASES = (
    Case("reward", 256, 128, 128),
    Case("reward", 256, 128, 128, bf16=False),
    Case("ppo", 128, 96, 160),
    Case("reference", 512, 128, 128),
)
SHARDED_CASES = (
    Case("reward", 8, 64, 64, sharding="ddp"),
    Case("reward", 8, 64, 64, sharding="fsdp"),
    Case("reward", 8, 64, 64, checkpointing=True, sharding="fsdp"),
    Case("reward", 8, 64, 64, sharding="zero1"),
    Case("reward", 8, 64, 64, sharding="zero3"),
)
PROCESSES = 2
REAL_CASES = (
    Case("reward", 8, 64, 64),
    Case("reward", 8, 64, 64, checkpointing=True),
    Case("reward", 8, 64, 64, bf16=False),
    Case("ppo", 4, 64, 64),
    Case("ppo", 4, 32, 448),  # logits weigh most
    Case("reference", 16, 192, 16),
    Case("sft", 4, 64, 64),
    Case("dpo", 2, 64, 64),  # pairs
    Case("distill", 4, 64, 64),
)


def build_tiny_model(folder: Path) -> Path:
    """Save a model of random weights whose activations are large enough to be measured."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(REAL_MODEL, trust_remote_code=False).save_pretrained(folder)
    return folder


def measure(model: str, case: Case) -> dict[str, float]:
    """Run one case in this process; returns plan and growth of the peak, in bytes."""
    from policies.ppo.models.actor_critic import PolicyAndCritic  # noqa: F401 — imports belong to the baseline
    from policies.sampling.generate import sample_responses  # noqa: F401
    from rlhf.parallel.distributed import start
    from rlhf.parallel.sharding import prepare  # noqa: F401
    from rlhf.planning.planner import read_shape

    if case.stage in ("sft", "dpo", "distill"):
        from policies.deployment.distill import train as _distill  # noqa: F401
        from policies.dpo import train as _dpo  # noqa: F401
        from policies.sft import train as _sft  # noqa: F401
    accelerator = start("bf16" if case.bf16 else "fp32", 0)
    if case.sharding.startswith("zero"):
        from rlhf.parallel import zero  # noqa: F401
    shape = read_shape(model)
    before = peak_resident_bytes()
    stages = {"reward": train_reward, "ppo": train_policy, "reference": sample}
    stages |= dict.fromkeys(("sft", "dpo", "distill"), fine_tune)
    planned = stages[case.stage](model, case, shape, accelerator)
    return {"planned": planned, "measured": peak_resident_bytes() - before}


def sample(model: str, case: Case, shape: "Shape", accelerator: Any) -> float:
    """Sample one batch; returns the bytes that the plan says for it."""
    from policies.sampling.generate import GenerateSampler, sample_responses
    from rlhf.modeling.models import load_causal_lm
    from rlhf.modeling.tokens import load_tokenizer
    from rlhf.planning.plan import SampleBatch
    from rlhf.planning.sampling_plan import reference_plan
    from rlhf.records.schema import Sampling

    language_model = load_causal_lm(model).eval()
    sampling = Sampling(max_new_tokens=case.response)
    prompts = random_ids(case.sequences, case.prompt)
    tokenizer = load_tokenizer(model)
    sampler = GenerateSampler(accelerator)
    sample_responses(sampler, language_model, tokenizer, prompts, sampling, case.sequences)
    plan = reference_plan(
        shape,
        None,
        SampleBatch(case.sequences, case.prompt, case.response),
        bf16=case.bf16,
    )
    return sum(item.size for item in plan.always + plan.phases["sampling"])


def train_reward(model: str, case: Case, shape: "Shape", accelerator: Any) -> float:
    """Take three steps of reward training; returns the bytes that the plan says for them."""
    import torch

    from reward.model.module import RewardModule
    from rlhf.modeling.attention.checkpointing import checkpoint_activations
    from rlhf.modeling.attention.layout import TrunkInputs, last_tokens
    from rlhf.modeling.models import new_reward_model
    from rlhf.planning.plan import Pass
    from rlhf.planning.strategies import OPTIONS, Load, stage_bytes
    from rlhf.planning.training_plan import reward_plan

    classifier = new_reward_model(model, 0, 0)
    if case.checkpointing:
        checkpoint_activations(classifier)
    module = RewardModule(classifier)
    length = case.prompt + case.response
    reads = last_tokens(torch.full((case.sequences,), length), length)
    inputs = TrunkInputs(torch.tensor(random_ids(case.sequences, length)), reads)
    take_three_steps(accelerator, module, case, lambda model: model(inputs).sum())
    if case.sharding != "auto":
        load = Load(length, case.sequences, case.checkpointing, 16)
        option = next(candidate for candidate in OPTIONS if candidate.strategy == case.sharding)
        return stage_bytes("reward", option, shape, load, PROCESSES)
    return reward_plan(
        shape,
        Pass(case.sequences * length, length, case.checkpointing),
        bf16=case.bf16,
    ).peak


def train_policy(model: str, case: Case, shape: "Shape", accelerator: Any) -> float:
    """Take three steps of PPO's update; returns the bytes that the plan says for them."""
    from policies.ppo.models.actor_critic import PolicyAndCritic
    from reward.model.module import RewardModule
    from rlhf.modeling.log_probs import Sequences
    from rlhf.modeling.models import load_causal_lm, new_reward_model
    from rlhf.modeling.tokens import pad_left, pad_right
    from rlhf.planning.plan import PPOBatch, SampleBatch
    from rlhf.planning.ppo_plan import ppo_plan

    scorer = RewardModule(new_reward_model(model, 0, 1)).requires_grad_(False)
    module = PolicyAndCritic(load_causal_lm(model), new_reward_model(model, 0, 0), 0.0)
    prompts = random_ids(case.sequences, case.prompt)
    prompts[0] = prompts[0][1:]  # padding somewhere, or the masks are left away
    responses = random_ids(case.sequences, case.response)
    sequences = Sequences(pad_left(prompts, 0), pad_right(responses, 0))

    def loss(model: "torch.nn.Module") -> "torch.Tensor":
        log_probs, values, _ = model(sequences, case.sequences, 1.0)
        return log_probs.sum() + values.sum()

    take_three_steps(accelerator, module, case, loss)
    del scorer  # it had to be there until now
    return ppo_plan(
        shape,
        shape,
        PPOBatch(SampleBatch(1, case.prompt, case.response), episodes=case.sequences),
        bf16=case.bf16,
    ).peak


def fine_tune(model: str, case: Case, shape: "Shape", accelerator: Any) -> float:
    """Take three steps of one of trl's trainers; returns the bytes that the plan says for them."""
    from transformers import PrinterCallback

    from policies.deployment.distill.student import half_config
    from rlhf.modeling.models import load_config
    from rlhf.planning.plan import Pass
    from rlhf.planning.planner import shape_of
    from rlhf.planning.training_plan import distill_plan, dpo_plan, sft_plan

    with tempfile.TemporaryDirectory() as out:
        trainer = build_trainer(model, case, Path(out))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    length = case.prompt + case.response
    answers = case.sequences * (2 if case.stage == "dpo" else 1)
    computing = Pass(answers * length, length, case.checkpointing)
    common: dict[str, Any] = {"bf16": case.bf16, "processes": 1}
    if case.stage == "distill":
        student = shape_of(half_config(load_config(model)), model)
        return distill_plan(shape, student, computing, **common).peak
    plan = sft_plan if case.stage == "sft" else dpo_plan
    return plan(shape, computing, on_cpu=True, **common).peak


def build_trainer(model: str, case: Case, out: Path) -> Any:
    """The trainer of `rlhf sft`, `dpo` or `distill`, with random tokens for three steps."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from policies.deployment.distill.student import half_of
    from policies.trl_training.settings import TrainerSettings
    from policies.trl_training.train import trainer_arguments
    from rlhf.modeling.models import load_causal_lm
    from rlhf.modeling.tokens import load_tokenizer

    settings = TrainerSettings(
        out=out,
        batch_size=2 * case.sequences,
        micro_batch_size=case.sequences,
        precision="bf16" if case.bf16 else "fp32",
        gradient_checkpointing=case.checkpointing,
    )
    number = 3 * settings.batch_size
    rows: list[dict[str, Any]]
    if case.stage == "dpo":  # trl reads text alone, and adds an end; " a" is a token
        sides = {name: " a" * (case.response - 1) for name in ("chosen", "rejected")}
        rows = [{"prompt": " a" * case.prompt, **sides}] * number
    else:
        mask = [0] * case.prompt + [1] * case.response
        rows = [
            {"prompt": "", "input_ids": ids, "completion_mask": mask}
            for ids in random_ids(number, len(mask))
        ]
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "sft": (SFTTrainer, SFTConfig, {}),
        "dpo": (DPOTrainer, DPOConfig, {"precompute_ref_log_probs": True}),
        "distill": (GKDTrainer, GKDConfig, {"lmbda": 0.0}),
    }
    trainer, kind, more = kinds[case.stage]
    network, models = load_causal_lm(model), {}
    if case.stage == "distill":
        models["teacher_model"] = network.requires_grad_(False)
        network = half_of(network, [row["input_ids"] for row in rows]).requires_grad_(True)
    return trainer(
        model=network,
        **models,
        args=trainer_arguments(settings, kind, save_strategy="no", **more),
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(model),
    )


def take_three_steps(
    accelerator: Any,
    module: "torch.nn.Module",
    case: Case,
    loss: Callable[["torch.nn.Module"], "torch.Tensor"],
) -> None:
    """Train for three steps of two passes.

    From the second on Adam's moments are there, and DDP lays its buckets out anew.
    """
    import torch

    from rlhf.parallel.settings import GroupSettings
    from rlhf.parallel.sharding import accumulating, backward, clear_gradients, prepare
    from rlhf.parallel.sharding_choice import choose_sharding

    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    sharding = choose_sharding(GroupSettings(sharding=case.sharding))
    model, stepper = prepare(accelerator, module, optimizer, sharding)
    for _ in range(3):
        for number in range(2):  # the second finds the gradients of the first
            with accumulating(accelerator, model, last=number == 1):
                backward(accelerator, model, loss(model))
        stepper.step()
        clear_gradients(model, stepper)


def random_ids(rows: int, length: int) -> list[list[int]]:
    """Token ids that are neither padding nor an end."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(3, 500, (rows, length), generator=generator).tolist()
    return ids


def peak_resident_bytes() -> int:
    """The largest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell the peak of resident memory")


def run_case(model: str, case: Case) -> dict[str, Any]:
    """Measure one case in a fresh process."""
    given = ["--model", model, "--case", json.dumps(asdict(case))]
    command = [
        sys.executable,
        "-P",
        __file__,
        *given,
    ]  # not beside reward.py, which hides a package
    if case.sharding != "auto":
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        command = [*agent, f"--nproc-per-node={PROCESSES}", *command]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    memory = json.loads(done.stdout.splitlines()[-1])
    ratio = memory["measured"] / memory["planned"]
    return {"model": Path(model).name, **asdict(case), **memory, "ratio": round(ratio, 3)}


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the tiny model")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        memory = measure(arguments.model, Case(**json.loads(arguments.case)))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(memory))
        return
    with tempfile.TemporaryDirectory() as folder:
        tiny = str(build_tiny_model(Path(folder) / "tiny"))
        runs = [run_case(tiny, case) for case in TINY_CASES]
        if not arguments.quick:
            runs += [run_case(str(REAL_MODEL), case) for case in REAL_CASES + SHARDED_CASES]
    for run in runs:
        fields = [f"{key}={run[key]}" for key in asdict(TINY_CASES[0])]
        sizes = [f"{key} {run[key] / 2**20:.0f} MiB" for key in ("planned", "measured")]
        print(run["model"], *fields, *sizes, f"ratio {run['ratio']}")
    if arguments.json:
        worst = max((run["ratio"] for run in runs), key=lambda ratio: abs(ratio - 1))
        versions = {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps({"ratio": worst, "runs": runs, "versions": versions}))


if __name__ == "__main__":
    main()
