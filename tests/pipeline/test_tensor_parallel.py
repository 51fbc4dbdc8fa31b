"""Two processes that hold one model together store what one process stores."""

import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from policies.reference_store import open_store
from rlhf.distributed import run_processes
from rlhf.errors import InputError
from rlhf.models import load_causal_lm
from tests.pipeline.loop import SHORT, run_process, write_prompts

PARTS = """
import sys
from pathlib import Path
from rlhf.distributed import start
from rlhf.models import load_causal_lm
accelerator = start("fp32", 0)
model = load_causal_lm(sys.argv[1], together=True)
held = sum(value.to_local().numel() for name, value in model.named_parameters() if "proj" in name)
Path(sys.argv[2], str(accelerator.process_index)).write_text(str(held))
"""


def test_a_process_holds_a_part_of_every_matrix(tiny_model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PARTS, encoding="utf-8")
    assert run_processes([sys.executable, str(program), str(tiny_model), str(tmp_path)], 2) == 0
    whole = load_causal_lm(str(tiny_model))
    matrices = sum(value.numel() for name, value in whole.named_parameters() if "proj" in name)
    for rank in ("0", "1"):
        assert int((tmp_path / rank).read_text()) == matrices / 2


def test_reference_outputs_are_those_of_one_process(
    tiny_model: Path, tmp_path: Path, run_rlhf
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    words = ["reference", "--prompts", str(prompts), "--model", str(tiny_model), *SHORT]
    cut = ["--prompts-per-shard", "3"]
    code, _, shown = run_rlhf(*words, *cut, "--out", str(tmp_path / "one"))
    assert code == 0, shown
    together = ["--processes", "2", "--tensor-parallel", "--out", str(tmp_path / "two")]
    done = run_process(*words, *cut, *together)
    assert done.returncode == 0, done.stderr[-4000:]
    expected, found = (open_store(tmp_path / name / "outputs").rows for name in ("one", "two"))
    assert len(found) == 12
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.response_ids == theirs.response_ids
        assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=10)
    config.base_model_tp_plan = None
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no plan to divide the matrices of"):
        load_causal_lm(str(tmp_path), together=True)
