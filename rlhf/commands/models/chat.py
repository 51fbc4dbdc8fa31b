"""`rlhf chat`: ask the policy and the original the same questions, side by side in the browser."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.sampling.settings import require_sampling
from rlhf.config import require_range
from rlhf.config.template_kwargs import TemplateKwargs
from rlhf.records.wording import counted

if TYPE_CHECKING:
    from rlhf.records.schema import Prompt, Response

EXAMPLE = "rlhf chat --policy runs/first/ppo --reference models/SmolLM2-135M-Instruct"
TOKENS_PER_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which models answer, and where votes are stored."""

    policy: str
    """The --out of rlhf ppo, dpo, sft, distill, quantize or loop (its promoted policy), or a model
    folder."""
    reference: str
    """The original model: folder or hub name."""
    db: Path = Path("chat.db")
    """The label database that stores questions, responses and votes; created if it does not
    exist."""
    reward: str | None = None
    """Reward model whose rewards are shown; default: the one --policy was trained with, if it still
    exists."""
    annotator: str | None = None
    """Your name; default: your login name."""
    port: int = 7860
    """Port to serve on; only this machine can connect."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Sample from the most likely tokens that sum to this probability; 1: all."""
    max_new_tokens: int = 256
    """Maximum length of a response, in tokens."""
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Values passed to the chat templates of models that record none, e.g.
    '{"enable_thinking": false}'."""

    def __post_init__(self) -> None:
        require_range("port", self.port, 1, 65535)
        require_sampling(self.temperature, self.top_p, 0, self.max_new_tokens)


def run(settings: Settings) -> dict[str, Any]:
    """Ask a policy and the original model the same questions in the browser, and vote blind."""
    from labeling_app.db.files.label_file import refuse_other_files
    from labeling_app.web.serving import BoardOptions, LiveOptions, serve
    from policies.sampling.streaming import LocalModel
    from rlhf.modeling.models import policy_folder
    from rlhf.records.schema import Sampling

    refuse_other_files(settings.db)
    sampling = Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_new_tokens=settings.max_new_tokens,
    )
    given = settings.chat_template_kwargs
    folder = policy_folder(settings.policy, "--policy")
    policy = LocalModel(folder, sampling, given)
    reference = LocalModel(settings.reference, sampling, given)
    reward = settings.reward or _trained_with(folder)
    note = _note(policy.description, reward)
    shown = f"rewards are those of {reward}" if reward else "--reward RM shows rewards, too"
    sys.stderr.write(f"Thumbs and picks are kept in {settings.db}; {shown}.\n")
    return serve(
        settings.db,
        BoardOptions(port=settings.port, annotator=settings.annotator, flags=()),
        LiveOptions(models=[policy, reference], note=note, is_first=True),
    )


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How many votes were stored, and where."""
    return f"{counted(result['new_rankings'], 'vote')} stored in {settings.db}."


def _trained_with(folder: str) -> str | None:
    """The reward model of the run that trained a policy, the first of several, if it exists.

    Only a folder: a function that stage.json names is never run here.
    """
    from policies.rewards import is_model
    from rlhf.run.rundir import RunDir

    path = RunDir(Path(folder).parent).inputs.get("reward", {}).get("path", "")
    return path if is_model(path) and Path(path).is_dir() else None


def _note(
    policy: dict[str, str], reward: str | None
) -> "Callable[[Prompt, Sequence[Response]], list[str]]":
    """Labels every response with its model and its reward.

    `policy` is the description of the policy by `rlhf.modeling.models.describe_model`.
    """
    score = None
    if reward is not None:
        from policies.rewards import is_model
        from reward.scoring.texts import load_text_reward
        from rlhf.modeling.readers import described_kwargs, reward_kwargs
        from rlhf.parallel.distributed import start

        given = reward_kwargs(reward, described_kwargs(policy)) if is_model(reward) else {}
        accelerator = start("auto", seed=0)
        score = load_text_reward(reward, accelerator, TOKENS_PER_BATCH, given=given)

    def note(prompt: "Prompt", responses: "Sequence[Response]") -> list[str]:
        names = ["new" if r.model_fingerprint == policy["hash"] else "original" for r in responses]
        if score is None:
            return names
        [rewards] = score([(prompt, tuple(responses))])
        return [f"{name}, reward {value:+z.2f}" for name, value in zip(names, rewards, strict=True)]

    return note
