"""The page People: who may add whom, and links that work once."""

import time

import httpx
import pytest

from labeling_app.annotators.invitations import Invitations
from labeling_app.annotators.users import Users
from rlhf.records.schema import Message, Prompt
from tests.labeling_app.conftest import quality_page

NEW = "a new password"
NOT_VALID = {
    "error": "This link is not valid: it was used, replaced or is older than seven days. "
    "If you have set your password with it, sign in. If not, ask your lead for a new link."
}


def said(answer: httpx.Response) -> dict:
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def accept(ask, link: str, password: str) -> dict:
    body = {"token": link.partition("#")[2], "password": password}
    [answer] = ask([("POST", "/invitation", body)], "")
    return said(answer)


def test_a_link_sets_a_password_once(ask, store):
    [answer] = ask([("POST", "/lead/people/invite", {"name": "ann", "role": "annotator"})])
    link = said(answer)["link"]
    assert link.startswith("/invitation#")
    assert Users(store).get("ann") is None
    short = accept(ask, link, "short")
    assert short["error"].startswith("The password has 5 characters")
    assert accept(ask, link, NEW) == {"say": "Your password is set. Sign in as ann."}
    assert accept(ask, link, "another one of them") == NOT_VALID
    user = Users(store).sign_in("ann", NEW).user
    assert (user.name, user.role) == ("ann", "annotator")


def test_a_link_says_whose_it_is_until_it_is_used(ask):
    invite = ("POST", "/lead/people/invite", {"name": "ann", "role": "annotator"})
    invited, reset = ask([invite, ("POST", "/lead/people/reset", {"name": "annotator"})])

    def whose(answer: httpx.Response) -> dict:
        token = said(answer)["link"].partition("#")[2]
        return said(ask([("POST", "/invitation", {"token": token})], "")[0])

    welcome = {"say": "ann, you are invited as annotator. Choose a password."}
    assert whose(invited) == whose(invited) == welcome  # looking does not use it
    assert whose(reset) == {"say": "A new password for annotator."}
    accept(ask, said(invited)["link"], NEW)
    assert whose(invited) == NOT_VALID
    assert said(ask([("POST", "/invitation", {"token": ""})], "")[0]) == NOT_VALID


def test_only_the_hash_of_a_token_is_stored(ask, store):
    [answer] = ask([("POST", "/lead/people/invite", {"name": "ann"})])
    token = said(answer)["link"].partition("#")[2]
    assert len(token) == 27  # 160 bits
    store.connections.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert token.encode() not in store.connections.path.read_bytes()


def test_a_new_link_replaces_the_old_and_a_withdrawn_one_is_void(ask):
    invite = ("POST", "/lead/people/invite", {"name": "ann"})
    first, second, withdrawn = ask(
        [invite, invite, ("POST", "/lead/people/withdraw", {"name": "ann"})]
    )
    assert said(withdrawn) == {"say": "The link for ann no longer works.", "of": "ann"}
    assert accept(ask, said(first)["link"], NEW) == NOT_VALID
    assert accept(ask, said(second)["link"], NEW) == NOT_VALID


def test_a_link_expires_after_a_week(ask, store, monkeypatch):
    token = Invitations(Users(store)).invite("ann", "annotator")
    later = time.time() + 7 * 24 * 3600 + 1
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: later)
        assert accept(ask, f"#{token}", NEW) == NOT_VALID
        assert Invitations(Users(store)).all() == []


def test_a_reset_link_changes_the_password_and_ends_sessions(ask, store):
    users = Users(store)
    epoch = users.get("annotator").epoch
    [answer] = ask([("POST", "/lead/people/reset", {"name": "annotator"})])
    assert users.sign_in("annotator", "long enough").user  # until the link is used
    accept(ask, said(answer)["link"], NEW)
    assert users.sign_in("annotator", "long enough").user is None
    assert users.sign_in("annotator", NEW).user
    assert users.of_session("annotator", epoch) is None


def test_a_reset_link_does_not_let_a_disabled_person_in(ask, store):
    reset = ("POST", "/lead/people/reset", {"name": "annotator"})
    answer, _ = ask([reset, ("POST", "/lead/people/disable", {"name": "annotator"})])
    accept(ask, said(answer)["link"], NEW)
    problem = Users(store).sign_in("annotator", NEW).problem
    assert problem == "This account is disabled. Ask your lead."
    [enabled] = ask([("POST", "/lead/people/enable", {"name": "annotator"})])
    assert said(enabled) == {"say": "annotator may sign in again."}
    assert Users(store).sign_in("annotator", NEW).user


@pytest.mark.parametrize("operation", ["add", "invite"])
@pytest.mark.parametrize("role", ["lead", "admin"])
def test_a_lead_adds_annotators_alone(operation, role, ask, store):
    body = {"name": "new", "role": role}
    [refused] = ask([("POST", f"/lead/people/{operation}", body)])
    assert (
        said(refused)["error"]
        == f"Only admins can add or change accounts with the role {role}. Ask an admin."
    )
    assert Users(store).get("new") is None
    [done] = ask([("POST", f"/lead/people/{operation}", body)], "admin")
    assert done.status_code == 200


@pytest.mark.parametrize("operation", ["reset", "disable", "enable"])
def test_a_lead_cannot_change_an_admin(operation, ask, store):
    before = Users(store).get("admin")
    [refused] = ask([("POST", f"/lead/people/{operation}", {"name": "admin"})])
    problem = "Only admins can add or change accounts with the role admin. Ask an admin."
    assert said(refused)["error"] == problem
    assert Users(store).get("admin") == before
    assert Invitations(Users(store)).all() == []


@pytest.mark.parametrize("operation", ["withdraw", "invite", "add"])
def test_a_lead_cannot_void_an_admins_link(operation, ask, store):
    token = Invitations(Users(store)).invite("boss", "admin")
    body = {"name": "boss", "role": "annotator"}
    [refused] = ask([("POST", f"/lead/people/{operation}", body)])
    problem = "Only admins can add or change accounts with the role admin. Ask an admin."
    assert said(refused)["error"] == problem
    assert Invitations(Users(store)).find(token).role == "admin"
    [done] = ask([("POST", f"/lead/people/{operation}", body)], "admin")
    assert done.status_code == 200
    assert accept(ask, f"#{token}", NEW) == NOT_VALID


def test_an_admin_changes_roles_and_a_lead_does_not(ask, store):
    users, change = Users(store), "/lead/people/role"
    bodies = [{"name": "annotator", "role": "lead"}, {"name": "lead", "role": "annotator"}]
    refused = ask([("POST", change, body) for body in bodies])
    problem = "Only admins can add or change accounts with the role lead. Ask an admin."
    assert [said(one)["error"] for one in refused] == [problem] * 2
    epoch = users.get("annotator").epoch
    last = {"name": "admin", "role": "lead"}
    unknown = {"name": "annotator", "role": "owner"}
    done, *no = ask([("POST", change, body) for body in (bodies[0], last, unknown)], "admin")
    assert said(done) == {"say": "annotator is lead now and has to sign in again."}
    assert [said(one)["error"] for one in no] == [
        "admin is the only admin who can sign in. Make another user admin first.",
        "There is no such role. Use annotator, lead, admin.",
    ]
    assert users.of_session("annotator", epoch) is None
    assert {one.name: one.role for one in users.all()} == {
        "admin": "admin",
        "annotator": "lead",
        "lead": "lead",
    }
    [page] = ask([("GET", "/lead/people", None)], "admin")
    assert 'aria-label="Role of annotator"' in page.text
    [page] = ask([("GET", "/lead/people", None)], "lead")
    assert "Role of" not in page.text


def test_nobody_disables_themselves(ask, store):
    [refused] = ask([("POST", "/lead/people/disable", {"name": "admin"})], "admin")
    assert said(refused)["error"] == "You cannot disable yourself. Ask another admin."
    assert not Users(store).get("admin").disabled


def test_passwords_and_names_are_bounded(ask, store):
    link = said(ask([("POST", "/lead/people/invite", {"name": "ann"})])[0])["link"]
    assert accept(ask, link, "x" * 501)["error"].startswith("The password is too long.")
    bodies = [{"name": "bob", "password": "x" * 501}, {"name": "x" * 101}, {"name": " "}]
    refused = ask([("POST", "/lead/people/add", body) for body in bodies])
    assert [answer.status_code for answer in refused] == [400, 400, 400]
    assert {user.name for user in Users(store).all()} == {"annotator", "lead", "admin"}


def test_people_are_added_with_a_password_given_or_random(ask, store):
    given, random, taken = ask(
        [
            ("POST", "/lead/people/add", {"name": "ann", "password": NEW}),
            ("POST", "/lead/people/add", {"name": "bob", "password": ""}),
            ("POST", "/lead/people/add", {"name": "bob", "password": NEW}),
        ]
    )
    assert said(given) == {"say": "ann may sign in as annotator.", "of": "ann"}
    assert Users(store).sign_in("ann", NEW).user
    assert Users(store).sign_in("bob", said(random)["copy"]).user
    assert said(taken)["error"].startswith("There is a user 'bob' already")


def test_a_source_is_given_to_people_and_back_to_everybody(ask, store, queue, fill):
    fill(1, 2)  # of the source test
    Users(store).add("ann", "annotator", NEW)
    give = "/lead/people/give"
    bodies = [
        {"source": "test", "people": ["annotator", "ann"]},
        {"source": "none", "people": []},
        {"source": "test", "people": ["nobody"]},
        {"source": "test", "people": "ann"},
        {"source": ["test"], "people": []},
    ]
    given, *refused = ask([("POST", give, body) for body in bodies])
    assert said(given) == {"say": "Tasks of test go to annotator and ann alone."}
    assert [answer.status_code for answer in refused] == [400] * 4
    assert queue.next_task("lead") is None
    [page, back] = ask(
        [("GET", "/lead/people", None), ("POST", give, {"source": "test", "people": []})]
    )
    assert "<summary>test: ann and annotator alone</summary>" in page.text
    assert '<input type="checkbox" name="people" value="lead">' in page.text
    assert '<input type="checkbox" name="people" value="ann" checked>' in page.text
    assert said(back) == {"say": "Tasks of test go to everybody."}
    assert queue.next_task("lead")


def test_a_source_is_given_to_a_team_that_people_are_put_in(ask, store, queue, fill):
    fill(2, 2)  # of the source test
    users = Users(store)
    epoch = users.get("admin").epoch
    put, give = "/lead/people/team", "/lead/people/give"
    source = {"source": "test", "people": []}
    unknown, first, admin, given = ask(
        [
            ("POST", give, {**source, "teams": ["red"]}),
            ("POST", put, {"name": "annotator", "team": " red "}),
            ("POST", put, {"name": "admin", "team": "<b>blue"}),
            ("POST", give, {**source, "people": ["lead"], "teams": ["red", "<b>blue"]}),
        ]
    )
    assert said(unknown) == {"error": "There is no such team. Reload the page."}
    assert said(first) == {"say": "annotator is in team red."}
    assert said(admin) == {"say": "admin is in team <b>blue."}  # no session ends
    assert users.of_session("admin", epoch).team == "<b>blue"
    to = "team red (annotator), team <b>blue (admin) and lead alone"
    assert said(given) == {"say": f"Tasks of test go to {to}."}
    assert queue.next_task("annotator")
    out, too_long, nobody, page = ask(
        [
            ("POST", put, {"name": "annotator", "team": ""}),
            ("POST", put, {"name": "annotator", "team": "x" * 101}),
            ("POST", put, {"name": "eve", "team": "red"}),
            ("GET", "/lead/people", None),
        ]
    )
    assert said(out) == {"say": "annotator is in no team."}
    assert (too_long.status_code, nobody.status_code) == (400, 400)
    to = "team &lt;b&gt;blue (admin), team red (nobody) and lead alone"
    assert f"<summary>test: {to}</summary>" in page.text
    assert '<input type="checkbox" name="teams" value="red" checked> red' in page.text
    assert 'value="&lt;b&gt;blue" maxlength="100" list="teams"' in page.text
    assert "<b>blue" not in page.text


def test_sources_beyond_those_listed_are_found_by_name(ask, store):
    prompts = [
        Prompt.create((Message(role="user", content=str(number)),), "train", f"day {number:03}")
        for number in range(203)
    ]
    store.add_prompts(prompts)
    give = "/lead/people/give"
    page, found, none, given = ask(
        [
            ("GET", "/lead/people", None),
            ("GET", "/lead/people?source=Y+202", None),
            ("GET", "/lead/people?source=%3Cb%3E", None),
            ("POST", give, {"source": "day 202", "people": ["lead"], "teams": []}),
        ]
    )
    assert page.text.count("<summary>day") == 200
    assert "day 200" not in page.text
    assert "The first 200 are shown. Find others by their name." in page.text
    assert "<summary>day 202: everybody</summary>" in found.text
    assert found.text.count("<summary>day") == 1
    assert 'value="Y 202"' in found.text
    assert "The first 200" not in found.text
    assert "No source has this in its name." in none.text
    assert 'value="&lt;b&gt;"' in none.text
    assert said(given) == {"say": "Tasks of day 202 go to lead alone."}


def test_the_pages_lead_to_ones_own_password_where_people_sign_in(ask, store):
    link = '<a class="quiet" href="/password">Password</a>'
    [page] = ask([("GET", "/lead/people", None)])
    assert link in page.text
    assert link not in quality_page(store)  # of a frame without sign-in


def test_requests_from_other_sites_are_refused(ask, store):
    async def run(client: httpx.AsyncClient) -> list[int]:
        sent = [
            await client.post(path, json={"name": "ann"}, headers={"origin": "http://evil.test"})
            for path in ("/lead/people/invite", "/lead/data/upload", "/lead/data/backup")
        ]
        return [answer.status_code for answer in sent]

    assert ask(run, "admin") == [403, 403, 403]
    assert Invitations(Users(store)).all() == []
