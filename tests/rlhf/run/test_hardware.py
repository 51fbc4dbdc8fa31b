"""stage.json names the driver, NCCL and the image of the container, where there are any."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf.parallel.settings import ClusterSettings
from rlhf.run import provenance
from rlhf.run.rundir import open_stage

DRIVER = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (root@host)
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""
IMAGE = "registry.example/rlhf@sha256:" + "4e" * 32
PROGRAM = """
import sys
from pathlib import Path
from rlhf.parallel.settings import ClusterSettings
from rlhf.run.rundir import open_stage
open_stage(Path(sys.argv[1]), "reward", ClusterSettings(), {}, resume=False)
"""


def test_the_image_is_what_whoever_starts_the_container_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_IMAGE", IMAGE)
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "run")], check=True)
    hardware = json.loads((tmp_path / "run" / "stage.json").read_text())["hardware"]
    assert hardware["image"] == IMAGE


def test_the_driver_and_nccl_are_in_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine with a GPU has them: the file of the kernel module, and torch's build."""
    file = tmp_path / "version"
    file.write_text(DRIVER)
    monkeypatch.setattr(provenance, "NVIDIA", file)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    run = open_stage(tmp_path / "run", "reward", ClusterSettings(), {}, resume=False)
    hardware = run.read_stage()["hardware"]
    assert (hardware["driver"], hardware["nccl"]) == ("570.124.06", "2.27.5")
    assert hardware["cuda"] == "12.8"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_they_are_what_the_tools_say(tmp_path: Path) -> None:
    run = open_stage(tmp_path / "run", "reward", ClusterSettings(), {}, resume=False)
    hardware = run.read_stage()["hardware"]
    major, minor, patch = torch.cuda.nccl.version()
    assert hardware["nccl"] == f"{major}.{minor}.{patch}"
    assert hardware["gpus"] == [
        torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())
    ]
    if (tool := shutil.which("nvidia-smi")) is None:
        assert re.fullmatch(r"\d+\.\d+(\.\d+)?", hardware["driver"])
        return
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    assert hardware["driver"] == said.splitlines()[0].strip()
