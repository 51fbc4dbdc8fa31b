"""The database, its journal files and its backups are readable by their owner only."""

import os
import stat

import pytest

from labeling_app.db.files.backup import back_up
from labeling_app.db.store import Store


@pytest.fixture(autouse=True)
def _usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder):
    """The permissions of every file in a folder."""
    return {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.iterdir()}


def test_a_new_database_is_private(tmp_path):
    with Store(tmp_path / "labels.db") as store:
        store.add_rubric("be kind")
        found = modes(tmp_path)
    assert found == dict.fromkeys(["labels.db", "labels.db-wal", "labels.db-shm"], "0o600")


def test_a_readable_database_becomes_private_with_the_files_beside_it(tmp_path):
    folder = tmp_path / "real"
    folder.mkdir()
    with Store(folder / "labels.db") as store:
        store.add_rubric("be kind")
        for path in folder.iterdir():
            path.chmod(0o664)
        (tmp_path / "link.db").symlink_to(folder / "labels.db")
        with Store(tmp_path / "link.db"):
            found = modes(folder)
    assert found == dict.fromkeys(["labels.db", "labels.db-wal", "labels.db-shm"], "0o600")


def test_a_backup_is_private_while_it_is_written_and_after(tmp_path, store):
    back_up(store.connections.path, tmp_path / "out" / "copy.db")
    assert modes(tmp_path / "out") == {"copy.db": "0o600"}


def test_a_read_only_database_stays_read_only(tmp_path):
    with Store(tmp_path / "labels.db"):
        """Made."""
    (tmp_path / "labels.db").chmod(0o444)
    with Store(tmp_path / "labels.db") as store:
        assert store.counts()["prompts"] == 0
    assert modes(tmp_path)["labels.db"] == "0o400"
