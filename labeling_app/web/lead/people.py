"""`/lead/people`: who may sign in. Leads manage annotators, admins everybody.

`/invitation` is open: whoever has a link sets a password there. The token follows a `#`, which
browsers send to no server, so no log holds it.
"""

from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse

from labeling_app.annotators.invitations import Invitations
from labeling_app.annotators.passwords import new_password
from labeling_app.annotators.users import MAX_PASSWORD, ROLES, Role, User, Users
from labeling_app.db.board.overlap import num_for_everybody
from labeling_app.db.people.sources import (
    LISTED,
    Receivers,
    find_sources,
    give_source,
    is_source,
    receivers_of,
)
from labeling_app.db.people.teams import all_teams
from labeling_app.db.store import Store
from labeling_app.web.access.content_policy import html_page
from labeling_app.web.lead.frame import LeadFrame, answer_json, sender_of
from labeling_app.web.request_bodies import json_errors
from rlhf.endpoints.request_bodies import read_json
from rlhf.errors import InputError

PATH = "/lead/people"
TEMPLATE = "lead/people.html"
INVITATION_PATH = "/invitation"
MAX_BODY_BYTES = 10_000
Payload = dict[str, Any]


class PeoplePage:
    """The operations of the page.

    Args:
        store: the database.
        hashing: how many passwords are hashed at once; a hash takes half a second and 128 MB.
    """

    def __init__(self, store: Store, hashing: CapacityLimiter) -> None:
        self.users = Users(store)
        self.invitations = Invitations(self.users)
        self._hashing = hashing

    async def add(self, sender: User, payload: Payload) -> Payload:
        """Add a person with a password, a random one if none is given."""
        name, role = self._newcomer(sender, payload)
        given = _text(payload, "password", MAX_PASSWORD)
        password = given or new_password()
        await run_sync(self.users.add, name, role, password, limiter=self._hashing)
        message = f"{name} may sign in as {role}."
        if given:
            return {"say": message, "of": name}
        return {"say": f"{message} The password, shown only now:", "copy": password, "of": name}

    async def invite(self, sender: User, payload: Payload) -> Payload:
        """Make a link with which somebody new sets a password."""
        name, role = self._newcomer(sender, payload)
        token = await run_sync(self.invitations.invite, name, role)
        message = f"{name} can set a password with this link, once, within a week:"
        return _with_link(message, token, name)

    async def reset(self, sender: User, payload: Payload) -> Payload:
        """Make a link with which a user sets a new password."""
        name = self._managed(sender, payload).name
        token = await run_sync(self.invitations.invite_to_reset, name)
        return _with_link(
            f"{name} can set a new password with this link, once, within a week. "
            "The old one works until then:",
            token,
            name,
        )

    async def withdraw(self, sender: User, payload: Payload) -> Payload:
        """Let a link no longer work."""
        name = _text(payload, "name")
        self._require_may_void_link(sender, name)
        await run_sync(self.invitations.withdraw, name)
        return {"say": f"The link for {name} no longer works.", "of": name}

    async def change_role(self, sender: User, payload: Payload) -> Payload:
        """Give a user another role; they have to sign in again."""
        name, role = self._managed(sender, payload).name, _role(payload)
        _require_may_manage(sender, role)
        await run_sync(self.users.set_role, name, role)
        return {"say": f"{name} is {role} now and has to sign in again."}

    async def disable(self, sender: User, payload: Payload) -> Payload:
        """Keep a user out, signed in or not."""
        name = self._managed(sender, payload).name
        if name == sender.name:
            raise InputError("You cannot disable yourself", "Ask another admin.")
        await run_sync(lambda: self.users.set_disabled(name, disabled=True))
        return {"say": f"{name} can no longer sign in. Their rankings stay."}

    async def enable(self, sender: User, payload: Payload) -> Payload:
        """Let a disabled user sign in again."""
        name = self._managed(sender, payload).name
        await run_sync(lambda: self.users.set_disabled(name, disabled=False))
        return {"say": f"{name} may sign in again."}

    async def put_in_team(self, sender: User, payload: Payload) -> Payload:
        """Put a user in a team, or in none. It ends no session and allows nothing else."""
        name, team = _text(payload, "name"), _text(payload, "team")
        await run_sync(self.users.set_team, name, team)
        return {"say": f"{name} is in {f'team {team}' if team else 'no team'}."}

    def _newcomer(self, sender: User, payload: Payload) -> tuple[str, Role]:
        """The name and role of somebody new, whom the sender may add."""
        name, role = _text(payload, "name"), _role(payload)
        _require_may_manage(sender, role)
        self._require_may_void_link(sender, name)  # a link that the name has stops working
        return name, role

    def _require_may_void_link(self, sender: User, name: str) -> None:
        for invitation in self.invitations.all():
            if invitation.name == name:
                _require_may_manage(sender, invitation.role)

    def _managed(self, sender: User, payload: Payload) -> User:
        user = self.users.require(_text(payload, "name"))
        _require_may_manage(sender, user.role)
        return user

    async def give(self, sender: User, payload: Payload) -> Payload:
        """Let some people and teams alone, or everybody, get the tasks of a source."""
        source, connections = payload.get("source"), self.users.connections
        if not isinstance(source, str) or not is_source(connections, source):
            raise InputError("There is no such source", "Reload the page.")
        names, teams = _names(payload, "people"), _names(payload, "teams")
        for name in names:
            self.users.require(name)
        members = all_teams(connections)
        if set(teams) - members.keys():
            raise InputError("There is no such team", "Reload the page.")
        await run_sync(give_source, connections, source, names, teams)
        given = Receivers(people=tuple(names), teams=tuple(teams))
        return {"say": f"Tasks of {source} go to {given.in_words(members)}."}

    async def accept(self, payload: Payload) -> Payload:
        """Set a password with a link; without a password, say whose link it is."""
        if "password" not in payload:
            invited = await run_sync(self.invitations.find, _text(payload, "token"))
            name = invited.name
            invites = f"{name}, you are invited as {invited.role}. Choose a password."
            return {"say": f"A new password for {name}." if invited.is_reset else invites}
        token, password = _text(payload, "token"), _text(payload, "password", MAX_PASSWORD)
        set_password = self.invitations.accept
        accepted = await run_sync(set_password, token, password, limiter=self._hashing)
        return {"say": f"Your password is set. Sign in as {accepted.name}."}


def may_manage(sender: User, role: Role) -> bool:
    """Whether somebody may add and change people of a role."""
    return sender.role == "admin" or role == "annotator"


def _require_may_manage(sender: User, role: Role) -> None:
    if not may_manage(sender, role):
        raise InputError(
            f"Only admins can add or change accounts with the role {role}", "Ask an admin."
        )


def _text(payload: Payload, name: str, limit: int = 100) -> str:
    value = payload.get(name, "")
    if not isinstance(value, str) or len(value) > limit:
        raise InputError(f"The {name} is too long", f"Use at most {limit} characters.")
    return value if name == "password" else value.strip()


def _names(payload: Payload, field: str) -> list[str]:
    names = payload.get(field, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError("The request is malformed", "Reload the page.")
    return names


def _role(payload: Payload) -> Role:
    for role in ROLES:
        if payload.get("role", "annotator") == role:
            return role
    raise InputError("There is no such role", f"Use {', '.join(ROLES)}.")


def _with_link(message: str, token: str, name: str) -> Payload:
    """What the page says and lets copy, in place of what it still shows of the same person."""
    return {"say": message, "link": f"{INVITATION_PATH}#{token}", "of": name}


def add_people_page(app: FastAPI, frame: LeadFrame, store: Store, *, has_sign_in: bool) -> None:
    """Serve the page, its operations, and the page that a link opens."""
    people = PeoplePage(store, CapacityLimiter(1))
    frame.add_to_navigation("People", PATH)
    frame.templates.globals |= {"may_manage": may_manage}

    @app.get(PATH)
    def page(request: Request, source: str = "") -> HTMLResponse:
        sender, connections = sender_of(request), store.connections
        sources = find_sources(connections, source.strip(), LISTED + 1)
        return frame.page(
            request,
            TEMPLATE,
            people=people.users.all(),
            invitations=people.invitations.all(),
            roles=[role for role in ROLES if may_manage(sender, role)],
            everybody_signs_in=has_sign_in,
            teams=all_teams(connections),
            sources=receivers_of(connections, sources[:LISTED]),
            searched=source.strip(),
            num_prompts=store.counts()["prompts"],
            num_tasks=num_for_everybody(connections),
            num_listed=LISTED if sources[LISTED:] else 0,
        )

    operations = {
        "add": people.add,
        "invite": people.invite,
        "reset": people.reset,
        "withdraw": people.withdraw,
        "role": people.change_role,
        "team": people.put_in_team,
        "disable": people.disable,
        "enable": people.enable,
        "give": people.give,
    }
    for name, operation in operations.items():
        answer_json(app, f"{PATH}/{name}", operation)
    _add_invitation_page(app, frame, people)


def _add_invitation_page(app: FastAPI, frame: LeadFrame, people: PeoplePage) -> None:
    @app.get(INVITATION_PATH)
    def form() -> HTMLResponse:
        return html_page(frame.templates.get_template("lead/invitation.html").render())

    @app.post(INVITATION_PATH)
    @json_errors
    async def accept(request: Request) -> JSONResponse:
        payload = await read_json(request, MAX_BODY_BYTES)
        return JSONResponse(await people.accept(payload))
