"""The settings of `rlhf train-reward`; nothing here imports torch."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from cyclopts import Parameter, Token

from rlhf.config import MAX_SEED, Precision, TrainingPrecision, flatten, part_of, require_range
from rlhf.config.paths import flag_of
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.errors import ConfigError
from rlhf.parallel.settings import SHARDED, CheckpointSettings, ClusterSettings
from rlhf.records.thumbs import PointwiseKind

Loss = Literal["bradley_terry", "plackett_luce", "regression"]
Adapter = Literal["none", "lora", "qlora"]
CommunicationHook = Literal["no", "fp16", "bf16", "powersgd"]
TooLong = Literal["refuse", "truncate"]
Combine = Literal["mean", "worst"]


def _read_seeds(kind: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Numbers separated by commas, from a flag or a settings file; an empty string gives none."""
    return tuple(int(word) for token in tokens if token.value for word in token.value.split(","))


def _read_weights(kind: Any, tokens: Any) -> dict[str, float] | Literal["auto"]:
    """Weights by name, each from its own flag or all from one JSON object; or `auto`.

    A name may have dots, at which the command-line parser splits it.
    """
    if isinstance(tokens, dict):
        values = {name: given[0].value for name, given in flatten(tokens).items()}
    elif tokens[0].value == "auto":
        return "auto"
    else:
        values = _read_object(tokens[0].value)
    return {name: _read_weight(name, value) for name, value in values.items()}


def _read_object(word: str) -> dict[str, Any]:
    with suppress(ValueError):
        value = json.loads(word)
        if isinstance(value, dict):
            return value
    raise ConfigError(
        f"--annotator-weights is {word!r}",
        "Name the annotator, --annotator-weights.NAME 0.5, or use --annotator-weights auto.",
    )


def _read_weight(name: str, word: Any) -> float:
    try:
        return float(word)
    except (TypeError, ValueError):
        raise ConfigError(
            f"--annotator-weights.{name} is {word!r}", "Give a number of at least 0."
        ) from None


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """Learning rate and number of passes."""

    epochs: int = 1
    """Passes over the prompts; more than one tends to overfit. With --head fitted, 0 trains only
    the head."""
    learning_rate: float = 2e-5
    """Peak learning rate; it falls linearly to 0. Usual: 5e-5 for small models to 9e-6 for 6B."""
    warmup_fraction: float = 0.05
    """Fraction of the steps over which the learning rate rises from 0."""

    def __post_init__(self) -> None:
        require_range("optim.learning_rate", self.learning_rate, 0, 1, above_low=True)
        require_range("optim.warmup_fraction", self.warmup_fraction, 0, 1)


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How many prompts a step trains on, and how much is computed at once."""

    prompts: int = 16
    """Prompts per optimizer step, over all processes, each with all its pairs."""
    micro_tokens: int = 2048
    """Tokens per forward and backward pass; affects speed and memory only."""
    share_prompt: bool = True
    """Encode each prompt once for all its responses, if the model's attention supports it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, far less memory."""

    def __post_init__(self) -> None:
        require_range("batch.prompts", self.prompts, 1)
        require_range("batch.micro_tokens", self.micro_tokens, 1)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which of the rankings are read, and how."""

    max_length: int = 2048
    """Maximum tokens of prompt and response."""
    too_long: TooLong = "refuse"
    """For longer inputs: refuse (an error), or truncate (drop the oldest turns)."""
    reads_thinking: bool | None = None
    """Also read text inside `<think>` tags, in training and scoring. Default: as in --model if that
    is a reward model, otherwise no."""
    limit: str = "100%"
    """Use only this many training prompts, such as 500 or 1%. A larger limit includes the prompts
    of a smaller one."""
    thumbs_down_flags: tuple[str, ...] = ()
    """Flags on single responses that count as a thumbs-down, such as unsafe."""

    def __post_init__(self) -> None:
        require_range("data.max_length", self.max_length, 2)
        part_of("data.limit", self.limit, 1)
        require_choice("data.too_long", self.too_long, TooLong)


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Terms and weights of the loss."""

    margin: float = 0.0
    """bradley_terry: margin in the loss for each unit of preference strength."""
    centering: float = 0.0
    """Weight of a penalty on the squared sum of a pair's rewards, which keeps rewards near 0; 0: no
    penalty, 0.01 is usual."""
    thumbs_weight: float = 1.0
    """Weight of the thumbs on a prompt; the pairs of a prompt have weight 1."""
    all_bad_weight: float = 1.0
    """Weight of the judgment that all responses to a prompt are bad."""

    def __post_init__(self) -> None:
        for name in ("margin", "centering", "thumbs_weight", "all_bad_weight"):
            require_range(f"objective.{name}", getattr(self, name), 0)

    @property
    def pointwise_weights(self) -> dict[PointwiseKind, float]:
        """The weight of each kind of judgment of a single response."""
        return {"thumbs": self.thumbs_weight, "all_bad": self.all_bad_weight}


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Evaluation on prompts that are not trained on."""

    held_out_fraction: float = 0.1
    """Fraction of the prompts held out for measuring, when the export has no test prompts."""
    every: int | None = None
    """Evaluate every N steps on training prompts held back for this, and keep the best weights.
    Default: off."""
    patience: int | None = None
    """Stop after this many evaluations without improvement. Default: never stop early."""

    def __post_init__(self) -> None:
        name = "evaluation.held_out_fraction"
        require_range(name, self.held_out_fraction, 0, 0.5, above_low=True)
        require_range("evaluation.every", self.every, 1)
        require_range("evaluation.patience", self.patience, 1)
        if self.patience and not self.every:
            raise ConfigError(
                f"--evaluation.patience {self.patience} counts evaluations, and without "
                "--evaluation.every there are none",
                "Say how many steps lie between two, for example --evaluation.every 50.",
            )


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The adapters of `--adapter lora` and `--adapter qlora`."""

    rank: int = 16
    """Rank of the adapters on every linear layer."""
    alpha: int = 32
    """Adapters are scaled by alpha / rank. Use about ten times the learning rate of full
    training."""

    def __post_init__(self) -> None:
        require_range("lora.rank", self.rank, 1)
        require_range("lora.alpha", self.alpha, 1)


@dataclass(frozen=True, kw_only=True)
class RewardCheckpointSettings(CheckpointSettings):
    """Saved states that a run resumes from."""

    every: int | None = 50
    """Steps between checkpoints. none: no checkpoints by step count."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings(ClusterSettings):
    """Which rankings, which model, and how to train."""

    OLD_NAMES: ClassVar[dict[str, str]] = {
        **ClusterSettings.OLD_NAMES,
        "epochs": "optim.epochs",
        "learning_rate": "optim.learning_rate",
        "warmup_fraction": "optim.warmup_fraction",
        "prompts_per_batch": "batch.prompts",
        "tokens_per_batch": "batch.micro_tokens",
        "share_prompt": "batch.share_prompt",
        "gradient_checkpointing": "batch.gradient_checkpointing",
        "max_length": "data.max_length",
        "too_long": "data.too_long",
        "reads_thinking": "data.reads_thinking",
        "limit": "data.limit",
        "thumbs_down_flags": "data.thumbs_down_flags",
        "margin": "objective.margin",
        "centring": "objective.centering",
        "thumbs_weight": "objective.thumbs_weight",
        "all_bad_weight": "objective.all_bad_weight",
        "held_out_fraction": "evaluation.held_out_fraction",
        "eval_every": "evaluation.every",
        "patience": "evaluation.patience",
        "lora_rank": "lora.rank",
        "lora_alpha": "lora.alpha",
        "save_every": "checkpoint.every",
        "keep_checkpoints": "checkpoint.keep",
    }
    ZERO_IS_NONE: ClassVar[frozenset[str]] = ClusterSettings.ZERO_IS_NONE | {
        "checkpoint.every",
        "evaluation.every",
        "evaluation.patience",
    }

    rankings: Path
    """Folder written by `rlhf export --format ranked`."""
    model: str
    """Model folder, hub name or run. A language model gets a scalar head; a reward model keeps its
    own."""
    out: Path
    """Folder for the trained reward model, its metrics and its report."""
    loss: Loss = "bradley_terry"
    """Training loss. `bradley_terry`: over all pairs of a prompt. `plackett_luce`: over the whole
    ranking. `regression`: squared error against standardized scores (ranks if there are none)."""
    adapter: Adapter = "none"
    """What is trained. `none`: all weights. `lora`: adapters next to frozen weights. `qlora`: the
    same, with the frozen weights in 4 bits; CUDA only."""
    optim: OptimSettings = field(default_factory=OptimSettings)
    """Learning rate and number of passes."""
    batch: BatchSettings = field(default_factory=BatchSettings)
    """How many prompts a step trains on, and how much is computed at once."""
    data: DataSettings = field(default_factory=DataSettings)
    """Which of the rankings are read, and how."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """Terms and weights of the loss."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Evaluation on prompts that are not trained on."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """The adapters."""
    checkpoint: RewardCheckpointSettings = field(default_factory=RewardCheckpointSettings)
    """Saved states."""
    annotator_weights: Annotated[
        dict[str, float] | Literal["auto"],
        Parameter(converter=_read_weights, metavar="auto", show_choices=False),
    ] = field(default_factory=dict)
    """Weight of each annotator, as --annotator-weights.NAME 0.5, or auto: estimate all weights from
    how well annotators agree. Default: 1; 0 excludes an annotator."""
    head: Literal["random", "fitted"] = "random"
    """How a new head is initialized: at random, or fitted to the rankings on frozen features."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template, e.g. '{"enable_thinking": false}'; later stages reuse
    them."""
    seed: int = 0
    """Seed of a new head and of the order of prompts."""
    seeds: Annotated[tuple[int, ...], Parameter(converter=_read_seeds, n_tokens=1)] = ()
    """Train an ensemble with one model per seed, such as 0,1,2."""
    learning_curve: bool = False
    """First train on an eighth, a quarter and half of the prompts, and forecast in the report what
    two and four times the labels would give. Takes about twice as long."""
    precision: TrainingPrecision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32. bf16-weights:
    the trained model also holds its weights and gradients in bf16, with float32 masters that the
    optimizer updates; for GPUs, and only if all weights are trained."""
    resume: bool = False
    """Continue an unfinished run in --out."""
    ddp_comm_hook: CommunicationHook = "no"
    """Compress the gradients that --sharding ddp sends between processes: fp16, bf16 (CUDA only; as
    --parallel.reduce-dtype bf16) or powersgd (a resumed run is then not bit-identical)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("optim.epochs", self.optim.epochs, 0 if self.head == "fitted" else 1)
        require_range("seed", self.seed, 0, MAX_SEED)
        for seed in self.seeds:
            require_range("seeds", seed, 0, MAX_SEED)
        if self.annotator_weights != "auto":
            for name, weight in self.annotator_weights.items():
                require_range(f"annotator_weights.{name}", weight, 0)
        require_choice("loss", self.loss, Loss)
        require_choice("adapter", self.adapter, Adapter)
        require_choice("ddp_comm_hook", self.ddp_comm_hook, CommunicationHook)
        require_choice("precision", self.precision, TrainingPrecision)
        self._require_tensor_parallel(adapter="none", ddp_comm_hook="no", seeds=())
        self._require_bf16_weights_fit(self.precision, adapter="none", ddp_comm_hook="no")
        self._require_compatible()

    def _require_compatible(self) -> None:
        """Refuse settings that have no effect beside others."""
        if self.seeds and len(set(self.seeds)) < max(2, len(self.seeds)):
            raise ConfigError(
                f"--seeds {','.join(map(str, self.seeds))} does not name different models",
                "Give two or more different seeds, such as 0,1,2, or one --seed.",
            )
        if self.seeds and self.learning_curve:
            raise ConfigError(
                "--learning-curve measures one model of each size, not an ensemble of "
                f"{len(self.seeds)}",
                "Leave --learning-curve or --seeds out.",
            )
        if self.objective.margin and self.loss != "bradley_terry":
            raise ConfigError(
                f"--objective.margin {self.objective.margin:g} has no effect with --loss "
                f"{self.loss}",
                "Leave it out, or use --loss bradley_terry.",
            )
        if SHARDED[self.sharding] and self.adapter != "none":
            raise ConfigError(
                f"--adapter {self.adapter} leaves little to shard for --sharding {self.sharding}",
                "Leave --sharding out, or train all weights: --adapter none.",
            )
        if SHARDED[self.sharding] and self.ddp_comm_hook != "no":
            raise ConfigError(
                f"--ddp-comm-hook {self.ddp_comm_hook} has no effect with --sharding "
                f"{self.sharding}",
                "Leave it out: only --sharding ddp averages whole gradients.",
            )
        if self.parallel.reduce_dtype != "fp32" and self.ddp_comm_hook != "no":
            raise ConfigError(
                f"--parallel.reduce-dtype {self.parallel.reduce_dtype} and --ddp-comm-hook "
                f"{self.ddp_comm_hook} both compress gradients",
                "Leave one of them out.",
            )


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """Which responses to score, and by what."""

    OLD_NAMES: ClassVar[dict[str, str]] = {"tokens_per_batch": "micro_tokens"}
    OLD_VALUES: ClassVar[dict[str, dict[str, str]]] = {"combine": {"min": "worst"}}

    # Not keyword-only: the file is given without a flag.
    file: Annotated[Path | None, Parameter(name="--file")] = field(default=None, kw_only=False)
    """JSON Lines: prompt (or messages) with response (or responses), or lines of an export."""
    rankings: Path | None = None
    """Instead of FILE: report how often the reward agrees with judgments. Give a folder written by
    `rlhf export`, of which the test prompts are read, or a file of preferences in any format of
    `rlhf import`."""
    reward: str
    """A reward model, signal:package.module:function or http(s):// address."""
    out: Path
    """JSON Lines file for responses and rewards; with --rankings, the folder for report.html and
    report.json."""
    combine: Combine = "mean"
    """The reward of an ensemble: the mean or the lowest (`worst`) of its members' rewards."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template of a reward model that records none, e.g.
    '{"enable_thinking": false}'."""
    micro_tokens: int = 4096
    """Tokens per forward pass of a reward model; affects speed and memory only."""
    precision: Precision = "auto"
    """Precision of matrix products. auto: bf16 where the hardware has it, else fp32."""
    price_per_hour: float | None = None
    """With --rankings: price per device-hour, in any currency; adds the cost of the measurement to
    the report. Default: report device-hours only."""

    def __post_init__(self) -> None:
        require_range("micro_tokens", self.micro_tokens, 1)
        require_range("price_per_hour", self.price_per_hour, 0)
        require_choice("precision", self.precision, Precision)
        require_choice("combine", self.combine, Combine)
        if (self.file is None) == (self.rankings is None):
            raise ConfigError(
                "Give FILE or --rankings, "
                + ("not both" if self.file else "and neither was given"),
                "FILE: write the reward of every response. --rankings: report how often the reward "
                "agrees with judgments.",
            )
        if self.rankings is None and self.price_per_hour is not None:
            raise ConfigError(
                "--price-per-hour has no effect with FILE: there is no report",
                "Leave it out, or give --rankings.",
            )


def require_choice(name: str, value: str, kind: Any) -> None:
    """Refuse a value that the literal type `kind` does not list; the parser checks only flags."""
    choices = get_args(kind)
    if value not in choices:
        alternatives = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ConfigError(f"{flag_of(name)} is {value!r}", f"Use {alternatives}.")
