"""Asking people from the browser starts a process, one at a time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from labeling_app.web.runs.loop_process import LoopProcess
from labeling_app.web.runs.routes import answer
from rlhf.commands.loop.opened import read_loop_file
from tests.pipeline.loop import write_prompts
from tests.rlhf.run.loops.folders import make_loop

BUSY = (
    "The server is already putting pairs on the board or counting votes. "
    "Wait a minute, then press the button again."
)


def test_impatient_leads_start_one_process(tmp_path: Path) -> None:
    prompts, file = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "loop.yaml"
    file.write_text(f"out: {tmp_path / 'out'}\nmodel: m\nprompts: {prompts}\n", encoding="utf-8")
    process = LoopProcess(read_loop_file(file)[1])
    make_loop(process.file.out, "m")

    def press(op: str) -> str:
        return str(answer(process, "lea", {"op": op, "round": 0})["error"])

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(press, ("ask", "votes", "ask", "votes")))
    assert said.count(BUSY) == 3
    for op in ("ask", "votes"):  # the next one is done again
        assert press(op).startswith("Round 0 of ")
