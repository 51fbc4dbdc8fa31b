"""Three rounds, of the commands that `rlhf loop` would start."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.rounds import rounds
from labeling_app.db.store import Store
from policies.reference.store import open_store
from rlhf.cli import main
from rlhf.commands.loop.opened import read_loop_file
from rlhf.commands.loop.stages import stages_of_round
from rlhf.modeling.models import describe_model
from rlhf.records.ranked import read_ranked
from tests.pipeline.loop import SIGNAL, read_json, write_prompts

Run = Callable[..., tuple[int, str, str]]
EXACT = {"precision": "fp32"}
SHORT = {"max_new_tokens": 12, **EXACT}
STAGES = {
    "generate": {"k": 4, **SHORT},
    "round": {"pick": 4, **EXACT},
    "train-reward": EXACT,
    "reference": {"samples": 2, **SHORT},
    "ppo": {
        "steps": 2,
        "batch": {"episodes_per_step": 4},
        "optim": {"learning_rate": 1e-3},
        **EXACT,
    },
    "evaluate": EXACT,
}


@pytest.fixture(scope="module")
def run_rounds(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of three rounds, each of the commands that the loop would start."""
    folder = tmp_path_factory.mktemp("rounds")
    file = folder / "loop.yaml"
    top = {"out": str(folder), "model": str(tiny_model), "annotator": f"signal:{SIGNAL}"}
    prompts = str(write_prompts(folder / "prompts.jsonl"))
    file.write_text(yaml.safe_dump({**top, "prompts": prompts, "stages": STAGES}))
    settings, _ = read_loop_file(file)
    for number in range(3):
        for stage in stages_of_round(settings, number):
            stage.write_settings()
            assert main(stage.arguments) == 0, stage.command
    return folder


def test_each_round_queues_samples_of_its_policy(run_rounds: Path) -> None:
    with Store(run_rounds / "labels.db") as store:
        found = rounds(store.connections)
        query = "SELECT reason FROM tasks WHERE reason LIKE 'round%' ORDER BY priority DESC"
        reasons = [row["reason"] for row in store.connections.db.query(query)]
    assert [Path(found[number]["policy"]["path"]).parent for number in (1, 2)] == [
        run_rounds / "round-0" / "ppo",
        run_rounds / "round-1" / "ppo",
    ]
    assert found[2]["reward"] == describe_model(str(run_rounds / "round-1" / "reward" / "model"))
    reference = run_rounds / "round-0" / "reference"
    store_hash = open_store(reference / "outputs").content_hash
    assert found[2]["reference"] == {"path": str(reference), "hash": store_hash}
    assert found[2]["settings"] == {"k": 3, "pick": 4, "random_share": 0.2, "seed": 0}
    assert len(reasons) == 8
    assert {reason.partition(":")[0] for reason in reasons[:4]} == {"round 2"}
    assert {reason.partition(": ")[2] for reason in reasons} == {"random", "divergent", "uncertain"}


def test_the_reward_model_learns_from_all_rounds(run_rounds: Path) -> None:
    records = read_ranked(run_rounds / "round-2" / "rankings")
    ranked = [len(r.responses) for r in records if r.rankings]
    assert len(ranked) == 12
    assert sum(ranked) == 12 * 4 + 2 * 4 * 3  # each round brings four prompts three new samples
    inputs = read_json(run_rounds / "round-2" / "ppo" / "stage.json")["inputs"]
    assert inputs["model"]["path"] == str(run_rounds / "round-1" / "ppo" / "policy")
    report = read_json(run_rounds / "round-2" / "evaluate" / "report.json")
    assert set(report["rival"]["win_rate"]) == {"reward", "gold"}


def test_a_ranking_is_traced_to_its_models_rounds_and_annotator(
    run_rounds: Path, run_rlhf: Run
) -> None:
    records = read_ranked(run_rounds / "round-2" / "rankings")
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
        number = 0 if "ppo" not in response["model"] else 1 + ("round-1" in response["model"])
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
        order = tuple((place,) for place in range(len(task.shown_order)))
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
