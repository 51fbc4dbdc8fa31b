"""The settings of `rlhf reference`; torch-free, so that `--help` is quick."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from policies.sampling.settings import Engine, require_engine, require_sampling
from rlhf.config import MAX_SEED, Precision, flag_of, read_setting, require_range
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.errors import ConfigError
from rlhf.parallel.settings import GroupSettings

SAMPLED = (
    *("sampling.engine", "sampling.engine_tensor_parallel", "sampling.samples"),
    *("sampling.temperature", "sampling.max_new_tokens", "sampling.reuse"),
    *("chat_template_kwargs", "store_top_k", "prompts_per_shard"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How responses are sampled."""

    engine: Engine = "generate"
    """Sampling engine. `generate`: transformers' plain sampling; `continuous`: its continuous
    batching; `vllm`: vLLM, where it is installed."""
    engine_tensor_parallel: int = 1
    """With --sampling.engine vllm and --sharding fsdp or zero3: number of neighboring processes
    that share one vLLM, each with a part of every matrix. At most the GPUs of one machine."""
    samples: int = 1
    """Reference outputs per prompt."""
    temperature: float = 1.0
    """Sampling temperature."""
    max_new_tokens: int = 256
    """Length limit of a response, in tokens."""
    reuse: bool = True
    """Reuse responses in the export that this model sampled with the same settings. Those chosen
    for a later round or an evaluation, or of a stopped question, are not reused."""

    def __post_init__(self) -> None:
        require_range("sampling.samples", self.samples, 1)
        require_sampling(self.temperature, 1.0, 0, self.max_new_tokens, "sampling.")
        require_engine("--sampling.engine", self.engine, self.engine_tensor_parallel)

    @property
    def vllm_processes(self) -> int:
        """Processes that share a vLLM; 0 where another engine samples."""
        return self.engine_tensor_parallel if self.engine == "vllm" else 0


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings(GroupSettings):
    """Settings of `rlhf reference`."""

    OLD_NAMES: ClassVar[dict[str, str]] = {
        **GroupSettings.OLD_NAMES,
        "engine": "sampling.engine",
        "engine_tensor_parallel": "sampling.engine_tensor_parallel",
        "samples": "sampling.samples",
        "temperature": "sampling.temperature",
        "max_new_tokens": "sampling.max_new_tokens",
        "reuse": "sampling.reuse",
    }
    ZERO_IS_NONE: ClassVar[frozenset[str]] = GroupSettings.ZERO_IS_NONE | {"store_top_k"}

    prompts: Path | None = None
    """Folder written by `rlhf export`, or a JSON Lines file of prompts."""
    model: str | None = None
    """The original model: folder or hub name."""
    out: Path
    """Folder for the reference outputs."""
    reward: str | None = None
    """Score the outputs with a reward model, a function `signal:package.module:function` or an
    http(s):// address, and store the scores with them. Without --prompts and --model: score the
    outputs that --out already holds."""
    replace_reward: bool = False
    """Overwrite stored scores: those of another reward, or of the same function or endpoint, which
    may have changed."""
    inspect: bool = False
    """Describe what --out holds, and exit."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """How responses are sampled."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template, e.g. '{"enable_thinking": false}'; later stages reuse
    them."""
    store_top_k: int | None = None
    """Also store the log-probs of the N most likely tokens at every position, for
    `rlhf ppo --kl.estimator top_k`. Default: not stored."""
    batch_size: int = 64
    """Sequences sampled or scored at once."""
    prompts_per_shard: int = 512
    """Prompts per Parquet file; a resumed run repeats at most one file per process."""
    shard: str | None = None
    """I/N: run job I (from 0) of N independent jobs that fill one --out; it writes every N-th file.
    Repeat the command to continue a killed job. The last job to finish writes the manifest."""
    seed: int = 0
    """Random seed."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""
    resume: bool = False
    """Continue an unfinished run in --out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_engine_groups(self.sampling.engine_tensor_parallel)
        self._require_tensor_parallel(**{"sampling.engine": "generate"})
        if self.parallel.offload and self.sharding in ("zero1", "zero2"):
            raise ConfigError(
                f"--parallel.offload has no effect with --sharding {self.sharding}: it shards "
                "gradients and optimizer state, which only training has",
                "Use --sharding fsdp or zero3, or leave --parallel.offload out.",
            )
        shared = self.sampling.engine_tensor_parallel
        if shared > 1 and self.sharding not in ("fsdp", "zero3"):
            raise ConfigError(
                f"--sampling.engine-tensor-parallel {shared} needs a sharded model: without "
                "--sharding fsdp or zero3 each process holds all of it",
                "Add --sharding fsdp, or leave it out.",
            )
        require_range("seed", self.seed, 0, MAX_SEED)
        require_range("batch_size", self.batch_size, 1)
        require_range("prompts_per_shard", self.prompts_per_shard, 1)
        require_range("store_top_k", self.store_top_k, 1)
        index, count = self.part
        if not index < count:
            raise ConfigError(
                f"--shard is {self.shard!r}",
                "Give I/N with I from 0 to N - 1: the jobs of --shard 0/4 … 3/4 fill one --out.",
            )
        if (self.prompts is None) != (self.model is None) or not (
            self.prompts or self.reward or self.inspect
        ):
            raise ConfigError(
                "rlhf reference needs --prompts and --model",
                "Give both; or, for outputs that --out already holds, --reward R or --inspect.",
            )
        if self.model is None and not self.inspect:
            self._refuse_sampling()

    def _refuse_sampling(self) -> None:
        """Refuse sampling settings where outputs are stored already."""
        usual = ReferenceSettings(out=self.out, inspect=True)
        for name in SAMPLED:
            value = read_setting(self, name)
            if value != read_setting(usual, name):
                raise ConfigError(
                    f"{flag_of(name)} is {value} for outputs that --out already holds",
                    "Leave it out, also of --config files; or give --prompts, --model and another "
                    "--out, to sample new outputs.",
                )

    @property
    def part(self) -> tuple[int, int]:
        """Which of how many jobs this is; (0, 0) where --shard cannot be read."""
        if self.shard is None:
            return 0, 1
        parts = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        return (int(parts[1]), int(parts[2])) if parts else (0, 0)
