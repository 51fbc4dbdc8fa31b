"""`rlhf reference` on the tiny model: jobs and processes share the work, and nothing is lost."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from policies.reference.store import ReferenceStore, open_store
from rlhf.cli import main
from rlhf.modeling.models import new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.records.fingerprints import file_hash
from rlhf.records.jsonl import write_jsonl
from rlhf.run.rundir import RunDir
from rlhf.run.telemetry.job_clock import CLOCK
from tests.pipeline.loop import SHORT, write_prompts
from tests.servers.commands import run_group, run_process, start_process
from tests.servers.interrupted import kill_when


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight training and four test prompts."""
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def whole(prompts: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that one process has made; tests must not write into it."""
    out = tmp_path_factory.mktemp("whole") / "reference"
    assert main(arguments(prompts, tiny_model, out)) == 0
    return out


def arguments(prompts: Path, model: Path, out: Path, *more: str) -> list[str]:
    return [
        *("reference", "--prompts", str(prompts), "--model", str(model), "--out", str(out)),
        *("--prompts-per-shard", "1", "--samples", "2", *SHORT, *more),
    ]


def store_in(out: Path) -> ReferenceStore:
    assert RunDir(out).is_done
    return open_store(out / "outputs")


def assert_same_rows(one: Path, other: Path) -> None:
    first, second = store_in(one), store_in(other)
    assert len(first.rows) == 24
    assert len({(row.prompt.id, row.sample_index) for row in second.rows}) == 24
    assert list(first.rows) == list(second.rows)
    assert first.content_hash == second.content_hash


def test_jobs_fill_one_store_with_the_rows_of_one_job(
    prompts: Path, whole: Path, tiny_model: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "jobs"
    for job, stored in ((2, 4), (0, 8)):
        assert main(arguments(prompts, tiny_model, out, "--shard", f"{job}/3", "--json")) == 0
        assert f'{{"shards": {{"stored": {stored}, "of": 12}}}}' in capsys.readouterr().out
        assert RunDir(out).read_stage()["status"] == "running"
        assert not (out / "outputs" / "manifest.json").exists()
    clock = out / "heartbeat" / "job-2" / CLOCK
    clock.write_text(json.dumps({"status": "done", "device_seconds": 3600, "processes": 1}))
    priced = ("--price-per-hour", "2")
    assert main(arguments(prompts, tiny_model, out, "--shard", "1/3", *priced)) == 0
    assert_same_rows(whole, out)
    cost = RunDir(out).read_report()["cost"]
    assert 1 < cost["device_hours"] < 1.1  # an hour of the first job, and seconds of the others
    assert cost["price"] == pytest.approx(2 * cost["device_hours"], abs=1e-5)
    assert RunDir(out).read_stage()["device_seconds"] == 0  # the jobs' clocks have all
    assert store_in(out).manifest["prompts_hash"] == file_hash(prompts)
    before = (out / "outputs" / "manifest.json").stat().st_mtime_ns
    assert main(arguments(prompts, tiny_model, out, "--shard", "0/3")) == 0
    assert (out / "outputs" / "manifest.json").stat().st_mtime_ns == before


def test_jobs_that_begin_together_and_one_that_is_killed_lose_no_row(
    prompts: Path, whole: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "jobs"
    commands = [arguments(prompts, tiny_model, out, "--shard", f"{job}/2") for job in range(2)]
    other = start_process(*commands[0])
    kill_when(commands[1], out / "outputs" / "train-00001.parquet", lines=0)
    assert other.wait(timeout=600) == 0
    outputs = out / "outputs"
    kept = {path.name: path.stat().st_mtime_ns for path in outputs.glob("[!.]*.parquet")}
    assert 7 <= len(kept) < 12
    assert not (outputs / "manifest.json").exists()
    assert run_process(*commands[1]).returncode == 0
    assert_same_rows(whole, out)
    assert {name: (outputs / name).stat().st_mtime_ns for name in kept} == kept


def test_two_processes_store_the_rows_of_one(
    prompts: Path, whole: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "two"
    done = run_process(*arguments(prompts, tiny_model, out), processes=2)
    assert done.returncode == 0, done.stderr
    assert_same_rows(whole, out)
    assert RunDir(out).read_stage()["processes"] == 2


def test_jobs_with_other_settings_or_precision_do_not_mix(
    prompts: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "jobs"
    assert main(arguments(prompts, tiny_model, out, "--shard", "0/12")) == 0
    command = arguments(prompts, tiny_model, out, "--shard", "1/12")
    assert main([*command, "--temperature", "0.5"]) == 2
    error = capsys.readouterr().err
    assert "was started with other settings (sampling.temperature: 1.0 → 0.5)" in error
    done = run_process(*("bf16" if word == "fp32" else word for word in command))
    assert done.returncode == 2
    assert "was started with other settings (precision: fp32 → bf16)" in done.stderr


def test_a_precision_that_the_machine_chose_is_written_down(
    prompts: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "auto"
    command = arguments(prompts, tiny_model, out)
    done = run_process(*("auto" if word == "fp32" else word for word in command))
    assert done.returncode == 0, done.stderr
    precision = store_in(out).manifest["precision"]
    assert f"precision: {precision}\n" in RunDir(out).config_file.read_text()


@pytest.mark.parametrize("shard", ["4/4", "1", "-1/4", "a/b", "0/0"])
def test_a_part_that_is_none_is_refused(
    prompts: Path, tiny_model: Path, tmp_path: Path, capsys, shard: str
) -> None:
    assert main(arguments(prompts, tiny_model, tmp_path / "out", f"--shard={shard}")) == 2
    error = capsys.readouterr().err
    assert f"--shard is '{shard}'" in error
    assert "Give I/N with I from 0 to N - 1" in error
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_the_file_has_twice_counts_once(tiny_model: Path, tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl")
    file.write_text(file.read_text() * 2)
    assert main(arguments(file, tiny_model, tmp_path / "out")) == 0
    assert len(store_in(tmp_path / "out").rows) == 24


@pytest.mark.parametrize(
    "again", [{"prompt": "Another question?"}, {"prompt": "A question?", "split": "test"}]
)
def test_two_prompts_with_one_id_are_refused(
    tiny_model: Path, tmp_path: Path, capsys, again: dict
) -> None:
    """Files that were numbered from 0 each, one behind the other."""
    rows = [{"id": 0, "prompt": "A question?"}, {"id": 1, "prompt": "More?"}, {"id": 0, **again}]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    assert main(arguments(tmp_path / "prompts.jsonl", tiny_model, tmp_path / "out")) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "prompts.jsonl:3: the prompt '0' came before with another text or split" in error
    assert not (tmp_path / "out").exists()


def test_a_prompt_whose_id_is_null_has_the_id_of_its_words(
    tiny_model: Path, tmp_path: Path
) -> None:
    rows = [{"id": None, "prompt": "A question?"}, {"id": None, "prompt": "More?"}]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    assert main(arguments(tmp_path / "prompts.jsonl", tiny_model, tmp_path / "out")) == 0
    assert len({row.prompt.id for row in store_in(tmp_path / "out").rows}) == 2


def test_prompts_and_model_belong_together(tiny_model: Path, tmp_path: Path, capsys) -> None:
    for given in ([], ["--model", str(tiny_model)], ["--prompts", "p", "--reward", "r"]):
        assert main(["reference", "--out", str(tmp_path / "out"), *given]) == 2
        error = capsys.readouterr().err
        assert "rlhf reference needs --prompts and --model" in error
        assert "--reward R or --inspect" in error


def test_the_most_likely_tokens_are_those_of_the_plain_model(
    prompts: Path, whole: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "top"
    assert main(arguments(prompts, tiny_model, out, "--store-top-k", "5")) == 0
    store = store_in(out)
    assert list(store.rows) == list(store_in(whole).rows)
    assert store.manifest["stored_top_k"] == 5
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    for row in store.rows[:4]:
        assert row.top is not None
        with torch.no_grad():
            logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0]
        before_each = logits[len(row.prompt_ids) - 1 : -1].double()
        expected = before_each.log_softmax(-1).topk(5)
        np.testing.assert_array_equal(row.top.ids, expected.indices)
        np.testing.assert_allclose(row.top.log_probs, expected.values, atol=2e-5)
        np.testing.assert_allclose(row.top.log_sum_exp, before_each.logsumexp(-1), atol=2e-5)


def test_a_prompt_is_read_once_for_the_log_probs_of_all_its_responses(
    prompts: Path, whole: Path, tiny_model: Path, tmp_path: Path
) -> None:
    rows = list(store_in(whole).rows)
    read: list[torch.Size] = []

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            read.append(inputs[0].shape)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        assert main(arguments(prompts, tiny_model, tmp_path / "again")) == 0
    finally:
        hook.remove()
    assert list(store_in(tmp_path / "again").rows) == rows
    packed = sorted(shape[1] for shape in read if shape[0] == 1)
    by_prompt = [rows[place : place + 2] for place in range(0, len(rows), 2)]
    sizes = [
        len(pair[0].prompt_ids) + sum(len(row.response_ids) for row in pair) for pair in by_prompt
    ]
    assert all(size in packed for size in sizes)


def test_more_tokens_than_the_model_knows_are_refused(
    prompts: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(prompts, tiny_model, tmp_path / "out", "--store-top-k", "9999")
    assert main(command) == 2
    assert (
        f"--store-top-k is 9999, and the vocabulary of {tiny_model} has" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def require_alike(out: Path, expected: Path) -> None:
    """The same outputs, and numbers but for the order of sums."""
    found, wanted = (list(store_in(folder).rows) for folder in (out, expected))
    assert len(found) == 96
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.prompt.id, mine.response_ids) == (theirs.prompt.id, theirs.response_ids)
        assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
        assert mine.entropy == pytest.approx(theirs.entropy, abs=1e-5)
        assert mine.reward == pytest.approx(theirs.reward, abs=1e-4)


DIVIDED = """
import json
import sys
from pathlib import Path
from policies.reference import build as reference
from policies.reference.settings import ReferenceSettings
from rlhf.ranks import exit_process, rank
from rlhf.parallel.gathered_model import GatheredModel
from tests.settings import changed
given = json.loads(sys.argv[1])
paths = {name: Path(given.pop(name)) for name in ("prompts", "out")}
seen, fill = [], GatheredModel._fill

def watched(shell, model):
    seen.append(sorted({type(one).__name__ for one in model.parameters()}))
    fill(shell, model)

GatheredModel._fill = watched
settings = ReferenceSettings(**paths, model=given.pop("model"), reward=given.pop("reward"))
reference.build_reference(changed(settings, **given, sharding="fsdp"))
Path(sys.argv[2], str(rank())).write_text(json.dumps(seen))
exit_process(0)
"""


def test_processes_that_divide_the_models_store_what_one_does(
    prompts: Path, tiny_model: Path, tmp_path: Path
) -> None:
    judges = [str(tmp_path / name) for name in ("judge", "other")]
    for seed, judge in enumerate(judges):
        model = new_reward_model(str(tiny_model), 0, seed)
        save_model(model, load_tokenizer(str(tiny_model)), Path(judge))
    one, two = tmp_path / "one", tmp_path / "two"
    # files of 40, 24 and 32 rows, scored in 2, 1 and 1 batches: one process has more files than
    # the other, and more batches of its first
    given = {"samples": 8, "prompts_per_shard": 5, "max_new_tokens": 12, "precision": "fp32"}
    given |= {"prompts": str(prompts), "model": str(tiny_model), "reward": judges[0]}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    assert main(["reference", *flags, "--out", str(one)]) == 0
    program = tmp_path / "program.py"
    program.write_text(DIVIDED, encoding="utf-8")
    done = run_group(2, program, json.dumps({**given, "out": str(two)}), tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    require_alike(two, one)
    for rank in ("0", "1"):  # gathered once for each of two files, never for a token
        assert json.loads((tmp_path / rank).read_text()) == [["DTensor"]] * 2
    before = store_in(two).rows[0].reward
    again = ("--reward", judges[1], "--replace-reward", "--precision", "fp32")
    assert main(["reference", "--out", str(one), *again]) == 0
    divided = ("--sharding", "fsdp", "--offload")
    done = run_process("reference", "--out", two, *again, *divided, processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    require_alike(two, one)
    assert store_in(two).rows[0].reward != pytest.approx(before, abs=1e-2)


def test_what_cannot_be_divided_or_offloaded_is_refused(
    prompts: Path, tiny_model: Path, tmp_path: Path, capsys
) -> None:
    command = arguments(prompts, tiny_model, tmp_path / "out")
    assert main([*command, "--sharding", "fsdp"]) == 2
    assert "there is only one\n  Add --processes N" in capsys.readouterr().err
    assert main([*command, "--sharding", "zero1", "--offload"]) == 2
    assert (
        "optimizer state, which only training has\n  Use --sharding fsdp" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_machines_with_different_copies_of_the_model_are_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Each process has a working directory of its own, as on machines with local disks."""
    for rank in (0, 1):
        shutil.copytree(tiny_model, tmp_path / str(rank) / "model")
        (tmp_path / str(rank) / "prompts.jsonl").write_text('{"prompt": "w1 w2"}\n')
    weights = tmp_path / "1" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4000] + bytes(4000))
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from rlhf.cli import main\n"
        "os.chdir(Path(__file__).parent / os.environ['RANK'])\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    paths = ("--prompts", "prompts.jsonl", "--model", "model", "--out", "out")
    done = run_group(2, program, "reference", *paths, "--sharding", "fsdp")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "The processes differ: input model is " in done.stderr
    assert not (tmp_path / "0" / "out" / "outputs").exists()
