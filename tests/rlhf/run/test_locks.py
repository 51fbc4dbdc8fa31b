"""One process works in a folder, and others can see that it does."""

import fcntl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.errors import InputError
from rlhf.run.locks import LOCK_FILE, PROBE_SECONDS, is_locked, lock, locked
from rlhf.run.locks import holder as holder_of

HOLDER = """
import sys
from pathlib import Path
from rlhf.run.locks import lock

lock(Path(sys.argv[1]), "add --resume")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Another process that works in the folder."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def test_a_folder_is_locked_until_its_process_is_gone(
    tmp_path: Path, holder: "subprocess.Popen[bytes]"
) -> None:
    assert is_locked(tmp_path)
    assert holder_of(tmp_path) == holder.pid
    with pytest.raises(InputError) as caught:
        lock(tmp_path, "type the same again")
    assert str(caught.value).startswith(f"Process {holder.pid} on ")
    assert str(caught.value).endswith(
        f"is working in {tmp_path}\n"
        "  Wait for it, or stop it and type the same again; or choose another --out."
    )
    holder.kill()
    holder.wait()
    assert not is_locked(tmp_path)
    assert holder_of(tmp_path) is None


def test_somebody_who_only_looks_keeps_nobody_out(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)  # and creates nothing
    assert not list(tmp_path.iterdir())
    with (tmp_path / LOCK_FILE).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as `is_locked` does, for a much shorter time
        threading.Timer(PROBE_SECONDS / 4, file.close).start()
        with locked(tmp_path, "add --resume"):
            assert is_locked(tmp_path)
            (tmp_path / LOCK_FILE).write_text("Process 1 on another-machine")
            assert holder_of(tmp_path) is None
