"""Two rounds end to end: each line of examples/rounds/round.sh, run as it stands there."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from string import Template

import pytest

from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.rounds import rounds
from labeling_app.db.store import Store
from policies.reference.store import open_store
from rlhf.cli import main
from rlhf.modeling.models import describe_model
from rlhf.records.ranked import read_ranked
from tests.pipeline.loop import SIGNAL, Loop, read_json
from tests.servers.commands import REPOSITORY

Run = Callable[..., tuple[int, str, str]]
SCRIPT = (REPOSITORY / "examples" / "rounds" / "round.sh").read_text(encoding="utf-8")
COMMANDS = ("rlhf ", "$ANNOTATE")
LINES = [line.strip() for line in SCRIPT.splitlines() if line.strip().startswith(COMMANDS)]
SHORT = {
    "reward.yaml": "precision: fp32\n",
    "reference.yaml": "samples: 2\nmax_new_tokens: 12\nprecision: fp32\n",
    "ppo.yaml": "episodes_per_step: 4\nprecision: fp32\nlearning_rate: 1.0e-3\n",
}


@pytest.fixture(scope="module")
def run_rounds(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two rounds after the loop, with a database of their own."""
    folder = tmp_path_factory.mktemp("rounds")
    for name, text in SHORT.items():
        (folder / name).write_text(text)
    db = folder / "labels.db"
    db.write_bytes(Path(loop.path("labels.db")).read_bytes())
    names = {
        "FIRST": str(loop.folder),
        "MODEL": str(loop.model),
        "DB": str(db),
        "JUDGE": f"--gold {SIGNAL}",
        "KIND": "--kind signal",
        "ANNOTATE": f"rlhf annotate --annotator signal:{SIGNAL} --db {db}",
        "PICK": "4",
        "STEPS": "2",
        "SETTINGS": str(folder),
    }
    last = str(loop.folder)
    for name in ("second", "third"):
        here = {**names, "LAST": last, "NEXT": str(folder / name)}
        for line in LINES:
            command = shlex.split(Template(line).substitute(here))[1:]
            # one process knows one precision; the other commands have it from their files
            precision = ["--precision", "fp32"] if command[0] in ("round", "evaluate") else []
            assert main([*command, *precision]) == 0, line
        last = str(folder / name)
    return folder


def test_the_script_has_seven_commands() -> None:
    assert len(LINES) == 7


def test_each_round_queues_samples_of_its_policy(run_rounds: Path, loop: Loop) -> None:
    with Store(run_rounds / "labels.db") as store:
        found = rounds(store.connections)
        query = "SELECT reason FROM tasks WHERE reason LIKE 'round%' ORDER BY priority DESC"
        reasons = [row["reason"] for row in store.connections.db.query(query)]
    assert [Path(found[number]["policy"]["path"]).parent for number in (1, 2)] == [
        loop.folder / "ppo",
        run_rounds / "second" / "ppo",
    ]
    assert found[2]["reward"] == describe_model(str(run_rounds / "second" / "reward" / "model"))
    store_hash = open_store(loop.folder / "reference" / "outputs").content_hash
    assert found[2]["reference"] == {"path": loop.path("reference"), "hash": store_hash}
    assert found[2]["settings"] == {"k": 3, "pick": 4, "random_share": 0.2, "seed": 0}
    assert len(reasons) == 8
    assert {reason.partition(":")[0] for reason in reasons[:4]} == {"round 2"}
    assert {reason.partition(": ")[2] for reason in reasons} == {"random", "divergent", "uncertain"}


def test_the_reward_model_learns_from_all_rounds(run_rounds: Path, loop: Loop) -> None:
    records = read_ranked(run_rounds / "third" / "rankings")
    ranked = [len(r.responses) for r in records if r.rankings]
    assert len(ranked) == 12
    assert sum(ranked) == 12 * 4 + 2 * 4 * 3  # each round brings four prompts three new samples
    inputs = read_json(run_rounds / "third" / "ppo" / "stage.json")["inputs"]
    assert inputs["model"]["path"] == str(run_rounds / "second" / "ppo" / "policy")
    report = read_json(run_rounds / "third" / "evaluate" / "report.json")
    assert set(report["rival"]["win_rate"]) == {"reward", "gold"}


def test_a_ranking_is_traced_to_its_models_rounds_and_annotator(
    run_rounds: Path, run_rlhf: Run
) -> None:
    records = read_ranked(run_rounds / "third" / "rankings")
    record = max(records, key=lambda record: len(record.responses))
    code, out, _ = run_rlhf(
        *("trace", record.rankings[0].id, "--db", str(run_rounds / "labels.db"), "--json")
    )
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found["annotator"] == {"name": f"signal:{SIGNAL}", "kind": "signal"}
    models = {response.id: response.model for response in record.responses}
    assert {r["id"]: r["model"] for r in found["responses"]} == models
    for response in found["responses"]:
        number = 0 if "ppo" not in response["model"] else 1 + ("second" in response["model"])
        assert response["round"] == number


def test_a_persons_ranking_is_traced_to_rubric_and_reason(
    run_rounds: Path, run_rlhf: Run, tmp_path: Path
) -> None:
    db = tmp_path / "labels.db"
    db.write_bytes((run_rounds / "labels.db").read_bytes())
    with Store(db) as store:
        rubric = store.add_rubric("Prefer the friendlier answer.")
        queue = TaskQueue(store)
        queue.add_annotator("ann")
        task = queue.next_task("ann")
        assert task is not None
        order = tuple((place,) for place in range(len(task.shown)))
        queue.submit("ann", Submission(id="by-ann", task_id=task.id, tiers=order, rubric=rubric))
        query = "SELECT reason FROM tasks ORDER BY priority DESC"
        first = next(iter(store.connections.db.query(query)))
    _, out, _ = run_rlhf("trace", "by-ann", "--db", str(db), "--json")
    found = json.loads(out.splitlines()[-1])
    assert found["annotator"] == {"name": "ann", "kind": "human"}
    assert found["reason"] == first["reason"]
    assert found["reason"].startswith("round 2: ")
    assert found["rubric"]["text"] == "Prefer the friendlier answer."
    assert [r["round"] for r in found["responses"]].count(2) == 3


def test_a_ranking_that_is_not_there(run_rounds: Path, run_rlhf: Run) -> None:
    code, _, errors = run_rlhf("trace", "none", "--db", str(run_rounds / "labels.db"))
    assert code == 2
    assert "There is no ranking none" in errors
