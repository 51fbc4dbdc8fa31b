"""What every engine is asked to sample."""

from pathlib import Path

from labeling_app.db.store import Store
from policies.reference.store import open_store
from rlhf.cli import main
from rlhf.records.ranked import read_ranked_file
from rlhf.records.schema import Sampling
from rlhf.run.rundir import RunDir
from tests.pipeline.loop import write_prompts
from tests.policies.training import TrainingInputs

PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 11, 12], [13], [14, 15, 16]]
TEMPERATURE = 0.7
SAMPLING = Sampling(temperature=TEMPERATURE, max_new_tokens=6, seed=0)


def sample_everywhere(training: TrainingInputs, folder: Path, engine: str) -> dict[str, list[str]]:
    """What every command that samples got by an engine, sorted."""
    texts: dict[str, dict[str, str]] = {}
    prompts, db = write_prompts(folder / "prompts.jsonl"), str(folder / "labels.db")
    model, reference = str(training.model), str(folder / "reference")
    how = ("--engine", engine, "--batch-size", "3", "--precision", "fp32")
    compared = ("--reward", str(training.reward), "--reference", reference)
    for command in (
        ["import", str(prompts), "--db", db],
        ["generate", "--db", db, "--model", model, "-k", "2", "--max-new-tokens", "6"],
        ["reference", "--prompts", str(prompts), "--model", model, "--max-new-tokens", "6"],
        ["evaluate", "--policy", model, "--against", model, "--samples", "2", *compared],
        ["round", "--db", db, "--policy", model, "--pick", "2", "-k", "2", *compared],
    ):
        out = ("--out", str(folder / command[0])) if command[0] in ("reference", "evaluate") else ()
        assert main([*command, *out, *(how if command[0] != "import" else ())]) == 0
        with Store(Path(db)) as store:
            texts[command[0]] = {
                one.id: one.text for record in store.ranked_prompts() for one in record.responses
            }
    added = texts["round"].keys() - texts["generate"].keys()
    texts["round"] = {name: texts["round"][name] for name in added}
    answers = read_ranked_file(RunDir(folder / "evaluate").answers)
    texts["policy"], texts["rival"] = {}, {}
    for _, *sampled in (record.responses for record in answers):  # the original's comes first
        assert len(sampled) == 4
        for place, one in enumerate(sampled):
            texts["policy" if place < 2 else "rival"][one.id] = one.text
    store = open_store(folder / "reference" / "outputs")
    texts["reference"] = {str(place): row.text for place, row in enumerate(store.rows)}
    return {name: sorted(found.values()) for name, found in texts.items()}
