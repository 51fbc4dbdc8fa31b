"""Requests on disk that another process may delete while they are read."""

from pathlib import Path

import pytest

from rlhf.errors import InputError
from rlhf.run.loops import pausing
from rlhf.run.loops.pausing import end_pause, read_pause, request_pause
from rlhf.run.rundir import RunDir


def test_a_pause_is_read_until_it_ends(tmp_path: Path) -> None:
    assert read_pause(tmp_path) is None
    pause = request_pause(tmp_path, "lea", stops_stage=True)
    assert read_pause(tmp_path) == pause
    assert end_pause(tmp_path)
    assert read_pause(tmp_path) is None
    assert not end_pause(tmp_path)


def test_a_pause_that_ends_while_it_is_read_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_pause(tmp_path, "lea")
    read = pausing.read_document

    def resume_and_read(*arguments: object) -> object:
        end_pause(tmp_path)
        return read(*arguments)

    monkeypatch.setattr(pausing, "read_document", resume_and_read)
    assert read_pause(tmp_path) is None


def test_a_broken_request_is_named(tmp_path: Path) -> None:
    RunDir(tmp_path).pause_file.write_text("{")
    with pytest.raises(InputError, match=r"pause\.json"):
        read_pause(tmp_path)
