"""Content hashes, by which a stage detects changed inputs."""

import hashlib
from pathlib import Path

SAMPLES = 16  # of a large file
SAMPLE_BYTES = 4096

_State = tuple[tuple[str, int, int, int, int], ...]  # of a folder's files

_digests: dict[tuple[Path, tuple[str, ...]], tuple[_State, str]] = {}


def file_hash(path: Path) -> str:
    """SHA-256 of a file, as 16 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def folder_hash(folder: Path, patterns: tuple[str, ...] = ("*",)) -> str:
    """SHA-256 over names and contents of a folder's files that match, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for file in _files(folder, patterns):
        digest.update(f"{file.name}:{file_hash(file)};".encode())
    return digest.hexdigest()[:16]


def known_folder_hash(folder: Path, patterns: tuple[str, ...]) -> str:
    """`folder_hash`, computed again only where files were changed since this process knows it."""
    known = _digests.get((folder.absolute(), patterns))
    if known is None or known[0] != _state(folder, patterns):
        take_folder_hash(folder, patterns, folder_hash(folder, patterns))
    return _digests[folder.absolute(), patterns][1]


def take_folder_hash(folder: Path, patterns: tuple[str, ...], digest: str) -> None:
    """Know the hash of a folder that another process has computed."""
    _digests[folder.absolute(), patterns] = (_state(folder, patterns), digest)


def sampled_hash(path: Path, patterns: tuple[str, ...] = ("*",)) -> str:
    """A hash over names, sizes and a few kilobytes of a file, or of a folder's files that match.

    It tells copies of different data from each other without reading them whole. Changes of a few
    bytes may go unnoticed.
    """
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else _files(path, patterns):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        last = max(0, size - SAMPLE_BYTES)
        with file.open("rb") as stream:
            for start in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                stream.seek(start)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def text_hash(text: str) -> str:
    """SHA-256 of a text, as 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _state(folder: Path, patterns: tuple[str, ...]) -> _State:
    """What changes whenever a program writes one of the files."""
    files = [(str(file), file.stat()) for file in _files(folder, patterns)]
    return tuple((n, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for n, s in files)
