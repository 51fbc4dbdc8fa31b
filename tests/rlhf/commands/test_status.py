import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path

import pytest

from labeling_app.db.store import Store
from rlhf import cli
from rlhf.records.jsonl import write_json
from rlhf.run.metrics import append_metrics
from rlhf.run.rundir import RunDir, open_stage, stage_status, watching_stage
from rlhf.run.status import sparklines
from rlhf.run.telemetry.progress_count import ProgressCount
from rlhf.run.watchdog import Heartbeat, beat, count


@dataclass(frozen=True)
class Brake:
    coefficient: float = 0.1


@dataclass(frozen=True)
class Stage:
    out: Path
    steps: int = 2
    seed: int = 0
    kl: Brake = field(default_factory=Brake)


def make_stage(out: Path, stage: str, reward: float, **changes: object) -> None:
    run = open_stage(out, stage, Stage(out, **changes), {}, resume=False)
    with stage_status(run):
        for step in (1, 2):
            append_metrics(run.metrics_file, {"step": step, "reward/mean": reward * step})
        write_json(run.report_json, {"reward": {"last": reward * 2}})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of PPO, one of them with a reward stage too."""
    make_stage(tmp_path / "a" / "ppo", "ppo", 0.25)
    make_stage(tmp_path / "b" / "ppo", "ppo", 0.5, kl=Brake(0.3))
    make_stage(tmp_path / "a" / "reward", "reward", 1.0)
    return tmp_path


def show(*words: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.cli", "status", *words, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def table(capsys: pytest.CaptureFixture, *words: str) -> dict[str, list[str]]:
    """Rows of the printed table by their first column, of all stages."""
    assert cli.main(["status", *words, "--full"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[c.strip() for c in line.split("  ") if c.strip()] for line in lines]
    return {row[0]: row[1:] for row in cells if row}


def test_one_run_as_json(runs: Path) -> None:
    found = show(str(runs / "a"))["runs"][str(runs / "a")]
    assert list(found) == ["reward", "ppo"]  # in the order of the pipeline
    ppo = found["ppo"]
    assert (ppo["status"], ppo["steps"]) == ("done", 2)
    assert ppo["settings"]["kl.coefficient"] == 0.1
    assert ppo["last_metrics"] == {"step": 2, "reward/mean": 0.5}
    assert ppo["report"] == {"reward.last": 0.5}


def test_runs_side_by_side_with_differences_marked(runs: Path, capsys) -> None:
    versions = json.loads((runs / "b/ppo/stage.json").read_text(encoding="utf-8"))["versions"]
    set_stage(runs / "b" / "ppo", versions=versions | {"torch": "1.0"})
    rows = table(capsys, str(runs / "a"), str(runs / "b"))
    assert rows["ppo"] == [str(runs / "a"), str(runs / "b")]
    assert rows["≠ kl.coefficient"] == ["0.1", "0.3"]
    assert rows["steps"] == ["2", "2"]
    assert rows["reward/mean"] == ["0.5", "1"]
    assert rows["reward.last"] == ["0.5", "1"]
    assert rows["≠ versions.torch"][1] == "1.0"
    assert rows["reward/mean ▁…█"] == ["▁▃", "▃█"]  # .25, .5 and .5, 1 on one scale
    different = [name for name in rows if name.startswith("≠")]
    assert different == ["≠ versions.torch", "≠ kl.coefficient"]


def set_stage(folder: Path, **changes: object) -> None:
    stage = folder / "stage.json"
    write_json(stage, json.loads(stage.read_text(encoding="utf-8")) | changes)


def overview(capsys: pytest.CaptureFixture, *words: str) -> list[list[str]]:
    """Cells of the lines that people see without --full."""
    assert cli.main(["status", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_people_see_one_line_for_each_stage(runs: Path, capsys) -> None:
    a = runs / "a"
    set_stage(a / "ppo", started_at="2026-01-01T10:00:00+00:00", status="interrupted",
              finished_at="2026-01-01T11:05:07+00:00")  # fmt: skip
    set_stage(a / "reward", started_at="2026-01-01T10:00:00+00:00",
              finished_at="2026-01-01T10:02:03+00:00")  # fmt: skip
    rate = {"value": 0.82, "low": 0.751, "high": 0.88, "pairs": 189, "prompts": 64}
    write_json(a / "reward" / "report.json", {"accuracy": rate})
    assert overview(capsys, str(a)) == [
        [str(a)],
        ["reward", "done", "2 min 03 s", "accuracy 82 % (95 % interval 75–88 %)"],
        ["ppo", "interrupted", "1 h 05 min", "2 steps",
         f"→ rlhf ppo --config {a}/ppo/config.yaml --resume"],
    ]  # fmt: skip


WAITING = """
import pathlib, sys, time
from rlhf.run.rundir import RunDir, watching_stage
with watching_stage(RunDir(pathlib.Path(sys.argv[1])), 0):
    print("running", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_is_not_called_running(runs: Path, capsys) -> None:
    ppo = runs / "a" / "ppo"
    set_stage(ppo, started_at="2026-01-01T10:00:00+00:00", status="running", finished_at=None)
    words = [sys.executable, "-c", WAITING, str(ppo)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        assert overview(capsys, str(ppo))[1][1] == "running"
        process.kill()
    _, status, _, steps, remedy = overview(capsys, str(ppo))[1]
    assert (status, steps) == ("killed", "2 steps")
    assert remedy == f"→ rlhf ppo --config {ppo}/config.yaml --resume"
    found = show(str(ppo))["runs"][str(ppo)]["ppo"]
    written = (ppo / "heartbeat" / "rank-00000.json").stat().st_mtime
    finished = datetime.fromisoformat(found["finished_at"]).timestamp()
    assert finished == pytest.approx(written, rel=0, abs=0.01)
    (ppo / "heartbeat" / "job-1").mkdir()  # jobs of an array have heartbeats of their own
    assert overview(capsys, str(ppo))[1][1] == "running"


def test_a_running_stage_says_how_far_it_is(runs: Path, capsys) -> None:
    ppo = runs / "a" / "ppo"
    set_stage(ppo, status="running", finished_at=None)
    with watching_stage(RunDir(ppo), None):
        counted = ProgressCount(
            title="training", done=3, total=4, seconds_left=600.0, at=time.time(), is_stage=True
        )
        count(counted)
        beat("sampling", 4)
        shown = overview(capsys, str(ppo))[1]
        beat("scoring", 4)
        count(None)
        count(replace(counted, is_stage=False))
        part = overview(capsys, str(ppo))[1]
    assert (shown[1], shown[3]) == ("running", "training, 3 of 4, sampling, about 10 min left")
    assert part[3] == "training, 3 of 4, scoring, about 10 min left of this part"


def test_a_process_on_another_machine_counts_as_running(runs: Path, capsys) -> None:
    ppo = runs / "a" / "ppo"
    set_stage(ppo, status="running")
    heartbeat = Heartbeat(rank=0, host="another", pid=2**22)  # beyond the largest there can be
    write_json(ppo / "heartbeat" / "rank-00000.json", asdict(heartbeat))
    assert overview(capsys, str(ppo))[1][1] == "running"


def test_a_loop_is_shown_with_the_stages_of_its_rounds(tmp_path: Path, capsys) -> None:
    out = tmp_path / "loop"
    run = open_stage(out, "loop", Stage(out), {}, resume=True)
    for number in (10, 2):
        for stage in ("ppo", "reward"):
            make_stage(out / f"round-{number}" / stage, stage, 1.0)
    with watching_stage(run, None):
        beat("round 10: evaluate", 10)
        assert overview(capsys, str(out))[1][1::2] == ["running", "round 10: evaluate"]
        beat("waiting for rankings: 3 of 9", 10)
        shown = overview(capsys, str(out))
    names = [f"{stage} in round-{n}" for n in (2, 10) for stage in ("reward", "ppo")]
    assert [row[0] for row in shown[1:]] == ["loop", *names]
    assert shown[1][1::2] == ["waiting", "waiting for rankings: 3 of 9"]
    set_stage(out, status="failed", error="oh")
    assert overview(capsys, str(out))[1][3:] == ["oh", f"→ rlhf loop --config {out}/config.yaml"]
    write_json(out / "report.json", {"stopped": "3 of 3 rounds are done."})
    set_stage(out, status="done", error=None)
    assert overview(capsys, str(out))[1][1::2] == ["done", "3 of 3 rounds are done."]


@pytest.mark.parametrize(
    ("report", "number"),
    [
        (
            {
                "verdict": {"judge": "gold"},
                "win_rate": {"gold": {"value": 1.0, "low": None, "high": None}},
            },
            "wins 100 % (too few prompts for an interval) by gold",
        ),
        ({"reward": {"first": -0.25, "last": 0.5}}, "reward -0.25 → 0.50 in 2 steps"),
        ({"rows": 24, "prompts": 12}, "24 responses to 12 prompts"),
        ({"accuracy": None}, "2 steps"),
    ],
)
def test_the_main_number_of_a_stage(runs: Path, capsys, report: dict, number: str) -> None:
    write_json(runs / "b" / "ppo" / "report.json", report)
    assert overview(capsys, str(runs / "b"))[1][3] == number


def test_several_runs_show_only_what_they_differ_by(runs: Path, capsys) -> None:
    set_stage(runs / "b" / "ppo", inputs={"model": {"path": "m", "hash": "abc"}})
    shown = overview(capsys, str(runs / "a"), str(runs / "b"))
    assert [row[0] for row in shown if row] == [
        *("run", str(runs / "a"), str(runs / "b")),
        *(str(runs / "a"), "reward", "ppo", str(runs / "b"), "ppo"),
        *("differences", "ppo kl.coefficient", "ppo inputs.model"),
        *("curves", "reward reward/mean ▁…█", "ppo reward/mean ▁…█"),
    ]
    both = [str(runs / "a"), str(runs / "b")]
    assert [row for row in shown if row][-6:] == [
        ["differences", *both],
        ["ppo kl.coefficient", "0.1", "0.3"],
        ["ppo inputs.model", "-", "abc"],
        ["curves", *both],
        ["reward reward/mean ▁…█", "▁█"],
        ["ppo reward/mean ▁…█", "▁▃", "▃█"],  # .25, .5 and .5, 1 on one scale
    ]


@pytest.fixture
def judged(runs: Path) -> Path:
    """The two runs; one is evaluated, and the price of the other is known too."""
    make_stage(runs / "a" / "evaluate", "evaluate", 1.0)
    cost = {"device_hours": 10.0, "price": 1234.5, "price_per_point": 49.38}
    report = {
        "verdict": {"judge": "gold"},
        "win_rate": {"gold": {"value": 0.75, "low": 0.6, "high": 0.9}, "reward": {"value": 1.0}},
        "kl": {"reverse": {"nats": 1.5}},
        "cost": cost,
    }
    write_json(runs / "a" / "evaluate" / "report.json", report)
    set_stage(runs / "b" / "ppo", device_seconds=5400)
    report = {
        "kl": {"reverse": {"nats": 0.25}},
        "cost": {"price": 3.75},
        "use": {"tokens_per_second": 1234.5},
    }
    write_json(runs / "b" / "ppo" / "report.json", report)
    return runs


def test_several_runs_are_compared_in_a_table(judged: Path, capsys) -> None:
    a, b = str(judged / "a"), str(judged / "b")
    rows = overview(capsys, a, b)[:3]
    assert rows == [
        [
            *("run", "steps", "win rate", "judge", "KL"),
            *("tokens/s", "device-hours", "price", "price of a point"),
        ],
        [a, "2", "75 % (95 % interval 60–90 %)", "gold", "1.50", "-", "10", "1,234", "49.4"],
        [b, "2", "-", "-", "0.25", "1,234", "1.5", "3.75", "-"],
    ]
    assert overview(capsys, a)[0] == [a]  # one run has nobody to be compared with
    found = show(a, b)["compared"]
    assert found[a]["win_rate"] == {"value": 0.75, "low": 0.6, "high": 0.9}
    assert found[b] == {
        "steps": 2, "win_rate": None, "judge": None, "kl": 0.25, "tokens_per_second": 1234.5,
        "device_hours": 1.5, "price": 3.75, "price_per_point": None,
    }  # fmt: skip


def test_a_folder_of_runs_stands_for_them(judged: Path, capsys) -> None:
    (judged / "labels").mkdir()
    assert overview(capsys, str(judged)) == overview(capsys, str(judged / "a"), str(judged / "b"))


def test_a_run_that_has_not_ended_has_no_result_yet(judged: Path, capsys) -> None:
    set_stage(judged / "a" / "evaluate", status="running", device_seconds=1800)
    for stage in ("ppo", "reward"):
        set_stage(judged / "a" / stage, device_seconds=900)
    row = overview(capsys, str(judged))[1]
    # the hours of its folder; two stages have no price
    assert row[1:] == ["2", "-", "-", "-", "-", "1", "-", "-"]


def test_a_cost_that_is_no_number_is_refused(judged: Path, capsys) -> None:
    write_json(judged / "b" / "ppo" / "report.json", {"cost": {"price": "much"}})
    assert cli.main(["status", str(judged)]) == 2
    assert "has 'cost.price' as 'much', not as a number" in capsys.readouterr().err


def test_long_lists_are_counted_and_short_ones_shown(runs: Path, capsys) -> None:
    write_json(runs / "b" / "ppo" / "report.json", {"long": [0.125] * 40, "short": [1, 2]})
    rows = table(capsys, str(runs / "b"))
    assert (rows["long"], rows["short"]) == (["40 values"], ["[1, 2]"])


def test_a_run_that_lacks_a_stage_shows_a_dash(runs: Path, capsys) -> None:
    assert cli.main(["status", str(runs / "b"), str(runs / "a"), "--full"]) == 0
    reward, ppo = capsys.readouterr().out.split("\n\n")
    status = next(line.split() for line in reward.splitlines() if line.startswith("status"))
    assert status == ["status", "-", "done"]
    assert ppo.startswith("ppo")


def test_a_stage_that_failed_says_why(tmp_path: Path, capsys) -> None:
    run = open_stage(tmp_path / "ppo", "ppo", Stage(tmp_path), {}, resume=False)
    with pytest.raises(ValueError, match="oh"), stage_status(run):
        raise ValueError("oh")
    rows = table(capsys, str(tmp_path))
    assert (rows["status"], rows["error"]) == (["failed"], ["ValueError: oh"])
    line = overview(capsys, str(tmp_path))[1]
    assert (line[1], line[3]) == ("failed", "ValueError: oh")
    assert line[4] == f"→ rlhf ppo --config {tmp_path}/ppo/config.yaml --resume"


def test_a_stage_under_way_has_no_report_yet(tmp_path: Path, capsys) -> None:
    run = open_stage(tmp_path / "ppo", "ppo", Stage(tmp_path), {}, resume=False)
    run.metrics_file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo', encoding="utf-8")
    rows = table(capsys, str(tmp_path))
    assert (rows["status"], rows["loss"]) == (["running"], ["2"])
    assert "report" not in rows


@pytest.mark.parametrize(
    ("make", "message"),
    [(False, "No such run: "), (True, "holds no stage of a run (no stage.json)")],
)
def test_no_run(tmp_path: Path, capsys, make: bool, message: str) -> None:
    if make:
        (tmp_path / "x").mkdir()
    assert cli.main(["status", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err


def test_a_label_database_is_no_run(tmp_path: Path, capsys) -> None:
    db = tmp_path / "labels.db"
    Store(db).close()
    assert cli.main(["status", str(db)]) == 2
    said = capsys.readouterr().err
    assert f"{db} is a label database, not a run" in said
    assert f"rlhf status --db {db}" in said


def test_curves_share_a_scale() -> None:
    assert sparklines([[0.0, 1.0, 2.0], [7.0]]) == ["▁▂▃", "█"]
    assert sparklines([[1.0, 1.0], []]) == ["▁▁", ""]
    assert sparklines([[0.0, float("nan"), 7.0]]) == ["▁!█"]


def test_status_does_not_wait_for_torch(runs: Path) -> None:
    code = (
        "import sys; from rlhf.cli import main; "
        f"main(['status', {str(runs / 'a')!r}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_two_stages_of_a_kind_both_show(runs: Path, capsys) -> None:
    make_stage(runs / "a" / "again", "ppo", 0.75)
    rows = overview(capsys, str(runs / "a"))
    assert [row[0] for row in rows[1:]] == ["reward", "ppo in again", "ppo"]
    both = table(capsys, str(runs / "a"), str(runs / "b"))
    assert {"ppo", "ppo in again", "reward"} <= both.keys()


def test_old_names_and_settings_of_later_versions_are_no_difference(runs: Path, capsys) -> None:
    old, new = runs / "a" / "reward", runs / "b" / "reward"
    make_stage(new, "reward", 1.0)
    (old / "config.yaml").write_text("learning_rate: 1.0e-5\nepochs: 1\ncentring: 0.01\n")
    groups = "optim:\n  epochs: 2\n  learning_rate: 1.0e-5\nobjective:\n  centering: 0.01\n"
    unknown_to_old = "  all_bad_weight: 0.0\n  thumbs_weight: 0.0\ndata:\n  reads_thinking: true\n"
    (new / "config.yaml").write_text(groups + unknown_to_old + "seed: 0\n")
    rows = table(capsys, str(old), str(new))
    assert rows["optim.learning_rate"] == ["1e-05", "1e-05"]
    assert [name for name in rows if name.startswith("≠")] == ["≠ optim.epochs"]
