"""The settings of `rlhf train-reward`; nothing here imports torch."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter, Token

from rlhf.config import MAX_SEED, flatten, part_of, require_range
from rlhf.errors import ConfigError
from rlhf.modeling.template_kwargs import TemplateKwargs
from rlhf.parallel.settings import ClusterSettings

Precision = Literal["auto", "bf16", "fp32"]
Loss = Literal["bradley_terry", "plackett_luce", "regression"]
Adapter = Literal["none", "lora", "qlora"]
CommunicationHook = Literal["no", "fp16", "bf16", "powersgd"]
TooLong = Literal["refuse", "truncate"]
Combine = Literal["mean", "min"]


def _read_seeds(kind: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Numbers with commas between them, from a flag or a settings file; none are an empty word."""
    return tuple(int(word) for token in tokens if token.value for word in token.value.split(","))


def _read_weights(kind: Any, tokens: Any) -> dict[str, float]:
    """Numbers by name, each after a flag of its own, or all as one JSON object.

    A name may have dots, at which the command line takes it apart.
    """
    if isinstance(tokens, dict):
        words = {name: given[0].value for name, given in flatten(tokens).items()}
    else:
        words = _read_object(tokens[0].value)
    return {name: _read_weight(name, word) for name, word in words.items()}


def _read_object(word: str) -> dict[str, Any]:
    with suppress(ValueError):
        value = json.loads(word)
        if isinstance(value, dict):
            return value
    raise ConfigError(
        f"--annotator-weights is {word!r}",
        "Name the annotator: --annotator-weights.NAME 0.5.",
    )


def _read_weight(name: str, word: Any) -> float:
    try:
        return float(word)
    except (TypeError, ValueError):
        raise ConfigError(
            f"--annotator-weights.{name} is {word!r}", "Give a number of at least 0."
        ) from None


@dataclass(frozen=True, kw_only=True)
class RewardSettings(ClusterSettings):
    """Which rankings, which model, and how to train."""

    rankings: Path
    """Folder that `rlhf export --format ranked` wrote."""
    model: str
    """Model folder, hub name or run; a language model gets a scalar head, a reward model keeps its
    own."""
    out: Path
    """Folder for the trained reward model, its metrics and its report."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template, e.g. '{"enable_thinking": false}'; later stages reuse
    them."""
    resume: bool = False
    """Go on with the run in --out."""
    seed: int = 0
    """Seed of a fresh head and of the order of prompts."""
    seeds: Annotated[tuple[int, ...], Parameter(converter=_read_seeds, n_tokens=1)] = ()
    """Train an ensemble, one model for each of these, such as 0,1,2."""
    precision: Precision = "auto"
    """bf16 is autocast over float32 weights; auto takes it where the hardware multiplies bf16."""
    head: Literal["random", "fitted"] = "random"
    """How a fresh head starts: at random, or fitted to the rankings on frozen features."""
    epochs: int = 1
    """Passes over the prompts; two over-fit; with --head fitted, 0 trains only the head."""
    prompts_per_batch: int = 16
    """Prompts per optimizer step, over all processes; a prompt brings all its pairs."""
    tokens_per_batch: int = 2048
    """Tokens in one forward pass; changes speed and memory, not the result."""
    share_prompt: bool = True
    """Encode a prompt once for all its responses; off where the model's attention forbids it."""
    learning_rate: float = 2e-5
    """Peak learning rate, annealed to 0; 5e-5 for small models to 9e-6 for 6B."""
    warmup_fraction: float = 0.05
    """Part of the steps in which the learning rate rises from 0."""
    max_length: int = 2048
    """Longest prompt + response in tokens."""
    too_long: TooLong = "refuse"
    """What to do beyond --max-length: refuse, or drop the oldest turns of the prompt."""
    reads_thinking: bool | None = None
    """Also read text inside `<think>` tags, in training and scoring. Default: as the model it
    starts from, else no."""
    loss: Loss = "bradley_terry"
    """All pairs; or whole rankings; or squared distance to standardised scores (ranks if none)."""
    margin: float = 0.0
    """Reward difference that bradley_terry asks for, per step of a ranking's strength."""
    centring: float = 0.0
    """Weight of a penalty on the squared sum of a pair's rewards; 0.01 keeps them near 0."""
    annotator_weights: Annotated[dict[str, float], Parameter(converter=_read_weights)] = field(
        default_factory=dict
    )
    """How much an annotator counts beside the others in a batch, such as --annotator-weights.ann
    0.5; others count 1, and 0 leaves one out."""
    thumbs_weight: float = 1.0
    """How much the thumbs on a prompt count beside the pairs of a prompt, which count 1."""
    all_bad_weight: float = 1.0
    """The same for responses of which somebody said that all are bad."""
    thumbs_down_flags: tuple[str, ...] = ()
    """Flags of single responses that count as a thumb down, such as unsafe."""
    limit: str = "100%"
    """Train on so many of the train prompts, or on a part: 500, 1%; fewer are always among more."""
    held_out_fraction: float = 0.1
    """Part of the prompts held out for measuring, when the export has no test prompts."""
    eval_every: int = 0
    """Steps between evaluations on part of the train prompts, set aside; the best weights win."""
    patience: int = 0
    """Stop after so many evaluations without a better one; 0 never stops early."""
    adapter: Adapter = "none"
    """Train all weights, or small adapters beside frozen ones; qlora freezes 4 bits, on CUDA."""
    lora_rank: int = 16
    """Rank of the adapters, which sit on every linear layer."""
    lora_alpha: int = 32
    """Adapters count lora_alpha / lora_rank; with them learn about ten times as fast."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, far less memory."""
    ddp_comm_hook: CommunicationHook = "no"
    """Compress gradients between processes; bf16 on CUDA; powersgd resumes inexactly."""
    save_every: int = 50
    """Optimizer steps between checkpoints; 0 for none."""
    keep_checkpoints: int = 1
    """Checkpoints that stay on disk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("epochs", self.epochs, 0 if self.head == "fitted" else 1)
        require_range("prompts_per_batch", self.prompts_per_batch, 1)
        require_range("tokens_per_batch", self.tokens_per_batch, 1)
        require_range("learning_rate", self.learning_rate, 0, 1, above_low=True)
        require_range("warmup_fraction", self.warmup_fraction, 0, 1)
        require_range("max_length", self.max_length, 2)
        require_range("seed", self.seed, 0, MAX_SEED)
        for seed in self.seeds:
            require_range("seeds", seed, 0, MAX_SEED)
        require_range("margin", self.margin, 0)
        part_of("limit", self.limit, 1)
        require_range("held_out_fraction", self.held_out_fraction, 0, 0.5, above_low=True)
        require_range("save_every", self.save_every, 0)
        require_range("keep_checkpoints", self.keep_checkpoints, 1)
        for name in ("centring", "thumbs_weight", "all_bad_weight"):
            require_range(name, getattr(self, name), 0)
        if self.seeds and len(set(self.seeds)) < max(2, len(self.seeds)):
            raise ConfigError(
                f"--seeds {','.join(map(str, self.seeds))} does not name different models",
                "Give two or more different seeds, such as 0,1,2, or one --seed.",
            )
        self._require_tensor_parallel(adapter="none", ddp_comm_hook="no", seeds=())
        require_range("eval_every", self.eval_every, 0)
        require_range("patience", self.patience, 0)
        require_range("lora_rank", self.lora_rank, 1)
        require_range("lora_alpha", self.lora_alpha, 1)
        for name, weight in self.annotator_weights.items():
            require_range(f"annotator_weights.{name}", weight, 0)
        _require_choice("loss", self.loss, Loss)
        _require_choice("adapter", self.adapter, Adapter)
        _require_choice("ddp_comm_hook", self.ddp_comm_hook, CommunicationHook)
        _require_choice("precision", self.precision, Precision)
        _require_choice("too_long", self.too_long, TooLong)
        if self.margin and self.loss != "bradley_terry":
            raise ConfigError(
                f"--margin {self.margin:g} has no meaning for --loss {self.loss}",
                "Leave it out, or use --loss bradley_terry.",
            )
        if self.sharding not in ("none", "ddp") and self.adapter != "none":
            raise ConfigError(
                f"--adapter {self.adapter} leaves little to divide for --sharding {self.sharding}",
                "Leave --sharding out, or train all weights: --adapter none.",
            )
        if self.sharding not in ("none", "ddp") and self.ddp_comm_hook != "no":
            raise ConfigError(
                f"--ddp-comm-hook {self.ddp_comm_hook} has no meaning with --sharding "
                f"{self.sharding}",
                "Leave it out: only --sharding ddp averages whole gradients.",
            )
        if self.patience and not self.eval_every:
            raise ConfigError(
                f"--patience {self.patience} counts evaluations, but --eval-every is 0",
                "Say how many steps lie between two, for example --eval-every 50.",
            )


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """Which responses to score, and by what."""

    # Not keyword-only: the file is given without a flag.
    file: Annotated[Path, Parameter(name="--file")] = field(kw_only=False)
    """JSON Lines: prompt (or messages) with response (or responses), or lines of an export."""
    reward: str
    """A reward model, signal:package.module:function, or an http(s):// endpoint."""
    out: Path
    """JSON Lines with the rewards added."""
    combine: Combine = "mean"
    """What counts of the members of an ensemble: their mean, or the worst of them."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat template of a reward model that records none, e.g.
    '{"enable_thinking": false}'."""
    tokens_per_batch: int = 4096
    """Tokens in one forward pass of a reward model."""
    precision: Precision = "auto"
    """bf16 is autocast over float32 weights; auto takes it where the hardware multiplies bf16."""

    def __post_init__(self) -> None:
        require_range("tokens_per_batch", self.tokens_per_batch, 1)
        _require_choice("precision", self.precision, Precision)
        _require_choice("combine", self.combine, Combine)


def _require_choice(name: str, value: str, kind: Any) -> None:
    """Refuse a word that the literal type `kind` does not list; flags are checked by the parser."""
    choices = get_args(kind)
    if value not in choices:
        words = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ConfigError(f"--{name.replace('_', '-')} is {value!r}", f"Use {words}.")
