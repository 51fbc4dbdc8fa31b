"""Files that leads upload: in pieces, into a private temporary folder, one for each person.

The server gives a body 30 s and the board 1 MB, so a file comes in pieces that are smaller. It is
removed when its person uploads another one or has imported it, and when the server ends. A server
that is killed leaves its folder; the next one that starts on this machine removes it.
"""

import fcntl
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import finalize

import anyio

from labeling_app.data_io import jobs
from labeling_app.data_io.reading import TABLES, refuse_spreadsheet
from rlhf.errors import InputError

MAX_PIECE_BYTES = 1_000_000
MAX_NAME = 200
MAX_LOGGED = 10_000
PREFIX = "rlhf-lead-files-"  # an earlier name had no lock
SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz", *TABLES, ".parquet")
Payload = dict[str, Any]


@dataclass
class Upload:
    """A file that somebody uploads, and what has become of it."""

    id: str
    name: str
    path: Path
    size: int
    received: int = 0
    is_importing: bool = False
    outcome: Payload = field(default_factory=dict)

    @property
    def share_file(self) -> Path:
        """Where its import writes how much of it is read."""
        return self.path.with_name(f"{self.id}.share")

    @property
    def share(self) -> float:
        """How much of it its import has read, from 0 to 1."""
        try:
            return float(self.share_file.read_text())
        except OSError:  # nothing yet
            return 0.0

    def remove(self) -> None:
        """Remove its files."""
        self.path.unlink(missing_ok=True)
        self.share_file.unlink(missing_ok=True)


class Uploads:
    """The uploaded files of one server.

    Args:
        max_bytes: the largest file.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        _remove_abandoned()
        self.folder, lock = _new_folder()
        finalize(self, _remove, self.folder, lock)
        self._of: dict[str, Upload] = {}

    def begin(self, owner: str, name: str, size: int) -> Upload:
        """Begin an upload in place of the owner's last one.

        Raises:
            InputError: a file of another kind, an empty or too large one, or the last one is being
            imported.
        """
        refuse_spreadsheet(name)
        suffix = next((end for end in SUFFIXES if name.lower().endswith(end)), None)
        if suffix is None or len(name) > MAX_NAME:
            raise InputError(
                f"{name[:MAX_NAME]!r} is not a file that can be imported",
                f"Its name must end in {', '.join(SUFFIXES)}.",
            )
        if not 0 < size <= self.max_bytes:
            raise InputError(
                f"{name} has {size:,} bytes",
                f"Upload 1 to {self.max_bytes:,} bytes. Import larger files on the server: "
                "rlhf import FILE --db DB",
            )
        self.forget(owner)
        id_ = secrets.token_hex(16)
        upload = Upload(id=id_, name=name, path=self.folder / f"{id_}{suffix}", size=size)
        upload.path.touch(mode=0o600)
        self._of[owner] = upload
        return upload

    def find(self, owner: str, upload_id: object) -> Upload:
        """The owner's upload of this id.

        Raises:
            InputError: there is none.
        """
        upload = self._of.get(owner)
        if upload is None or upload.id != upload_id:
            raise InputError("That upload is not here any longer", "Choose the file again.")
        return upload

    def append(self, owner: str, upload_id: str, offset: int, piece: bytes) -> Upload:
        """Add the piece of a file that begins at `offset`; one that is there already is skipped.

        Raises:
            InputError: no such upload, or a piece that does not follow.
            OSError: it could not be written; sending it again may succeed.
        """
        upload = self.find(owner, upload_id)
        if offset + len(piece) == upload.received and piece:
            return upload
        if offset != upload.received or offset + len(piece) > upload.size or upload.is_importing:
            raise InputError("The pieces of the file do not fit together", "Choose it again.")
        with upload.path.open("r+b") as file:
            file.seek(offset)  # a disk that was full may have taken a part of this piece
            file.write(piece)
        upload.received += len(piece)
        return upload

    def require_complete(self, owner: str, upload_id: object) -> Upload:
        """The owner's upload, once all of it is there.

        Raises:
            InputError: it is not.
        """
        upload = self.find(owner, upload_id)
        if upload.received != upload.size or not upload.path.exists():
            raise InputError(f"{upload.name} has not arrived completely", "Choose it again.")
        return upload

    def last(self, owner: str) -> Upload | None:
        """The owner's last upload."""
        return self._of.get(owner)

    def forget(self, owner: str) -> None:
        """Remove the owner's last upload.

        Raises:
            InputError: it is being imported.
        """
        upload = self._of.get(owner)
        if upload is None:
            return
        if upload.is_importing:
            raise InputError(f"{upload.name} is being imported", "Wait until that has ended.")
        upload.remove()
        del self._of[owner]

    def new_folder(self) -> Path:
        """A path that nobody uses, for an export."""
        return self.folder / f"export-{secrets.token_hex(8)}"


def _new_folder() -> tuple[Path, int]:
    """A private folder, and its lock, which the system releases when this process ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # 0700
        with suppress(FileNotFoundError):  # another server took it for abandoned just now
            lock = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks: nobody takes it for abandoned
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_abandoned() -> None:
    """Remove the folders of this user's servers that have ended without doing it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is locked, or gone by now
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                lock = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


async def run_job(job: Payload) -> Payload:
    """Do a job of `data_io/jobs.py` in a process of its own. Returns its outcome, or `error`.

    If it ends without an outcome, what it has said goes to the log of the server.
    """
    command = [sys.executable, "-m", jobs.__name__]
    done = await anyio.run_process(command, input=json.dumps(job).encode(), check=False)
    try:
        outcome: Payload = json.loads(done.stdout)
    except ValueError:
        sys.stderr.write(done.stderr.decode(errors="replace")[-MAX_LOGGED:])
        problem = jobs.FAILED.get(job["do"], "This failed")
        return {
            "error": f"{problem}: the program that does it has ended. The server's log says why."
        }
    return outcome
