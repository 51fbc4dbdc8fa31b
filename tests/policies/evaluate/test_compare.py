"""`rlhf evaluate` on random models: every judge, a rival, an endpoint that fails and comes back."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlhf.cli import main
from rlhf.modeling.tokens import tokenizer_fingerprint
from rlhf.records.jsonl import write_jsonl
from rlhf.records.ranked import read_ranked_file
from rlhf.run.rundir import RunDir
from tests.conftest import build_tokenizer
from tests.pipeline.loop import SIGNAL
from tests.pipeline.signals import count_vowels
from tests.policies.conftest import Inputs
from tests.servers.judge import JudgeServer
from tests.servers.reward import RewardServer

Evaluate = Callable[..., tuple[int, dict, str]]


@pytest.fixture
def evaluate(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Run an evaluation: exit code, the JSON it prints, stderr."""

    def run(out: Path, *more: str) -> tuple[int, dict, str]:
        capsys.readouterr()
        code = main(inputs.arguments(out, "--json", *more))
        output = capsys.readouterr()
        return code, json.loads(output.out.splitlines()[-1]) if code == 0 else {}, output.err

    return run


def test_win_rates_are_those_of_the_answers_that_were_kept(done: RunDir) -> None:
    report = done.read_report()
    records = read_ranked_file(done.answers)
    assert len(records) == 4
    shares = {"reference": [], "rival": []}
    for record in records:
        by_model: dict[str, list[str]] = {}
        for response in record.responses:
            said = response.text.replace("(no answer)", "")  # records never have an empty text
            by_model.setdefault(Path(response.model).name, []).append(said)
        assert {name: len(texts) for name, texts in by_model.items()} == {
            "original": 3,
            "policy": 2,
            "rival": 2,
        }
        assert [one.sampling.seed for one in record.responses] == [0, 0, 0, 0, 0, 1, 1]
        ours = [count_vowels("", text) for text in by_model["policy"]]
        for name, folder in (("reference", "original"), ("rival", "rival")):
            theirs = [count_vowels("", text) for text in by_model[folder]]
            points = [(a > b) + 0.5 * (a == b) for a in ours for b in theirs]
            shares[name].append(np.mean(points))
    assert report["win_rate"]["gold"]["value"] == pytest.approx(np.mean(shares["reference"]))
    assert report["rival"]["win_rate"]["gold"]["value"] == pytest.approx(np.mean(shares["rival"]))


def test_a_function_may_stand_where_the_reward_model_does(
    inputs: Inputs, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = inputs.arguments(tmp_path / "out")
    arguments[arguments.index("--reward") + 1] = f"signal:{SIGNAL}"
    assert main(arguments) == 0, capsys.readouterr().err
    report = RunDir(tmp_path / "out").read_report()
    assert report["judges"]["reward"]["kind"] == "reward function"
    assert report["win_rate"]["reward"] == report["win_rate"]["gold"]


def test_the_gold_judge_may_be_a_reward_model(
    inputs: Inputs, evaluate: Evaluate, already_loaded: list[int], tmp_path: Path
) -> None:
    code, _, errors = evaluate(tmp_path / "out", "--gold", inputs.path("reward"))
    assert code == 0, errors
    report = RunDir(tmp_path / "out").read_report()
    assert report["judges"]["gold"] == {
        "kind": "gold reward model",
        "name": inputs.path("reward"),
        "is_objective": False,
    }
    for model, scores in report["scores"]["gold"].items():
        assert scores == pytest.approx(report["scores"]["reward"][model], abs=1e-5)
    assert report["inputs"]["gold"]["hash"] == report["inputs"]["reward"]["hash"]
    assert already_loaded == [0] * 5  # the policy, the reward, the gold judge, two for the KLs
    assert "judged by the gold reward model" in RunDir(tmp_path / "out").report_html.read_text()


def test_the_gold_judge_may_be_an_address(evaluate: Evaluate, tmp_path: Path) -> None:
    with RewardServer() as server:
        code, _, errors = evaluate(tmp_path / "out", "--gold", server.url)
        assert code == 0, errors
        report = RunDir(tmp_path / "out").read_report()
        assert report["judges"]["gold"]["kind"] == "gold reward function"
        assert report["judges"]["gold"]["name"] == server.url


def test_a_function_is_named_with_or_without_signal(evaluate: Evaluate, tmp_path: Path) -> None:
    found = []
    for name in (SIGNAL, f"signal:{SIGNAL}"):
        out = tmp_path / str(len(found))
        code, _, errors = evaluate(out, "--gold", name)
        assert code == 0, errors
        report = RunDir(out).read_report()
        found.append({key: report[key] for key in ("win_rate", "judges", "scores", "inputs")})
    assert found[0] == found[1]


def test_the_judge_model_judges_the_first_answers_in_both_orders(done: RunDir) -> None:
    points = []
    for record in read_ranked_file(done.answers):
        theirs, ours = record.responses[0].text, record.responses[3].text
        # the server names the longer answer in whatever place; equal lengths give B twice: a tie
        points.append((len(ours) > len(theirs)) + 0.5 * (len(ours) == len(theirs)))
    rate = done.read_report()["win_rate"]["ai"]
    assert rate["value"] == pytest.approx(np.mean(points))
    assert rate["unclear"] == 0
    assert len(done.judge_log.read_text().splitlines()) == 4 * 2 * 2  # prompts, orders, models


def test_the_report_names_judges_models_and_inputs(done: RunDir) -> None:
    report = done.read_report()
    assert report["verdict"]["judge"] == "ai"
    assert report["judges"]["ai"] == {"kind": "AI judge", "name": "m"}
    assert report["judges"]["reward"]["is_objective"] is False  # the policy is a plain folder
    for measure in (
        "length",
        "eos_rate",
        "distinct",
        "self_bleu",
        "template",
        "repeats",
        "log_likelihood",
        "reward",
        "gold",
    ):
        assert set(report[measure]) == {"reference", "policy", "rival"}
    assert set(report["inputs"]) == {"policy", "reward", "reference", "against"}
    assert [point["n"] for point in report["best_of_n"]] == [1, 2, 3]
    rewards = [point["reward"] for point in report["best_of_n"]]
    assert rewards == sorted(rewards)
    assert rewards[0] == pytest.approx(report["reward"]["reference"]["mean"])
    for kl in report["kl"].values():
        assert kl["sqrt_nats"] == pytest.approx(max(kl["nats"], 0) ** 0.5)
    assert set(report["win_rate_by_length"]["gold"]) == {"23 tokens"}
    page = done.report_html.read_text()
    assert "Against <code" in page
    assert "preferred by the AI judge" in page


def test_an_endpoint_that_fails_is_asked_only_for_the_rest(
    evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.endpoints.retries.time.sleep", lambda seconds: None)
    with JudgeServer() as server:
        server.failures = [0, 0, 0, 0] + [503] * 5  # the first is a trial
        judge = ("--judge-endpoint", server.url, "--judge-model", "m", "--judge-parallel", "1")
        code, _, errors = evaluate(tmp_path / "out", *judge)
        assert code == 75
        assert "does not answer after 5 attempts (status 503)" in errors
        assert RunDir(tmp_path / "out").read_stage()["status"] == "interrupted"
        server.failures, server.calls = [], []
        run = RunDir(tmp_path / "out")
        answers = run.answers.read_bytes()
        kept = len(run.judge_log.read_text().splitlines())
        assert kept >= 3
        with run.judge_log.open("a") as stream:
            stream.write('{"key": "a kill cut this li')
        patient = (*judge[:-1], "2")
        assert evaluate(tmp_path / "out", *patient, "--resume")[0] == 0
        assert len(server.calls) == 4 * 2 - kept
    assert run.answers.read_bytes() == answers


def test_an_evaluation_that_was_stopped_keeps_its_answers(
    evaluate: Evaluate, inputs: Inputs, done: RunDir, tmp_path: Path
) -> None:
    out = RunDir(tmp_path / "out")
    shutil.copytree(done.path, out.path)
    stage = out.read_stage()
    out.stage_file.write_text(json.dumps({**stage, "status": "interrupted"}))
    lines = [json.loads(line) for line in out.answers.read_text().splitlines()]
    before = done.read_report()
    lines[0]["responses"][3]["text"] = "kept, not sampled again"
    lines[0]["responses"][6]["text"] = "(no answer)"
    write_jsonl(out.answers, lines)
    with JudgeServer() as server:
        judge = ("--judge-endpoint", server.url, "--judge-model", "m")
        code, _, errors = evaluate(out.path, *judge, "--against", inputs.path("rival"), "--resume")
        assert code == 0, errors
        assert len(server.calls) == 2 * 2  # what is new, in two orders against two models
    report = out.read_report()
    assert report["samples"][0]["answers"]["policy"] == "kept, not sampled again"
    assert report["scores"]["gold"]["rival"][1] == 0  # nothing said, no vowel
    changed = [
        place
        for place, (a, b) in enumerate(
            zip(report["scores"]["gold"]["policy"], before["scores"]["gold"]["policy"], strict=True)
        )
        if a != b
    ]
    assert changed == [0]
    for measure in ("kl", "length", "eos_rate"):
        assert report[measure] == before[measure]  # of the tokens, which are the same


def test_people_are_asked_before_an_evaluation_counts_as_done(
    evaluate: Evaluate, tmp_path: Path
) -> None:
    out, db = tmp_path / "out", tmp_path / "labels.db"
    db.write_text("no database")
    code, _, errors = evaluate(out, "--to-db", str(db))
    assert code == 2, errors
    assert not RunDir(out).is_done  # a loop would go on with the next round
    db.unlink()
    code, result, errors = evaluate(out, "--to-db", str(db), "--resume")
    assert code == 0, errors
    assert result["queued"] == 4
    assert RunDir(out).is_done


def test_a_finished_evaluation_does_not_ask_its_judge(
    evaluate: Evaluate, inputs: Inputs, done: RunDir
) -> None:
    gone = ("--judge-endpoint", "http://127.0.0.1:9/v1", "--judge-model", "m")
    against = ("--against", inputs.path("rival"))
    code, result, errors = evaluate(done.path, *gone, *against, "--resume")
    assert code == 0, errors
    assert result["win_rate"] == done.read_report()["win_rate"]


def test_a_judge_that_is_not_there_is_noticed_before_anything_is_sampled(
    evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.endpoints.retries.time.sleep", lambda seconds: None)
    judge = ("--judge-endpoint", "http://127.0.0.1:9/v1", "--judge-model", "m")
    code, _, errors = evaluate(tmp_path / "out", *judge)
    assert code == 75
    assert "http://127.0.0.1:9/v1 does not answer after 5 attempts" in errors
    assert not (tmp_path / "out").exists()


def test_one_model_at_a_time_is_in_memory(
    evaluate: Evaluate, inputs: Inputs, already_loaded: list[int], tmp_path: Path
) -> None:
    code, _, errors = evaluate(tmp_path / "out", "--against", inputs.path("rival"))
    assert code == 0, errors
    assert already_loaded == [0] * 5  # two that answer, the reward, two for the KLs


def test_an_unclear_judge_counts_for_nothing(evaluate: Evaluate, tmp_path: Path) -> None:
    with JudgeServer() as server:
        server.unclear = True
        judge = ("--judge-endpoint", server.url, "--judge-model", "m")
        code, result, _ = evaluate(tmp_path / "out", *judge)
    assert code == 0
    assert set(result["win_rate"]) == {"reward", "gold"}
    assert result["verdicts"] == {"asked": 4, "unclear": 4}
    page = RunDir(tmp_path / "out").report_html.read_text()
    assert 'data-path="/verdicts/unclear">4</data> of' in page


def test_a_rival_with_another_tokenizer_answers_in_its_own_and_is_read_in_ours(
    evaluate: Evaluate, inputs: Inputs, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(inputs.path("rival"), other)
    build_tokenizer(["another corpus with other words", "and so other merges"]).save_pretrained(
        other
    )
    code, _, errors = evaluate(tmp_path / "out", "--against", str(other))
    assert code == 0, errors
    tokenizer = build_tokenizer()
    for record in read_ranked_file(RunDir(tmp_path / "out").answers):
        for response in record.responses[5:]:
            read = tokenizer.decode(response.token_ids or (), skip_special_tokens=True).strip()
            assert read == response.text.replace("(no answer)", "")
            assert response.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--judge-model", "m"], "A judge needs --judge-endpoint (is '') and --judge-model"),
        (["--judge-endpoint", "localhost", "--judge-model", "m"], "(is 'localhost')"),
        (["--against", "nowhere/at/all"], "nowhere/at/all is not a model"),
        (["--gold", "nowhere/at/all"], "nowhere/at/all is not a model"),
        (["--gold", "signal:no.such:thing"], "Cannot import no.such"),
        (
            [
                *("--judge-endpoint", "http://x/v1", "--judge-model", "m"),
                "--judge-rubric",
                "none.md",
            ],
            "--judge-rubric none.md cannot be read: No such file or directory",
        ),
    ],
)
def test_what_is_refused_leaves_nothing(
    evaluate: Evaluate, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, _, errors = evaluate(tmp_path / "out", *arguments)
    assert code == 2
    assert message in " ".join(errors.split())
    assert not (tmp_path / "out").exists()
