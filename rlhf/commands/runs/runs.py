"""`rlhf runs`: steer a loop: pause, train at once, promote a policy, ask people about a round."""

import getpass
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from rlhf.commands.idle_settings import refuse_idle
from rlhf.config import require_range
from rlhf.records.wording import counted

EXAMPLE = "rlhf runs promote runs/loop --round 1"

Action = Literal["pause", "resume", "train", "promote", "rollback", "history", "ask", "votes"]
OF_A_ROUND = ("promote", "ask", "votes")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to do with which loop."""

    # Not keyword-only: `rlhf runs pause runs/loop`.
    action: Annotated[Action, Parameter(name="--action")] = field(kw_only=False)
    """pause: the loop waits after the running stage. resume: end the pause. train: a round that
    waits for people trains with the rankings there are. promote: live mode and serving use the
    policy of a round. rollback: they use the previously promoted one again. history: list all
    promotions and rollbacks. ask: people compare a round's responses with the original's and the
    previous policy's, blind. votes: count their votes, which then decide whether it gained."""
    out: Path = field(kw_only=False)
    """The --out of rlhf loop."""
    round: int | None = None
    """With promote, ask and votes: the round. Default: the newest evaluated one."""
    now: bool = False
    """With pause: the running stage saves its state and stops; resume repeats only what is
    missing."""

    def __post_init__(self) -> None:
        require_range("round", self.round, 0)
        if self.action not in OF_A_ROUND:
            refuse_idle(self, ["round"], f"with {self.action}")
        if self.action != "pause":
            refuse_idle(self, ["now"], f"with {self.action}")


def run(settings: Settings) -> dict[str, Any]:
    """Pause or resume a loop, train at once, promote a policy, or ask people about a round."""
    from rlhf.run.locks import is_locked
    from rlhf.run.loops.pausing import end_pause, request_pause
    from rlhf.run.loops.promotion import (
        promote,
        promoted_policy,
        promoted_round,
        read_promotions,
        require_loop,
        roll_back,
    )
    from rlhf.run.loops.train_now import request_training

    out, name = settings.out, getpass.getuser()
    require_loop(out)
    if settings.action == "pause":
        request_pause(out, name, stops_stage=settings.now)
        return {"paused": True, "running": is_locked(out)}
    if settings.action == "resume":
        return {"resumed": end_pause(out), "running": is_locked(out)}
    if settings.action == "train":
        waiting = request_training(out, name)
        return {"new_rankings": waiting.new, "about_samples": waiting.about_samples}
    if settings.action in ("ask", "votes"):
        from rlhf.commands.loop.asking import ask_people, count_votes

        return (ask_people if settings.action == "ask" else count_votes)(out, settings.round)
    if settings.action == "promote":
        promote(out, settings.round, name)
    elif settings.action == "rollback":
        roll_back(out, name)
    history = read_promotions(out)
    return {
        "round": promoted_round(history),
        "policy": promoted_policy(out),
        "history": [asdict(promotion) for promotion in history],
    }


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """What the loop does now, which policy is promoted, or what people were asked or said."""
    command = f"rlhf loop --config {shlex.quote(str(settings.out / 'config.yaml'))}"
    if settings.action == "pause":
        when = "has saved its state" if settings.now else "has ended"
        return (
            f"The loop pauses when the running command {when}."
            if result["running"]
            else f"No loop runs in {settings.out}; the next one waits until it is resumed."
        )
    if settings.action == "resume":
        first = "" if result["resumed"] else "It was not paused. "
        if result["running"]:
            return f"{first}The loop goes on."
        return f"{first}No loop runs in {settings.out}. Next: {command}"
    if settings.action == "train":
        trains = f"The round trains now, with {counted(result['new_rankings'], 'new ranking')}."
        return f"{trains} {result['about_samples']}".rstrip()
    if settings.action in ("ask", "votes"):
        return _about_people(settings, result)
    lines = (
        [_line(promotion) for promotion in result["history"]]
        if settings.action == "history"
        else []
    )
    number = result["round"]
    whose = "No policy is promoted: the model" if number is None else f"Promoted: round {number}"
    return "\n".join([*lines, f"{whose}, {result['policy']}"])


def _about_people(settings: Settings, result: dict[str, Any]) -> str:
    from rlhf.commands.loop.report import describe_round

    if settings.action == "votes":
        return describe_round(result)
    votes = f"rlhf runs votes {shlex.quote(str(settings.out))} --round {result['round']}"
    each = f", {counted(result['people_per_pair'], 'vote')} on each" if result["queued"] else ""
    return f"Queued {counted(result['queued'], 'pair')} for people{each}. Then: {votes}"


def _line(promotion: dict[str, Any]) -> str:
    number = "the original model" if promotion["round"] is None else f"round {promotion['round']}"
    verb = "rolled back to" if promotion["rolled_back"] else "promoted"
    return f"{promotion['at']}  {promotion['by']} {verb} {number}"
