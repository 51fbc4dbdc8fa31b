"""Content hashes, by which a stage detects changed inputs."""

import hashlib
from pathlib import Path


def file_hash(path: Path) -> str:
    """SHA-256 of a file, as 16 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def folder_hash(folder: Path, patterns: tuple[str, ...] = ("*",)) -> str:
    """SHA-256 over names and contents of a folder's files that match, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    for file in sorted(files):
        digest.update(f"{file.name}:{file_hash(file)};".encode())
    return digest.hexdigest()[:16]


def text_hash(text: str) -> str:
    """SHA-256 of a text, as 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
