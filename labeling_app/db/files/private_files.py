"""Database files hold password hashes and the cookie key, so only their owner may read them."""

import os
import stat
from contextlib import suppress
from pathlib import Path

OTHERS = stat.S_IRWXG | stat.S_IRWXO
JOURNALS = ("-wal", "-shm", "-journal")


def make_private(path: Path) -> None:
    """Create a database file as 0600, or take from one that exists what group and others may do.

    SQLite gives the files it keeps beside a database the permissions of the database; those left
    by an earlier run are changed here. Files of another user are left alone.

    Raises:
        OSError: the file cannot be created.
    """
    if not path.exists():
        path.touch(mode=0o600)
    path = path.resolve()  # journal files are beside the file itself, not beside a link to it
    for file in (path, *(path.with_name(path.name + ending) for ending in JOURNALS)):
        with suppress(FileNotFoundError):  # a journal comes and goes
            status = file.stat()
            if status.st_mode & OTHERS and status.st_uid == os.geteuid():
                file.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS)
