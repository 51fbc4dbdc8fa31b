"""Who may sign in, and `rlhf users`."""

import hashlib
import io
import json

import pytest

from labeling_app.annotators.invitations import Invitations
from labeling_app.annotators.passwords import hash_password
from labeling_app.annotators.users import Users
from labeling_app.data_io.tokens import make_token, revoke_token
from labeling_app.db.people.sources import Receivers, receivers_of
from labeling_app.db.people.teams import all_teams
from rlhf.cli import main
from rlhf.errors import InputError
from rlhf.records.schema import Message, Prompt


@pytest.fixture
def users(store):
    users = Users(store)
    users.add("ann", "annotator", "long enough")
    return users


def test_signing_in(users):
    assert users.sign_in("ann", "long enough").user.name == "ann"
    wrong = users.sign_in("ann", "long enoug")
    unknown = users.sign_in("bob", "long enough")
    assert wrong.user is None
    assert wrong.problem == unknown.problem == "Name or password is wrong."


def test_signing_in_writes_nothing_and_renews_an_outdated_hash(users):
    def stored() -> str:
        return users.connections.db.execute("SELECT password FROM users").fetchone()[0]

    current = stored()
    assert users.sign_in("ann", "long enough").user
    assert stored() == current
    digest = hashlib.scrypt(b"from before", salt=b"s" * 16, n=2**15, r=8, p=1, maxmem=2**26)
    before = f"scrypt$32768${(b's' * 16).hex()}${digest.hex()}"
    users.connections.db.execute("UPDATE users SET password = ?", [before])
    assert users.sign_in("ann", "From before").user is None
    assert stored() == before
    assert users.sign_in("ann", "from before").user
    assert stored().startswith("scrypt$16$8$1$")  # the cost of the tests
    assert users.sign_in("ann", "from before").user


def test_ending_the_sessions_of_one_user_leaves_those_of_others(users):
    users.add("bob", "annotator", "long enough")
    sessions = [("ann", 0), ("bob", 0)]
    users.end_sessions("ann")
    assert [users.of_session(*session) is None for session in sessions] == [True, False]
    assert users.sign_in("ann", "long enough").user.epoch == 1
    with pytest.raises(InputError, match="There is no user 'nobody'"):
        users.end_sessions("nobody")


def test_disabling_and_resetting_sign_out(users):
    session = ("ann", users.get("ann").epoch)
    assert users.of_session(*session).name == "ann"
    users.set_disabled("ann", disabled=True)
    assert users.of_session(*session) is None
    assert users.of_session("ann", users.get("ann").epoch) is None
    assert "disabled" in users.sign_in("ann", "long enough").problem
    users.set_disabled("ann", disabled=False)
    users.reset_password("ann", "another one")
    assert users.of_session(*session) is None
    assert users.sign_in("ann", "long enough").user is None
    assert users.sign_in("ann", "another one").user.name == "ann"
    assert users.of_session("nobody", 0) is None


def test_a_new_password_ends_sessions_and_voids_links(users):
    token = Invitations(users).invite_to_reset("ann")
    session = ("ann", users.get("ann").epoch)
    changed = users.change_password("ann", "long enough", "even longer")
    assert (changed.user.name, changed.user.epoch) == ("ann", 1)
    assert users.of_session(*session) is None
    assert users.of_session("ann", 1) == changed.user
    assert users.sign_in("ann", "long enough").user is None
    assert users.sign_in("ann", "even longer").user.epoch == 1
    with pytest.raises(InputError, match="This link is not valid"):
        Invitations(users).accept(token, "taken over")


def test_nobody_changes_a_password_without_the_old_one(users):
    wrong = users.change_password("ann", "guess", "even longer")
    assert (wrong.user, wrong.problem) == (None, "The current password is wrong.")
    for new, problem in (
        ("1234567", "The password has 7 characters\n  Use at least 8."),
        ("x" * 501, "The password has 501 characters\n  Use at most 500."),
    ):
        with pytest.raises(InputError) as caught:
            users.change_password("ann", "long enough", new)
        assert str(caught.value) == problem
    assert users.sign_in("ann", "long enough").user.epoch == 0
    users.change_password("ann", "long enough", "x" * 500)
    assert users.sign_in("ann", "x" * 500).user.epoch == 1


def test_a_password_that_is_reset_while_it_is_changed_stays(users, monkeypatch):
    def hash_slowly(password):
        users.set_hash("ann", hash_password("from a lead"))
        return hash_password(password)

    monkeypatch.setattr("labeling_app.annotators.users.hash_password", hash_slowly)
    late = users.change_password("ann", "long enough", "even longer")
    assert late.problem == "Your account was changed meanwhile. Sign in again."
    assert users.sign_in("ann", "from a lead").user


@pytest.mark.parametrize(
    ("name", "password", "problem"),
    [
        ("ann", "long enough", "There is a user 'ann' already, with the role annotator"),
        ("bob", "short", "The password has 5 characters"),
        (" bob", "long enough", "' bob' cannot be a user's name"),
        ("x" * 101, "long enough", "cannot be a user's name"),
    ],
)
def test_users_that_cannot_be_added(users, name, password, problem):
    with pytest.raises(InputError, match=problem):
        users.add(name, "annotator", password)


def test_a_signal_cannot_sign_in(users):
    with users.connections.write() as db:
        db.execute("INSERT INTO annotators VALUES ('judge', 'ai', 0)")
    with pytest.raises(InputError, match="is an annotator of kind ai"):
        users.add("judge", "annotator", "long enough")
    assert users.get("judge") is None


def test_the_command(store, capsys, monkeypatch):
    db = ["--db", str(store.connections.path), "--json"]

    def run(*arguments: str) -> dict:
        assert main(["users", *arguments, *db]) == 0
        return json.loads(capsys.readouterr().out)

    password = run("add", "ann", "--role", "lead")["password"]
    assert Users(store).sign_in("ann", password).user.role == "lead"
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert run("reset", "ann", "--password-stdin") == {"user": "ann"}
    assert Users(store).sign_in("ann", "from a pipe").user
    run("disable", "ann")
    assert run("list") == {"ann": "lead (disabled)"}
    assert run("enable", "ann") == {"user": "ann", "disabled": False}


def test_the_command_refuses(store, refused):
    db = ["--db", str(store.connections.path)]
    assert "rlhf users add NAME --db" in refused("users", "add", *db)
    assert "There is no user 'bob'" in refused("users", "reset", "bob", *db)
    assert "promote" in refused("users", "promote", "bob", *db)


def test_the_tasks_of_a_source_are_given_from_the_command(users, store, capsys):
    store.add_prompts([Prompt.create((Message(role="user", content="Hi?"),), "train", "law")])
    users.add("bob", "annotator", "long enough")
    db = ["--db", str(store.connections.path)]

    def assign(*arguments: str) -> str:
        assert main(["users", "assign", *arguments, *db]) == 0
        return capsys.readouterr().out

    assert assign("law", "ann", "bob") == "Tasks of law go to ann and bob alone.\n"
    assert receivers_of(store.connections, ["law"]) == {"law": Receivers(people=("ann", "bob"))}
    assert assign("law", "bob", "bob") == "Tasks of law go to bob alone.\n"
    assert receivers_of(store.connections, ["law"]) == {"law": Receivers(people=("bob",))}
    assert assign("law", "--everybody") == "Tasks of law go to everybody.\n"
    assert receivers_of(store.connections, ["law"]) == {"law": Receivers()}
    said = json.loads(assign("law", "ann", "--json"))
    assert said == {"source": "law", "people": ["ann"], "teams": {}}


def test_teams_are_set_and_given_sources_from_the_command(users, store, capsys):
    store.add_prompts([Prompt.create((Message(role="user", content="Hi?"),), "train", "law")])
    users.add("bob", "annotator", "long enough")
    epoch = users.get("ann").epoch

    def run(*arguments: str) -> str:
        assert main(["users", *arguments, "--db", str(store.connections.path)]) == 0
        return capsys.readouterr().out

    assert run("team", "ann", "--team", "red") == "ann is in team red.\n"
    assert run("team", "bob", "--team", "blue sky") == "bob is in team blue sky.\n"
    assert users.of_session("ann", epoch).team == "red"  # still signed in
    assert run("list") == "ann  annotator, team red\nbob  annotator, team blue sky\n"
    said = run("assign", "law", "--team", "red", "blue sky")
    assert said == "Tasks of law go to team red (ann) and team blue sky (bob) alone.\n"
    assert run("assign", "law", "bob", "--team", "red") == (
        "Tasks of law go to team red (ann) and bob alone.\n"
    )
    given = receivers_of(store.connections, ["law"])
    assert given == {"law": Receivers(people=("bob",), teams=("red",))}
    assert run("team", "ann", "--no-team") == "ann is in no team.\n"
    assert all_teams(store.connections) == {"blue sky": ["bob"], "red": []}
    said = run("assign", "law", "--team", "red")
    assert said == "Tasks of law go to team red (nobody) alone.\n"
    run("disable", "bob")
    assert all_teams(store.connections) == {"blue sky": [], "red": []}
    assert run("assign", "law", "--everybody") == "Tasks of law go to everybody.\n"
    assert receivers_of(store.connections, ["law"]) == {"law": Receivers()}


def test_what_a_team_cannot_be_says_what_to_type(users, store, refused):
    store.add_prompts([Prompt.create((Message(role="user", content="Hi?"),), "train", "law")])
    path = store.connections.path
    db = ["--db", str(path)]
    said = refused("users", "assign", "law", "--team", "red", *db)
    assert f"There is no team 'red' in {path}" in said
    assert f"rlhf users team NAME --team red --db {path}" in said
    for wrong in ([], ["--team", "red", "blue"], ["--team", "red", "--no-team"]):
        said = refused("users", "team", "ann", *wrong, *db)
        assert "rlhf users team needs one --team, or --no-team" in said
        assert f"Type: rlhf users team ann --team TEAM --db {path}" in said
    assert "There is no user 'eve'" in refused("users", "team", "eve", "--team", "red", *db)
    said = refused("users", "team", "ann", "--team", "x" * 101, *db)
    assert "cannot be a team's name Use 1 to 100 characters." in said
    said = refused("users", "role", "ann", "--role", "lead", "--team", "red", *db)
    assert "--team has no effect with role" in said
    said = refused("users", "assign", "law", "--no-team", "--everybody", *db)
    assert "--no-team has no effect with assign" in said


def test_what_cannot_be_assigned_says_what_to_type(users, store, refused):
    path = store.connections.path
    db = ["--db", str(path)]
    said = refused("users", "assign", "a b", "ann", *db)
    assert f"rlhf import prompts.jsonl --source 'a b' --db {path}" in said
    for source in ("law", "news"):
        text = (Message(role="user", content=source),)
        store.add_prompts([Prompt.create(text, "train", source)])
    said = refused("users", "assign", "laws", "ann", *db)
    assert f"{path} has no prompts of the source 'laws'" in said
    assert "Name one of these: law and news." in said
    said = refused("users", "assign", "law", "ann", "eve", *db)
    assert "There is no user 'eve'" in said
    assert f"rlhf users add eve --db {path}" in said
    assert f"rlhf users list --db {path}" in said
    assert receivers_of(store.connections, ["law"]) == {"law": Receivers()}
    assert f"Type: rlhf users assign SOURCE NAME --db {path}" in refused("users", "assign", *db)
    said = refused("users", "assign", "law", *db)
    assert f"Type: rlhf users assign law NAME --db {path}, or --team TEAM or --everybody" in said
    said = refused("users", "assign", "law", "ann", "--everybody", *db)
    assert "rlhf users assign was given names and --everybody" in said
    assert "--people has no effect with add" in refused("users", "add", "ann", "bob", *db)


def test_a_program_and_a_person_never_share_a_name(users, store):
    make_token(store, "shop")
    with pytest.raises(InputError, match="'shop' is a program that gives feedback"):
        users.add("shop", "annotator", "long enough")
    revoke_token(store, "shop")
    with pytest.raises(InputError, match="'ann' is a person who signs in"):
        make_token(store, "ann")


def test_a_password_that_is_reset_while_it_is_checked_opens_no_session(users, monkeypatch):
    def check_slowly(password, hashed):
        users.reset_password("ann", "another one")
        return True

    monkeypatch.setattr("labeling_app.annotators.users.check_password", check_slowly)
    signed_in = users.sign_in("ann", "long enough").user
    assert users.of_session("ann", signed_in.epoch) is None


def test_another_role_ends_sessions_and_voids_links(users):
    epoch = users.get("ann").epoch
    token = Invitations(users).invite_to_reset("ann")
    users.set_role("ann", "admin")
    assert users.get("ann").role == "admin"
    assert users.of_session("ann", epoch) is None
    with pytest.raises(InputError, match="This link is not valid"):  # a lead may have made it
        Invitations(users).accept(token, "taken over")
    with pytest.raises(InputError, match="ann has the role admin already"):
        users.set_role("ann", "admin")


def test_the_last_admin_who_can_sign_in_stays_one(users):
    users.set_role("ann", "admin")
    users.add("bob", "admin", "long enough")
    users.set_disabled("bob", disabled=True)
    with pytest.raises(InputError) as caught:
        users.set_role("ann", "lead")
    assert str(caught.value) == (
        "ann is the only admin who can sign in\n  Make another user admin first."
    )
    with pytest.raises(InputError, match="ann is the only admin who can sign in"):
        users.set_disabled("ann", disabled=True)
    users.set_disabled("bob", disabled=True)  # as before
    users.set_disabled("bob", disabled=False)
    users.set_disabled("ann", disabled=True)
    users.set_disabled("ann", disabled=False)
    users.set_role("ann", "lead")
    assert users.get("ann").role == "lead"


def test_the_command_does_not_disable_the_last_admin(users, store, refused):
    users.set_role("ann", "admin")
    said = refused("users", "disable", "ann", "--db", str(store.connections.path))
    assert "ann is the only admin who can sign in Make another user admin first." in said
    assert not users.get("ann").disabled


def test_the_command_changes_a_role(users, store, capsys):
    db = str(store.connections.path)
    assert main(["users", "role", "ann", "--role", "lead", "--db", db]) == 0
    assert capsys.readouterr().out == "ann is lead now and has to sign in again.\n"
    assert users.get("ann").role == "lead"
    assert main(["users", "role", "ann", "--db", db]) == 2
    assert "rlhf users role needs --role\n  Type: rlhf users role ann --role lead --db" in (
        capsys.readouterr().err
    )
    assert users.get("ann").role == "lead"
