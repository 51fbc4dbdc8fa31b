import hashlib
import os
from pathlib import Path

import numpy as np

from rlhf.records.fingerprints import (
    file_hash,
    folder_hash,
    known_folder_hash,
    sampled_hash,
    take_folder_hash,
    text_hash,
)


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


def test_a_known_folder_is_hashed_again_only_where_it_changed(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    patterns = ("*.bin",)
    take_folder_hash(tmp_path, patterns, "told")
    assert known_folder_hash(tmp_path, patterns) == "told"
    assert known_folder_hash(tmp_path, ("*",)) == folder_hash(tmp_path)  # other files
    before = (tmp_path / "a.bin").stat()
    (tmp_path / "new").write_bytes(b"xyz")  # as long
    (tmp_path / "new").rename(tmp_path / "a.bin")
    os.utime(tmp_path / "a.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert known_folder_hash(tmp_path, patterns) == folder_hash(tmp_path, patterns) != "told"


def test_a_sampled_hash_tells_data_of_one_size_apart_and_reads_little(tmp_path: Path) -> None:
    patterns, size = ("*.safetensors",), 2**20
    one, other = (np.random.default_rng(seed).bytes(size) for seed in (0, 1))
    for name, content in (("one", one), ("same", one), ("other", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    hashes = [sampled_hash(tmp_path / name, patterns) for name in ("one", "same", "other")]
    assert hashes[0] == hashes[1] != hashes[2]
    (tmp_path / "one" / "log").write_bytes(b"x")
    assert sampled_hash(tmp_path / "one", patterns) == hashes[0]
    # 16 places of 4096 bytes, one every 69632: the last ends where the file does
    file = tmp_path / "one" / "model.safetensors"
    for place, is_read in ((4095, True), (4096, False), (69631, False), (69632, True), (-1, True)):
        changed = bytearray(one)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert (sampled_hash(file) != sampled_hash(tmp_path / "same" / file.name)) == is_read
