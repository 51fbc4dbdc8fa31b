"""A checkpoint is data: what somebody has put into its files is refused, and never runs."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from rlhf.errors import InputError
from rlhf.run.checkpoint import load_checkpoint, save_checkpoint
from tests.rlhf.run.saving.loop import Loop
from tests.servers.commands import REPOSITORY


class Forged:
    """Unpickled, it touches a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


class Attribute:
    """Unpickled, it is an attribute of something."""

    def __init__(self, owner: type, name: str) -> None:
        self.place = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.place


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a checkpoint in `checkpoints`."""
    loop = Loop()
    loop.steps(2)
    return save_checkpoint(loop.accelerator, tmp_path / "checkpoints", 2, {}, keep=1)


def refusal(saved: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_checkpoint(Loop().accelerator, saved.parent)
    assert caught.value.remedy == (
        f"Put the name of another checkpoint into {saved.parent / 'latest'}, or delete "
        f"{saved.parent} to start again."
    )
    return caught.value.problem


def test_metadata_that_name_a_function_are_refused(saved: Path, tmp_path: Path) -> None:
    metadata = FileSystemReader(saved / "state").read_metadata()
    metadata.planner_data = Forged(tmp_path / "ran")
    (saved / "state" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert refusal(saved) == (
        f"Cannot read {saved} (it names pathlib.Path.touch, which no checkpoint contains)"
    )
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_a_python_that_names_members_of_enums_is_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.11.0 to 3.11.3 pickle them, Debian 12's for one."""
    metadata = FileSystemReader(saved / "state").read_metadata()
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING,
        "__reduce_ex__",
        lambda member, protocol: (getattr, (type(member), member.name)),
    )
    content = pickle.dumps(metadata)
    assert b"getattr" in content
    (saved / "state" / ".metadata").write_bytes(content)
    assert load_checkpoint(Loop().accelerator, saved.parent) is not None


@pytest.mark.parametrize(
    ("owner", "name"), [(_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__")]
)
def test_no_other_attribute_is_read(saved: Path, owner: type, name: str) -> None:
    metadata = FileSystemReader(saved / "state").read_metadata()
    metadata.planner_data = Attribute(owner, name)
    (saved / "state" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert refusal(saved).startswith(f"Cannot read {saved} (")


def test_a_value_that_names_a_function_is_refused(saved: Path, tmp_path: Path) -> None:
    """What is no tensor, a learning rate for instance, is pickled among the weights."""
    reader = FileSystemReader(saved / "state")
    metadata = reader.read_metadata()
    places = metadata.storage_data.items()
    [place] = [where for name, where in places if name.fqn.endswith(".lr")]
    file = tmp_path / "forged"
    torch.save(Forged(tmp_path / "ran"), file)
    data = saved / "state" / place.relative_path
    place.offset, place.length = data.stat().st_size, file.stat().st_size
    data.write_bytes(data.read_bytes() + file.read_bytes())
    (saved / "state" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert refusal(saved).startswith(f"Cannot read {saved} (")
    assert not (tmp_path / "ran").exists()


def test_random_states_that_name_a_function_are_refused(saved: Path, tmp_path: Path) -> None:
    torch.save({"python": Forged(tmp_path / "ran")}, saved / "rng-0.pt")
    assert refusal(saved).startswith(f"Cannot read {saved} (")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["/dev/zero", "../../elsewhere", "a/b"])
def test_a_file_outside_the_checkpoint_is_not_read(saved: Path, place: str) -> None:
    metadata = FileSystemReader(saved / "state").read_metadata()
    for one in metadata.storage_data.values():
        one.relative_path = place
    (saved / "state" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert refusal(saved) == f"Cannot read {saved} (it names the file {place} outside itself)"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state/.metadata", b""),
        ("state/.metadata", pickle.dumps({"a": 1})),
        ("state/.metadata", pickle.dumps(7)),
        ("state/.metadata", b"\x80\x04garbage"),
        ("state/__0_0.distcp", b""),
        ("state/__0_0.distcp", b"\xff" * 5000),
        ("rng-0.pt", b""),
        ("rng-0.pt", b"no such thing"),
        ("progress.json", b""),
        ("progress.json", b"\xff\xfe"),
        ("progress.json", b"[1]"),
        ("progress.json", b"{}"),
        ("progress.json", b"{" * 10_000),
        ("progress.json", b'{"step": "three", "written_by": {"processes": 1, "format": "torch"}}'),
        ("progress.json", b'{"step": 3, "written_by": 7}'),
        ("progress.json", b'{"step": 3, "written_by": {"processes": 1}}'),
    ],
)
def test_broken_files_are_refused(saved: Path, name: str, content: bytes) -> None:
    (saved / name).write_bytes(content)
    assert str(saved) in refusal(saved)


@pytest.mark.parametrize("name", ["state", "rng-0.pt", "state/.metadata", "state/__0_0.distcp"])
def test_a_lost_file_is_named(saved: Path, name: str) -> None:
    (saved / name).rename(saved.parent / "elsewhere")
    assert refusal(saved).startswith(f"Cannot read {saved} (")


def test_states_of_no_generator_are_refused(saved: Path) -> None:
    for states in ({}, {"python": 1}, {"python": (3, (1,), None)}, []):
        torch.save(states, saved / "rng-0.pt")
        assert refusal(saved).startswith(f"Cannot read {saved} (")


def test_the_state_of_another_model_is_refused(saved: Path) -> None:
    loop = Loop()
    loop.accelerator._models[0] = torch.nn.Linear(5, 1)
    loop.accelerator._optimizers = []
    with pytest.raises(InputError, match=r"Cannot read .*weight"):
        load_checkpoint(loop.accelerator, saved.parent)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "", "step-1\x00", "step-000002 "])
def test_latest_names_a_checkpoint_beside_it(saved: Path, name: str) -> None:
    (saved.parent / "latest").write_text(name)
    if name.strip() == saved.name:
        assert load_checkpoint(Loop().accelerator, saved.parent) == {"step": 2}
        return
    with pytest.raises(InputError, match="latest does not name a checkpoint") as caught:
        load_checkpoint(Loop().accelerator, saved.parent)
    assert str(saved.parent / "latest") in str(caught.value)


def test_a_word_that_is_no_text_is_no_name(saved: Path) -> None:
    (saved.parent / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="latest does not name a checkpoint"):
        load_checkpoint(Loop().accelerator, saved.parent)


def test_progress_is_what_the_loop_gave(saved: Path) -> None:
    progress = json.loads((saved / "progress.json").read_text())
    assert load_checkpoint(Loop().accelerator, saved.parent) == {"step": progress["step"]}


ZERO = """
import os, sys
from pathlib import Path
import torch
from rlhf.run.checkpoint import load_checkpoint, save_checkpoint
from rlhf.parallel.distributed import start
from rlhf.errors import InputError
from rlhf.parallel.sharding import Sharding, prepare

class Forged:
    def __reduce__(self):
        return Path.touch, (folder / "ran",)

folder = Path(sys.argv[1])
accelerator = start("fp32", 0)
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = prepare(accelerator, model, optimizer, Sharding(sys.argv[2]))
saved = save_checkpoint(accelerator, folder, 1, {}, 1)
assert load_checkpoint(accelerator, folder) == {"step": 1}
for file in saved.glob("state/*.pt"):
    torch.save({**torch.load(file, weights_only=False), "more": Forged()}, file)
try:
    load_checkpoint(accelerator, folder)
except InputError as error:
    print(error.problem)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_files_of_deepspeed_are_data_too(tmp_path: Path, strategy: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    ours = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONPATH": str(REPOSITORY)}
    ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, "-c", ZERO, str(tmp_path), strategy],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **ours},
    )
    assert "(it holds something other than tensors and numbers)" in done.stdout
    assert not (tmp_path / "ran").exists()
