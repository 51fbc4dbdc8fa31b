"""Every command of the README, run as it stands there, on the tiny model."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.pipeline.loop import SIGNAL, write_prompts
from tests.servers.commands import REPOSITORY, RLHF, run_program

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.strip()]
PROGRAMS = {
    "rlhf": [sys.executable, *RLHF],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def environment_of(folder: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def start(line: str, folder: Path) -> "subprocess.Popen[str]":
    program, *arguments = shlex.split(line)
    return subprocess.Popen(
        [*PROGRAMS[program], *arguments],
        cwd=folder,
        env=environment_of(folder),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(line: str, folder: Path) -> None:
    program, *arguments = shlex.split(line)
    if program == "rlhf" and "--processes" not in arguments:
        words = (*RLHF, *arguments)
        done = run_program(*words, environment=environment_of(folder), folder=folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return
    with start(line, folder) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, f"{line}\n{output}"


def visit_and_stop(line: str, folder: Path) -> None:
    with start(line, folder) as process:
        for _ in range(300):
            try:
                with urllib.request.urlopen("http://127.0.0.1:7860", timeout=5) as page:
                    assert page.status == 200
                    break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.2)
        else:
            pytest.fail("the board did not answer within a minute")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_the_loop_on_your_own_model(tmp_path: Path, tiny_model: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    shutil.copytree(tiny_model, tmp_path / "models" / "SmolLM2-135M-Instruct")
    for line in LINES:
        if line.startswith("rlhf label"):
            visit_and_stop(line, tmp_path)
            # a signal does what the person at the board would do
            run(f"rlhf annotate --db labels.db --annotator signal:{SIGNAL}", tmp_path)
        elif not line.startswith("make "):
            run(line, tmp_path)
    assert (tmp_path / "runs" / "first" / "evaluate" / "report.html").is_file()
    assert (tmp_path / "runs" / "first" / "many" / "policy" / "config.json").is_file()


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    done = subprocess.run(
        [*shlex.split(line), "--dry-run"], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
