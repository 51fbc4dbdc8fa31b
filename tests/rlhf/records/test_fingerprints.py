import hashlib
from pathlib import Path

from rlhf.records.fingerprints import file_hash, folder_hash, text_hash


def test_hashes_are_the_head_of_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_hash(tmp_path / "a") == text_hash("abc") == "ba7816bf8f01cfea"  # FIPS 180's example


def test_a_folder_hash_covers_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    (tmp_path / "b.txt").write_bytes(b"abc")
    both = "a.bin:ba7816bf8f01cfea;b.txt:ba7816bf8f01cfea;"
    assert folder_hash(tmp_path) == hashlib.sha256(both.encode()).hexdigest()[:16]
    only = hashlib.sha256(b"a.bin:ba7816bf8f01cfea;").hexdigest()[:16]
    assert folder_hash(tmp_path, ("*.bin",)) == only
    assert folder_hash(tmp_path, ("*.bin", "a*")) == only  # a file that matches twice counts once
    (tmp_path / "deep").mkdir()
    assert folder_hash(tmp_path, ("*.bin", "d*")) == only
