import json
import sqlite3
import sys
from pathlib import Path

import pytest

from rlhf import cli
from rlhf.errors import InputError
from rlhf.parallel import doctor
from rlhf.parallel.doctor import Finding


def test_this_machine_is_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_IMAGE", "registry/rlhf@sha256:abc")
    words = ["--path", str(tmp_path), "--min-memory", "0", "--min-disk", "0"]
    assert cli.main(["doctor", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["SQLite"] == sqlite3.sqlite_version
    assert found["torch"].startswith("2.")
    assert found["precision"] in ("bf16", "fp32")
    assert found["image"] == "registry/rlhf@sha256:abc"
    assert {"device", "free memory", "free disk", "transformers", "gradio"} <= set(found)


def test_too_little_room_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--path", str(tmp_path), "--min-memory", "0", "--min-disk", "1e9"]
    assert cli.main(["doctor", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error This machine is not ready: free disk is ")
    assert "1e+09 GiB of disk are required: Free some, or give another --path." in shown


@pytest.mark.parametrize(
    ("running", "remedy"),
    [((3, 11, 0), ""), ((3, 13, 2), ""), ((3, 10, 9), "Install Python >=3.11.")],
)
def test_python(running: tuple[int, ...], remedy: str) -> None:
    assert doctor.python(running, ">=3.11").remedy == remedy


def test_packages_against_their_ranges() -> None:
    wanted = ["numpy>=1", "numpy<1", "no-such-package>=2", "gguf; extra == 'demo'"]
    assert [(one.what, one.remedy) for one in doctor.packages(wanted)] == [
        ("numpy", ""),
        ("numpy", "pip install 'numpy<1'"),
        ("no-such-package", "pip install 'no-such-package>=2'"),
    ]
    assert doctor.packages(["no-such-package>=2"])[0].value == "missing"


def test_sqlite() -> None:
    assert doctor.sqlite((3, 40, 1)) == Finding("SQLite", "3.40.1")
    assert doctor.sqlite((3, 34, 0)).remedy == (
        "Use a Python that is built with SQLite 3.35.0 or newer."
    )


def test_a_gpu_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.device().value.startswith("CPU (")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n", encoding="utf-8")
    tool.chmod(0o755)
    assert doctor.device().value == "a GPU that torch cannot use"
    assert "pip install" in doctor.device().remedy


def test_free_memory_is_what_the_system_says() -> None:
    assert 0.05 < doctor.free_memory_gib() < 100_000


def test_all_faults_are_reported_at_once() -> None:
    findings = [Finding("a", "1"), Finding("b", "2", "Do x."), Finding("c", "3", "Do y.")]
    with pytest.raises(InputError) as caught:
        doctor.require_healthy(findings)
    assert str(caught.value) == ("This machine is not ready: b is 2; c is 3\n  Do x.\n  Do y.")
    doctor.require_healthy(findings[:1])
