"""`rlhf label` refuses what it cannot serve, with the next command to type."""

import socket
import sqlite3
from dataclasses import replace

import pytest

from labeling_app.annotators.users import Users
from labeling_app.web.serving import BoardOptions, LiveOptions, _print_address
from tests.servers.chat import ChatServer


def test_databases_with_nothing_to_rank(store, make_prompt, tmp_path, refused):
    assert "No label database" in refused("label", "--db", tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
    db = store.connections.path
    assert "Begin with: rlhf import" in refused("label", "--db", db)
    store.add_prompts([make_prompt("Hi?")])
    assert "Sample some first: rlhf generate" in refused("label", "--db", db)


def test_it_says_at_once_that_it_starts(tmp_path, refused):
    shown = refused("label", "--db", tmp_path / "none.db")
    assert shown.startswith("Starting the board … error No label database")


def test_other_machines_are_kept_out(store, fill, refused):
    fill(1, 2)
    message = refused("label", "--db", store.connections.path, "--host", "0.0.0.0")
    assert "--host is 0.0.0.0, which other machines can reach" in message
    assert "rlhf users add NAME --role admin --db" in message


def test_a_name_where_people_sign_in(store, fill, refused):
    fill(1, 2)
    Users(store).add("ann", "annotator", "long enough")
    message = refused("label", "--db", store.connections.path, "--annotator", "bob")
    assert "--annotator is 'bob'" in message
    assert "people sign in" in message


def test_the_loop_of_another_database(store, fill, tmp_path, refused):
    fill(1, 2)
    db, file = store.connections.path, tmp_path / "loop.yaml"
    file.write_text(f"out: {tmp_path}/run\nmodel: m\n")
    message = refused("label", "--db", db, "--loop", file)
    assert f"--db is {db}, and the loop in {file} uses {tmp_path}/run/labels.db" in message
    assert f"Give --db {tmp_path}/run/labels.db, or set db in the file." in message
    file.write_text(f"out: {tmp_path}/run\nmodel: m\ndb: {db}\nlead_may: [model]\n")
    assert "lead_may opens model, whose values are text" in refused(
        "label", "--db", db, "--loop", file
    )
    file.write_text(f"out: {tmp_path}/run\nmodle: m\n")
    assert f"Unknown setting modle in {file} Did you mean model?" in refused(
        "label", "--db", db, "--loop", file
    )


def test_a_port_in_use(store, fill, refused):
    fill(1, 2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = refused("label", "--db", store.connections.path, "--port", port)
    assert message.startswith(f"error Port {port} of 127.0.0.1 cannot be used")
    assert f"--port {port + 1}" in message


@pytest.mark.parametrize("flag", ["adjudicated", "edited", "thumbs-up", "thumbs-down"])
def test_a_flag_that_the_app_sets_by_itself(tmp_path, flag, refused):
    message = refused("label", "--db", tmp_path / "none.db", "--flags", flag)
    assert f"--flags holds {flag!r}, which the app sets by itself" in message
    assert "Choose another word." in message


@pytest.mark.parametrize(
    ("flag", "value"), [("--port", "0"), ("--overlap", "0"), ("--annotator", " ")]
)
def test_settings_out_of_range(tmp_path, capsys, flag, value, refused):
    assert f"{flag} is" in refused("label", "--db", tmp_path / "x.db", flag, value)


def test_a_machine_cannot_label_as_a_person(store, fill, refused):
    fill(1, 2)
    db = store.connections.path
    signal = "signal:tests_of_labels:f"
    with store.connections.write() as connection:
        connection.execute("INSERT INTO annotators VALUES (?, 'signal', 0)", [signal])
    assert "is an annotator of kind signal" in refused("label", "--db", db, "--annotator", signal)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--endpoint", "localhost:8000"], "For example: http://localhost:8000/v1"),
        (["--live-responses", "1"], "--live-responses is 1"),
        (["--model", "a", "--model", "b", "--model", "c"], "Add --live-responses 3"),
        (["--model", "no-such-folder"], "no-such-folder is not a model"),
        (["--endpoint", "http://127.0.0.1:9/v1"], "or name the model: --model NAME"),
    ],
)
def test_live_mode_that_cannot_be(tmp_path, capsys, arguments, words, refused):
    assert words in refused("label", "--db", tmp_path / "new.db", *arguments)
    assert not (tmp_path / "new.db").exists()


def test_an_endpoint_with_several_models(tmp_path, refused):
    with ChatServer() as server:
        server.models = ["first", "second"]
        message = refused("label", "--db", tmp_path / "new.db", "--endpoint", server.url)
    assert "serves 2 models: first, second" in message
    assert "Choose: --model first" in message


@pytest.mark.parametrize(
    "command",
    [["label", "--model", "nowhere"], ["chat", "--policy", "nowhere", "--reference", "nowhere"]],
)
def test_another_programs_database_is_refused_before_models_are_loaded(tmp_path, refused, command):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE songs (name TEXT)")
    said = refused(*command, "--db", path)
    assert "is a database of another program (its tables: songs)" in " ".join(said.split())
    assert "nowhere" not in said


def test_one_address_is_shown_and_it_is_the_one_to_open(capsys):
    board, live = BoardOptions(port=7861), LiveOptions(models=[])
    _print_address(board, "ann", None, has_runs=False)
    assert capsys.readouterr().err == "Label as ann at http://127.0.0.1:7861  (Ctrl+C stops)\n"
    _print_address(board, None, live, has_runs=True)
    assert capsys.readouterr().err == (
        "Label at http://127.0.0.1:7861  (Ctrl+C stops)\n"
        "Also there: /live asks the models; /lead/runs is for leads.\n"
    )
    _print_address(board, "ann", replace(live, is_first=True), has_runs=False)
    assert capsys.readouterr().err == (
        "Ask the models as ann at http://127.0.0.1:7861/live  (Ctrl+C stops)\n"
    )
