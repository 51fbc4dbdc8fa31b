"""`rlhf serve`: settings that do nothing are refused, and what is started is shown."""

import shutil
import sys
from pathlib import Path

import pytest

from policies.serving.settings import read_share
from rlhf.errors import ConfigError
from rlhf.records.jsonl import write_json

URL = "http://127.0.0.1:9/v1"
POLICY = ("--endpoint", URL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "There is nothing to serve"),
        (("--db", "a.db"), "There is nothing to serve"),
        (("--reward", "r", "--db", "a.db"), "--db has no effect without --policy or --endpoint"),
        (("--reward", "r", "--keep.days", "3"), "--keep.days has no effect without --policy"),
        (("--reward", "signal:a:b"), "only reward models are served"),
        ((*POLICY, "--share", "10%"), "--share has no effect without --against"),
        ((*POLICY, "--against", "b", "--share", "100%"), "Give less than 100%"),
        ((*POLICY, "--against", "b", "--share", "10"), "--share is '10' Give a share above 0"),
        ((*POLICY, "--keep.days", "3"), "--keep.days has no effect without --db"),
        ((*POLICY, "--keep.days", "3", "--keep.share", "5%"), "have no effect without --db"),
        ((*POLICY, "--db", "a.db", "--keep.share", "some"), "--keep.share is 'some'"),
        ((*POLICY, "--db", "a.db", "--keep.days", "0"), "--keep.days is 0"),
        ((*POLICY, "--reward", "r"), "--reward has no effect alone with --policy Add --best-of N"),
        ((*POLICY, "--best-of", "4"), "--best-of has no effect alone with --policy Add --reward"),
        ((*POLICY, "--best-of", "1", "--reward", "r"), "--best-of is 1"),
        ((*POLICY, "--combine", "worst"), "--scoring.combine has no effect without --reward"),
        ((*POLICY, "--engine", "vllm"), "--engine has no effect when every policy is at"),
        ((*POLICY, "--engine-flags=--x"), "--engine-flags has no effect when every policy is at"),
        (("--endpoint", "localhost"), "--endpoint is 'localhost' For example: http://"),
        ((*POLICY, "--host", "0.0.0.0"), "there is no --db Give --db, whose tokens say"),
        ((*POLICY,), f"{URL}/models does not list its models"),
        (("--policy", "m", *POLICY, "--db", "pyproject.toml"), "cannot be used as a label"),
        ((*POLICY, "--db", "a.db", "--keep.redact", "x"), "'x' does not name a function"),
    ],
)
def test_what_does_nothing_or_cannot_be_is_refused(refused, arguments, words):
    assert words in refused("serve", *arguments)
    assert not Path("a.db").exists()


def test_a_dry_run_shows_the_servers_that_would_be_started(run_json):
    found = run_json("serve", "--policy", "m", "--against", "b", "--engine-flags=--x", "--dry-run")
    program = str(Path(sys.executable).with_name("transformers"))
    line = f"{program} serve {{}} --host 127.0.0.1 --port PORT --log-level error --x"
    assert found["commands"].splitlines() == [line.format("m"), line.format("b")]


def test_a_dry_run_names_the_model_of_a_run(run_json, tiny_model, tmp_path):
    policy = tmp_path / "ppo" / "policy"
    shutil.copytree(tiny_model, policy)
    write_json(tmp_path / "ppo" / "stage.json", {"stage": "ppo", "status": "done"})
    values = '{"enable_thinking": false}'
    of_run = ("--policy", str(tmp_path / "ppo"), "--chat-template-kwargs", values)
    found = run_json("serve", *of_run, "--dry-run")["commands"]
    assert f" serve {policy} " in found
    assert values in found


def test_an_engine_that_is_not_there_is_named(refused):
    said = refused("serve", "--policy", "m", "--engine", "vllm", "--dry-run")
    assert "--engine is vllm, and there is no program vllm" in said
    assert "--endpoint URL" in said


@pytest.mark.parametrize(
    ("text", "share"), [("10%", 0.1), ("0.25", 0.25), ("100%", 1.0), ("0.001%", 1e-5)]
)
def test_shares(text, share):
    assert read_share(text, "--share") == pytest.approx(share)


@pytest.mark.parametrize("text", ["0%", "-1%", "101%", "2", "", "%", "nan", "half"])
def test_what_is_no_share(text):
    with pytest.raises(ConfigError, match="above 0 and up to 100%"):
        read_share(text, "--share")
