"""`rlhf generate` on the tiny model."""

from pathlib import Path

import pytest

from labeling_app.db.store import Store
from rlhf.cli import main
from tests.pipeline.loop import SHORT, write_prompts


@pytest.mark.parametrize("batch", ["6", "64"])
def test_more_samples_are_other_samples(tmp_path: Path, tiny_model: Path, batch: str) -> None:
    """The same seed and the same batches once more would give the same answers."""
    db = str(tmp_path / "labels.db")
    assert main(["import", str(write_prompts(tmp_path / "prompts.jsonl")), "--db", db]) == 0
    arguments = ["generate", "--db", db, "--model", str(tiny_model), "--batch-size", batch, *SHORT]
    assert main([*arguments, "-k", "2"]) == 0
    for k in ("4", "6"):
        assert main([*arguments, "-k", k]) == 0
    with Store(Path(db)) as store:
        records = store.ranked_prompts()
        answers = [[r.token_ids for r in record.responses] for record in records]
    assert len(answers) == 12
    for of_prompt in answers:
        assert len(of_prompt) == len(set(of_prompt)) == 6
