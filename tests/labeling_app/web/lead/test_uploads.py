"""Uploaded files: one for each person, theirs alone, and left as it is while it is imported."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from labeling_app.web.lead.uploads import Uploads, run_job
from rlhf.errors import InputError
from tests.labeling_app.conftest import fill_up, run_async

SERVER = """
import time
from labeling_app.web.lead.uploads import Uploads
uploads = Uploads(1000)
print(uploads.begin("lea", "secret.jsonl", 3).path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def uploads() -> Uploads:
    return Uploads(1000)


def test_an_upload_is_its_owners_alone(uploads):
    one = uploads.begin("lea", "a.jsonl", 3)
    for use in (
        lambda: uploads.find("bob", one.id),
        lambda: uploads.append("bob", one.id, 0, b"xyz"),
        lambda: uploads.require_complete("bob", one.id),
    ):
        with pytest.raises(InputError, match="That upload is not here any longer"):
            use()
    assert uploads.last("bob") is None
    uploads.append("lea", one.id, 0, b"xyz")
    assert uploads.require_complete("lea", one.id).path.read_bytes() == b"xyz"


def test_a_new_upload_takes_the_place_of_the_owners_last_one(uploads):
    first, others = uploads.begin("lea", "a.jsonl", 3), uploads.begin("bob", "b.jsonl", 3)
    second = uploads.begin("lea", "c.jsonl", 3)
    assert set(uploads.folder.iterdir()) == {second.path, others.path}
    with pytest.raises(InputError, match="not here any longer"):
        uploads.append("lea", first.id, 0, b"xyz")


def test_an_upload_stays_while_it_is_imported(uploads):
    one = uploads.begin("lea", "a.jsonl", 3)
    uploads.append("lea", one.id, 0, b"xyz")
    one.is_importing = True
    with pytest.raises(InputError, match=r"a\.jsonl is being imported"):
        uploads.begin("lea", "b.jsonl", 3)
    with pytest.raises(InputError, match="do not fit together"):
        uploads.append("lea", one.id, 3, b"")
    assert one.path.read_bytes() == b"xyz"


def test_files_go_with_the_server():
    uploads = Uploads(1000)
    folder = uploads.folder
    uploads.begin("lea", "a.jsonl", 3)
    del uploads
    assert not folder.exists()


def test_a_job_that_ends_without_an_outcome_is_in_the_log(capfd):
    assert run_async(run_job({"do": "nothing that is known"})) == {
        "error": "This failed: the program that does it has ended. The server's log says why."
    }
    assert "KeyError" in capfd.readouterr().err


def test_what_a_killed_server_left_goes_with_the_next_start_and_nothing_else(tmp_path):
    command = [sys.executable, "-c", SERVER]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other,
    ):
        left, in_use = (Path(one.stdout.readline().strip()) for one in (killed, other))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.is_file()  # private data
        foreign = left.parent.with_name(f"{left.parent.name}-link")
        foreign.symlink_to(tmp_path)
        try:
            uploads = Uploads(1000)
            assert not left.parent.exists()
            assert in_use.is_file()
            assert uploads.folder.is_dir()
            assert foreign.is_symlink()
        finally:
            foreign.unlink()
            other.terminate()


def test_a_full_disk_is_named_by_what_did_not_fit(small_disk, store, import_lines):
    import_lines({"prompt": "Which?", "responses": ["good", "bad"], "tiers": [[0], [1]]})
    db = str(store.connections.path)
    fill_up(small_disk)
    job = {"db": db, "folder": str(small_disk / "export"), "format": "ranked"}
    assert run_async(run_job({"do": "archive", **job})) == {
        "error": "The export could not be written: the disk is full. Fix that, then try again."
    }
    missing = {"do": "archive", **job, "folder": "/dev/null/export"}
    assert run_async(run_job(missing))["error"].startswith("The export could not be written: ")
    made = run_async(run_job({"do": "backup", "db": db, "out": str(small_disk / "backup.db")}))
    assert "disk is full" in made["error"]


def test_an_import_whose_progress_cannot_be_written_is_whole(store, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "Which?", "responses": ["good", "bad"], "tiers": [[0], [1]]}')
    job = {
        "do": "store",
        "path": str(file),
        "name": "in.jsonl",
        "db": str(store.connections.path),
        "share": str(tmp_path / "gone" / "share"),
        **dict.fromkeys(("replace", "leave_out"), False),
        **{"split": "train", "source": "in", "annotator": "", "kind": None},
    }
    outcome = run_async(run_job(job))
    assert outcome["new_rankings"] == 1, outcome
    assert store.counts()["rankings"] == 1
    job["share"] = str(tmp_path / "share")
    assert run_async(run_job(job))["new_rankings"] == 0
    assert (tmp_path / "share").read_text() == "1.000"
