"""`rlhf users`: who may sign in to the labeling app and gets which tasks; programs with a token."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rlhf.commands.idle_settings import refuse_idle
from rlhf.commands.wording import columns, listed, next_command
from rlhf.errors import ConfigError, InputError

EXAMPLE = "rlhf users add ann --db labels.db"
SHOWN_SOURCES = 20

if TYPE_CHECKING:
    from labeling_app.annotators.users import User, Users

Action = Literal[
    "add", "list", "role", "team", "disable", "enable", "reset", "assign", "token", "revoke"
]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to do with whom."""

    # Not keyword-only: `rlhf users add ann`.
    action: Annotated[Action, Parameter(name="--action")] = field(kw_only=False)
    """People: add, list, role (change it, with --role), team (change it, with --team or --no-team),
    disable, enable, reset (new password); role, disable and reset sign the person out everywhere.
    Tasks: assign SOURCE NAME... (only they get the tasks of that source, for example assign prompts
    ann bob), assign SOURCE --team TEAM..., or assign SOURCE --everybody. Programs that send
    feedback: token (a new one, shown once), revoke."""
    name: str = field(default="", kw_only=False)
    """The name of the user or program; assign: the source of prompts, as `rlhf import` stored
    it."""
    people: Annotated[tuple[str, ...], Parameter(name="--people", negative="")] = field(
        default=(), kw_only=False
    )
    """assign: the users who get the tasks; replaces earlier assignments."""
    team: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """team: the person's new team; a new name creates a team. assign: teams whose members get the
    tasks, including those who join later."""
    no_team: Annotated[bool, Parameter(negative="")] = False
    """team: remove the person from their team."""
    everybody: bool = False
    """assign: let everybody get the tasks again."""
    db: Path
    """The label database."""
    role: Literal["annotator", "lead", "admin"] | None = None
    """add, role: an `annotator` ranks; a `lead` also opens the pages for leads and decides disputed
    tasks; an `admin` also adds and changes leads and admins there. Default for add: annotator."""
    password_stdin: bool = False
    """add, reset: read the password from standard input; default: generate one and show it once."""

    def __post_init__(self) -> None:
        if self.action == "assign":
            self._require_who_gets_what()
        else:
            refuse_idle(self, ["people", "everybody"], f"with {self.action}")
        if self.action != "team":
            idle = ["no_team"] if self.action == "assign" else ["no_team", "team"]
            refuse_idle(self, idle, f"with {self.action}")
        if self.action != "list" and not self.name:
            raise ConfigError(
                f"rlhf users {self.action} needs a name",
                f"Type: rlhf users {self.action} NAME --db {self.db}",
            )
        if self.action not in ("add", "role"):
            refuse_idle(self, ["role"], f"with {self.action}")
        if self.action == "role" and self.role is None:
            raise ConfigError(
                "rlhf users role needs --role",
                f"Type: rlhf users role {quote(self.name)} --role lead --db {self.db}",
            )
        if self.action == "team" and len(self.team) + self.no_team != 1:
            raise ConfigError(
                "rlhf users team needs one --team, or --no-team",
                f"Type: rlhf users team {quote(self.name)} --team TEAM --db {self.db}",
            )
        if self.action not in ("add", "reset"):
            refuse_idle(self, ["password_stdin"], f"with {self.action}")

    def _require_who_gets_what(self) -> None:
        remedy = f"rlhf users assign SOURCE NAME --db {self.db}"
        if not self.name:
            raise ConfigError("rlhf users assign needs a source and names", f"Type: {remedy}")
        if bool(self.people or self.team) == self.everybody:
            named = "--team" if self.team else "names"
            problem = (
                f"{named} and --everybody"
                if self.everybody
                else "neither names nor --team nor --everybody"
            )
            raise ConfigError(
                f"rlhf users assign was given {problem}",
                f"Type: {remedy.replace('SOURCE', quote(self.name))}, or --team TEAM or "
                "--everybody in place of NAME",
            )


def run(settings: Settings) -> dict[str, Any]:
    """Manage who may sign in to the labeling app, who gets which tasks, and programs' tokens."""
    from labeling_app.annotators.passwords import new_password
    from labeling_app.annotators.users import Users
    from labeling_app.data_io.tokens import make_token, revoke_token
    from labeling_app.db.people.users import programs_with_tokens
    from labeling_app.db.store import Store

    with Store(settings.db, must_exist=True, read_only=settings.action == "list") as store:
        users = Users(store)
        if settings.action == "list":
            people = {user.name: _summary(user) for user in users.all()}
            return people | dict.fromkeys(programs_with_tokens(store.connections), "program")
        if settings.action == "assign":
            return {"source": settings.name, **_assign(users, settings)}
        if settings.action == "token":
            return {"program": settings.name, "token": make_token(store, settings.name)}
        if settings.action == "revoke":
            revoke_token(store, settings.name)
            return {"program": settings.name, "revoked": True}
        if settings.action in ("role", "team", "disable", "enable"):
            return {"user": settings.name, **_change(users, settings)}
        given = sys.stdin.readline().rstrip("\n") if settings.password_stdin else ""
        password = given or new_password()
        if settings.action == "add":
            users.add(settings.name, settings.role or "annotator", password)
        else:
            users.reset_password(settings.name, password)
    shown = {} if given else {"password": password}
    return {"user": settings.name, **shown}


def _change(users: "Users", settings: Settings) -> dict[str, Any]:
    """Give a user another role or team, or disable or enable them; what changed.

    Raises:
        InputError: there is no such user, or the role cannot be changed.
    """
    if settings.action == "team":
        [team] = settings.team or [""]
        users.set_team(settings.name, team)
        return {"team": team}
    if settings.role:
        users.set_role(settings.name, settings.role)
        return {"role": settings.role}
    is_disabled = settings.action == "disable"
    users.set_disabled(settings.name, disabled=is_disabled)
    return {"disabled": is_disabled}


def _summary(user: "User") -> str:
    team = f", team {user.team}" if user.team else ""
    return user.role + team + (" (disabled)" if user.disabled else "")


def _assign(users: "Users", settings: Settings) -> dict[str, Any]:
    """Give the tasks of a source to people and teams alone, or to everybody.

    Returns the names of the people, and of each team who is in it.

    Raises:
        InputError: there is no such source, user or team; says which there are, or how to add one.
    """
    from labeling_app.db.people.sources import find_sources, give_source, is_source
    from labeling_app.db.people.teams import all_teams

    db, source = quote(str(settings.db)), quote(settings.name)
    if not is_source(users.connections, settings.name):
        known = [name for name in find_sources(users.connections) if name]
        more = ["others"] if known[SHOWN_SOURCES:] else []
        raise InputError(
            f"{settings.db} has no prompts of the source {settings.name!r}",
            f"Name one of these: {listed([*known[:SHOWN_SOURCES], *more])}."
            if known
            else f"Import some: rlhf import prompts.jsonl --source {source} --db {db}",
        )
    unknown = [person for person in settings.people if users.get(person) is None]
    if unknown:
        raise InputError(
            f"There is no user {unknown[0]!r} in {settings.db}",
            f"Add one: rlhf users add {quote(unknown[0])} --db {db}\n"
            f"  To see who there is: rlhf users list --db {db}",
        )
    members = all_teams(users.connections)
    unknown = [team for team in settings.team if team not in members]
    if unknown:
        raise InputError(
            f"There is no team {unknown[0]!r} in {settings.db}",
            f"Put somebody in it: rlhf users team NAME --team {quote(unknown[0])} --db {db}\n"
            f"  To see who is in which team: rlhf users list --db {db}",
        )
    people, teams = list(dict.fromkeys(settings.people)), list(dict.fromkeys(settings.team))
    give_source(users.connections, settings.name, people, teams)
    return {"people": people, "teams": {team: members[team] for team in teams}}


def _assigned(result: dict[str, Any]) -> str:
    from labeling_app.db.people.sources import Receivers

    given = Receivers(people=tuple(result["people"]), teams=tuple(result["teams"]))
    return f"Tasks of {result['source']} go to {given.in_words(result['teams'])}."


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """Who can do what now, and the password or token, shown only this once."""
    name, action = settings.name, settings.action
    if action == "list":
        return columns(result) if result else f"{settings.db} has no users yet."
    if action == "assign":
        return _assigned(result)
    team = result.get("team")
    done = {
        "add": f"{name} may sign in as {settings.role or 'annotator'}.",
        "role": f"{name} is {settings.role} now and has to sign in again.",
        "reset": f"{name} has a new password and is signed out everywhere.",
        "disable": f"{name} can no longer sign in.",
        "enable": f"{name} may sign in again.",
        "team": f"{name} is in {f'team {team}' if team else 'no team'}.",
        "token": f"The program {name} may send feedback; its earlier tokens no longer work.",
        "revoke": f"The program {name} can no longer send feedback.",
    }[action]
    secrets = [
        f"The {secret}, shown only now: {result[secret]}"
        for secret in ("password", "token")
        if secret in result
    ]
    following = [next_command("label", db=settings.db)] if action == "add" else []
    return "\n".join([done, *secrets, *following])
