"""`rlhf users`: who may sign in to the labelling app, and which programs may send feedback."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from rlhf.errors import ConfigError

Action = Literal["add", "list", "disable", "enable", "reset", "token", "revoke"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to do with whom."""

    # Not keyword-only: `rlhf users add ann`.
    action: Annotated[Action, Parameter(name="--action")] = field(kw_only=False)
    """add, list, disable, enable, reset (a new password, signed out everywhere); for a program
    that sends feedback: token (a new one, shown once) or revoke."""
    name: str = field(default="", kw_only=False)
    """The name of the user or program."""
    db: Path
    """The label database."""
    role: Literal["annotator", "lead", "admin"] = "annotator"
    """annotator ranks; lead also sees the dashboard; admin may do everything."""
    password_stdin: bool = False
    """Read the password from standard input; otherwise a random one is made and shown once."""

    def __post_init__(self) -> None:
        if self.action != "list" and not self.name:
            raise ConfigError(
                f"rlhf users {self.action} needs a name",
                f"Type: rlhf users {self.action} NAME --db {self.db}",
            )


def run(settings: Settings) -> dict[str, Any]:
    """Say who may sign in to the labelling app, and which programs may send feedback."""
    from labeling_app.annotators.passwords import new_password
    from labeling_app.annotators.users import Users
    from labeling_app.data_io.tokens import make_token, programs, revoke_token
    from labeling_app.db.store import Store

    with Store(settings.db, must_exist=True, read_only=settings.action == "list") as store:
        users = Users(store)
        if settings.action == "list":
            people = {u.name: u.role + (" (disabled)" if u.disabled else "") for u in users.all()}
            return people | dict.fromkeys(programs(store), "program")
        if settings.action == "token":
            return {"program": settings.name, "token": make_token(store, settings.name)}
        if settings.action == "revoke":
            revoke_token(store, settings.name)
            return {"program": settings.name, "revoked": True}
        if settings.action in ("disable", "enable"):
            users.set_disabled(settings.name, disabled=settings.action == "disable")
            return {"user": settings.name, "disabled": settings.action == "disable"}
        given = sys.stdin.readline().rstrip("\n") if settings.password_stdin else ""
        password = given or new_password()
        if settings.action == "add":
            users.add(settings.name, settings.role, password)
        else:
            users.reset_password(settings.name, password)
    shown = {} if given else {"password": password}
    return {"user": settings.name, **shown}
