"""What the page shows of a loop's log."""

from pathlib import Path

from labeling_app.web.runs.log_lines import MAX_BYTES, MAX_LINES, newest_lines

LOG = """\
Round 0: rlhf export --db a.db --out rankings
Exported 24 rankings (24 human) to rankings: 56 train and 16 test prompts.
Next: rlhf train-reward --rankings rankings --model MODEL --out runs/NAME/reward

Round 1: srun rlhf ppo --model m
To ask people, with DB the database of their board: rlhf evaluate --out e --to-db DB
Round 1 trains when there are 24 new rankings.
People rank with: rlhf label --db a.db
2 of 9 new rankings, 7 missing; 1 task open. Import more prompts (rlhf import, or the Data page), \
or train now: rlhf runs train out (or Train now on the Runs page).
Paused by lea. To go on: rlhf runs resume out  (or Resume on the Runs page)
error rlhf ppo of round 1 ended with exit code 2
  Repeat it by itself: rlhf ppo --model m
  Then type the command of the loop again.
"""


def test_hints_for_a_shell_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "loop.log"
    assert newest_lines(file) == []
    file.write_text(LOG, encoding="utf-8")
    assert newest_lines(file) == [
        "Round 0: rlhf export --db a.db --out rankings",
        "Exported 24 rankings (24 human) to rankings: 56 train and 16 test prompts.",
        "Round 1: srun rlhf ppo --model m",
        "Round 1 trains when there are 24 new rankings.",
        "2 of 9 new rankings, 7 missing; 1 task open.",
        "Paused by lea.",
        "error rlhf ppo of round 1 ended with exit code 2",
    ]
    assert file.read_text("utf-8") == LOG


def test_the_newest_lines_of_a_long_log(tmp_path: Path) -> None:
    file = tmp_path / "loop.log"
    file.write_text("".join(f"line {n}\n" for n in range(MAX_BYTES)), encoding="utf-8")
    lines = newest_lines(file)
    assert len(lines) == MAX_LINES
    assert lines[-1] == f"line {MAX_BYTES - 1}"
    file.write_text("x" * MAX_BYTES + "\nend\n", encoding="utf-8")  # the first line is cut
    assert newest_lines(file) == ["end"]
