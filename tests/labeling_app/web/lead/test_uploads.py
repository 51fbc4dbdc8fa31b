"""Uploaded files: one for each person, theirs alone, and left as it is while it is imported."""

import pytest

from labeling_app.web.lead.uploads import Uploads, run_job
from rlhf.errors import InputError
from tests.labeling_app.conftest import run_async


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
        "error": "The file could not be read: reading it ended the program that reads it."
    }
    assert "KeyError" in capfd.readouterr().err
