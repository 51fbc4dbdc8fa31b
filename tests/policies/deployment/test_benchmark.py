"""`rlhf benchmark` on tiny models: its numbers against its own batches and an outside clock."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlamaForCausalLM

from policies.deployment.benchmark import prices
from policies.deployment.settings import BenchmarkSettings
from policies.deployment.timing import peak_memory
from rlhf.cli import main
from rlhf.errors import ConfigError
from rlhf.modeling.models import load_config
from rlhf.planning.price import cost_in_words
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.policies.training import TrainingInputs, build_ensemble
from tests.reward.encoders import build_encoder
from tests.servers.commands import REPOSITORY

SIZES = ("--batch-sizes", "4", "1", "--prompt-tokens", "9", "--answer-tokens", "3", "6")
SHORT = (*SIZES, "--repeats", "3", "--precision", "fp32")
MEGABYTES = 2**20


@pytest.fixture(scope="module")
def done(training: TrainingInputs, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A policy and an ensemble of two reward models; tests only read it."""
    folder = tmp_path_factory.mktemp("benchmark")
    ensemble = build_ensemble(training, folder / "ensemble")
    out = folder / "out"
    runs = (str(training.model), str(ensemble))
    assert main(["benchmark", *runs, *SHORT, "--price-per-hour", "1.8", "--out", str(out)]) == 0
    return RunDir(out)


def test_every_number_follows_from_the_batches(done: RunDir) -> None:
    """Percentiles in NumPy, speeds by division, of the seconds in metrics.jsonl."""
    rows, batches = done.read_report()["rows"], read_metrics(done.metrics_file)
    sizes = ("batch_size", "prompt_tokens", "answer_tokens")
    assert len(rows) == 2 * 2 * 2
    assert len(batches) == 3 * len(rows)
    for row in rows:
        mine = [
            one["seconds"]
            for one in batches
            if one["run"] == row["run"] and all(one[name] == row[name] for name in sizes)
        ]
        assert len(mine) == 3
        assert row["latency"]["p50"] == pytest.approx(np.quantile(mine, 0.5))
        assert row["latency"]["p99"] == pytest.approx(np.quantile(mine, 0.99))
        units = row["batch_size"] * (row["answer_tokens"] if row["kind"] == "policy" else 1)
        speed = row["tokens_per_second" if row["kind"] == "policy" else "scores_per_second"]
        assert speed == pytest.approx(units * 3 / sum(mine))
        assert row["peak_memory_bytes"] > 50 * MEGABYTES  # torch alone takes more
    answered = [row for row in rows if row["kind"] == "policy"]
    assert [[row[name] for name in sizes] for row in answered] == [
        [1, 9, 3], [4, 9, 3], [1, 9, 6], [4, 9, 6],
    ]  # fmt: skip
    assert all(row["first_token_seconds"] > 0 for row in answered)


def test_prices_by_hand() -> None:
    # 1.80 an hour are 0.0005 a second: a million tokens take 2,000 s, a thousand scores 10 s
    assert prices({"tokens_per_second": 500.0}, 1.8) == {
        "price_per_million_tokens": pytest.approx(1.0)
    }
    assert prices({"scores_per_second": 100.0}, 1.8) == {
        "price_per_thousand_scores": pytest.approx(0.005)
    }
    assert prices({"tokens_per_second": 500.0}, None) == {}


def test_the_page_has_the_table_and_no_script(done: RunDir) -> None:
    page, report = done.report_html.read_text(), done.read_report()
    assert "<script" not in page
    assert "data:image/svg+xml;base64," in page
    assert "random tokens of fixed lengths on cpu in float32, and" in page
    for row in report["rows"]:
        assert row["run"] in page
        price = row.get("price_per_million_tokens", row.get("price_per_thousand_scores"))
        assert f"<td>{price:,.4f}</td>" in page
    assert f"This measurement itself. {cost_in_words(report['cost'])}" in page
    assert "device-hours at 1.8 each: " in page
    ensemble = report["rows"][-1]["run"]
    assert report["models"][ensemble]["members"] == 2


def test_the_peak_is_that_of_the_block() -> None:
    # mapped by hand: a tensor's memory need not go back to the system when it is freed
    with peak_memory() as large, mmap.mmap(-1, 300 * MEGABYTES) as block:
        block.write(b"1" * len(block))
    with peak_memory() as small:
        pass
    if large.bytes is None:
        pytest.skip("this system does not reset the peak of a process")
    assert large.bytes - small.bytes > 250 * MEGABYTES


def test_what_was_freed_before_does_not_count() -> None:
    """3,000 blocks of 100 KB are too small to be mapped; the last one keeps the others' pages."""
    with peak_memory() as before:
        pass
    blocks = [bytearray(100_000) for _ in range(3_000)]
    last = blocks.pop()
    blocks.clear()
    with peak_memory() as after:
        pass
    if before.bytes is None or after.bytes is None or sys.platform != "linux":
        pytest.skip("this system does not reset the peak of a process")
    assert len(last) == 100_000
    assert after.bytes - before.bytes < 50 * MEGABYTES


def test_a_student_and_a_quantized_form_stand_beside_their_policy(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, student, int8, out = (
        str(one) for one in (training.model, *(tmp_path / name for name in ("half", "int8", "out")))
    )
    usual = ("--precision", "fp32", "--out")
    outputs = ("--outputs", str(training.reference), "--batch-size", "4")
    teach = ["distill", "--teacher", model, "--student", model, "--half", *outputs, *usual, student]
    assert main(teach) == 0
    prompts = str(training.reference.parent / "prompts.jsonl")
    assert main(["quantize", model, "--to", "int8", "--prompts", prompts, *usual, int8]) == 0
    capsys.readouterr()
    sizes = ("--batch-sizes", "2", "--prompt-tokens", "9", "--answer-tokens", "3", "--repeats", "1")
    assert main(["benchmark", model, student, int8, *sizes, *usual, out]) == 0
    report, said = RunDir(Path(out)).read_report(), capsys.readouterr().out
    assert [(row["run"], row["kind"]) for row in report["rows"]] == [
        (name, "policy") for name in (model, student, int8)
    ]
    assert [line.split()[0] for line in said.splitlines()[1:4]] == [model, student, int8]
    page = RunDir(Path(out)).report_html.read_text()
    assert all(page.count(f'<th scope="row">{name}</th>') == 2 for name in (model, student, int8))
    size = {name: described["bytes"] for name, described in report["models"].items()}
    assert size[int8] < 0.5 * size[model]
    assert size[student] < size[model]


def test_the_batch_that_is_not_counted_is_a_whole_one(
    training: TrainingInputs, tmp_path: Path
) -> None:
    """Before two first tokens and two answers of six tokens, which take a pass each."""
    read: list[int] = []

    def note(
        module: torch.nn.Module, _: object, named: dict[str, torch.Tensor], __: object
    ) -> None:
        if isinstance(module, LlamaForCausalLM):
            read.append(len(named["input_ids"]))

    sizes = ("--batch-sizes", "4", "--prompt-tokens", "9", "--answer-tokens", "6")
    more = ("--repeats", "2", "--precision", "fp32", "--price-per-hour", "7200")
    out = tmp_path / "out"
    with register_module_forward_hook(note, with_kwargs=True):
        assert main(["benchmark", str(training.model), *sizes, *more, "--out", str(out)]) == 0
    assert read == [4] * (6 + 2 * 1 + 2 * 6)
    cost = RunDir(out).read_report()["cost"]
    assert cost["price"] == pytest.approx(7200 * cost["device_hours"], rel=0.01)
    assert 0 < 3600 * cost["device_hours"] <= RunDir(out).read_stage()["device_seconds"] + 1e-3


def test_an_encoder_is_measured_too(tmp_path: Path, run_json) -> None:
    folder = build_encoder(tmp_path / "bert")
    sizes = ("--batch-sizes", "2", "--prompt-tokens", "9", "--answer-tokens", "3")
    out = tmp_path / "out"
    report = run_json(
        "benchmark", folder, *sizes, "--repeats", "1", "--precision", "fp32", "--out", out
    )
    assert [row["kind"] for row in report["rows"]] == ["reward model"]
    assert "price_per_thousand_scores" not in report["rows"][0]


def test_what_cannot_be_measured_is_refused(
    training: TrainingInputs, tmp_path: Path, refused
) -> None:
    out, model = tmp_path / "out", training.model
    context = load_config(str(model)).max_position_embeddings
    said = refused("benchmark", model, "--prompt-tokens", context, "--out", out)
    assert f"--prompt-tokens {context} and --answer-tokens 64 exceed the context of {model}" in said
    with pytest.raises(ConfigError, match="No model to measure"):  # `runs: []` in a file
        BenchmarkSettings(runs=(), out=out)
    assert "--batch-sizes is 0" in refused("benchmark", model, "--batch-sizes", "0", "--out", out)
    assert f"{tmp_path} already exists" in refused("benchmark", model, "--out", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_it_agrees_with_a_clock_outside_within_5_percent(
    training: TrainingInputs, tmp_path: Path
) -> None:
    """Another process sees by its own clock when each batch ends: the same work, no startup."""
    sizes = ("--batch-sizes", "32", "--prompt-tokens", "64", "--answer-tokens", "128")
    command = [
        *(sys.executable, "-m", "rlhf.cli", "benchmark", str(training.model), *sizes),
        *("--repeats", "9", "--precision", "fp32", "--out", str(tmp_path / "out")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    file = tmp_path / ".out.partial" / "metrics.jsonl"
    seen: list[float] = []
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment) as process:
        while process.poll() is None:
            ended = file.read_text().count("\n") if file.is_file() else 0
            seen += [time.monotonic()] * (ended - len(seen))
            time.sleep(0.002)
    assert process.returncode == 0
    batches = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert len(seen) == len(batches) == 9
    ours = sum(batch["seconds"] for batch in batches[1:])  # between the first end and the last
    outside = seen[-1] - seen[0]
    assert ours == pytest.approx(outside, rel=0.05)
    [row] = RunDir(tmp_path / "out").read_report()["rows"]
    every = sum(batch["seconds"] for batch in batches)
    assert row["tokens_per_second"] == pytest.approx(32 * 128 * 9 / every)
