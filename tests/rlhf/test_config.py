import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml

from policies.ppo.setting_groups import PtxSettings
from policies.ppo.settings import PPOSettings
from rlhf.config import (
    load_settings,
    missing_inputs,
    part_of,
    read_text,
    require_range,
    to_plain,
    to_yaml,
)
from rlhf.config.paths import (
    read_setting,
    setting_names,
    with_changes,
    with_new_flags,
    with_new_names,
)
from rlhf.errors import ConfigError, InputError


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 3e-6


@dataclass(frozen=True, kw_only=True)
class Outer:
    out: Path
    files: tuple[Path, ...] = ()
    note: str | None = None
    inner: Inner = field(default_factory=Inner)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_inputs_that_are_not_there_yet(tmp_path: Path) -> None:
    there = tmp_path / "reference"
    there.mkdir()
    settings = PPOSettings(
        model="m",
        reward=("r",),
        reference=there,
        out=tmp_path / "out",
        ptx=PtxSettings(data=tmp_path / "no.jsonl"),
    )
    assert missing_inputs(settings) == [f"--ptx.data {tmp_path / 'no.jsonl'}"]
    files = (there, tmp_path / "none")
    assert missing_inputs(Outer(out=there, files=files)) == [f"--files {tmp_path / 'none'}"]


def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "steps: 1\nseed: 7\nkl:\n  source: none\n  coefficient: 1\n")
    second = write(tmp_path / "b.yaml", "steps: 2\nkl:\n  coefficient: 3\n")
    assert load_settings([first, second]) == {
        "steps": 2,
        "seed": 7,
        "kl": {"source": "none", "coefficient": 3},
    }
    assert load_settings([second, first])["steps"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "holds a list, not settings\n  Write one `name: value` a line"),
        ("steps: [1\n", "is not valid YAML: .*line 2.*\n  Fix the file"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings([write(tmp_path / "a.yaml", text)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"No such settings file: {tmp_path}/none.yaml"):
        load_settings([tmp_path / "none.yaml"])


def test_settings_become_plain_values_and_yaml() -> None:
    settings = Outer(out=Path("runs/a"), files=(Path("b"), Path("c")))
    plain = {"out": "runs/a", "files": ["b", "c"], "note": None, "inner": {"rate": 3e-6}}
    assert to_plain(settings) == plain
    assert list(yaml.safe_load(to_yaml(settings))) == list(plain)
    assert yaml.safe_load(to_yaml(settings)) == plain


@pytest.mark.parametrize(
    ("value", "low", "high", "above_low"),
    [
        (1, 1, 5, False),
        (5, 1, 5, False),
        (0.1, 0, 1, True),
        (1e9, 0, float("inf"), False),
        (None, 1, 5, False),
    ],
)
def test_a_number_in_range_passes(value: float, low: float, high: float, above_low: bool) -> None:
    require_range("n", value, low, high, above_low=above_low)


@pytest.mark.parametrize(
    ("value", "low", "high", "above_low", "message"),
    [
        (0, 1, float("inf"), False, "--batch-size is 0\n  Give a value of at least 1."),
        (6, 1, 5, False, "--batch-size is 6\n  Give a value of at least 1 and at most 5."),
        (0, 0, 1, True, "--batch-size is 0\n  Give a value of more than 0 and at most 1."),
        (float("nan"), 0, 1, False, "--batch-size is nan\n  Give a value of at least 0"),
    ],
)
def test_a_number_out_of_range_is_refused(
    value: float, low: float, high: float, above_low: bool, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        require_range("batch_size", value, low, high, above_low=above_low)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("part", "number"),
    [("50", 50), ("500", 250), ("1%", 3), ("0.1%", 1), ("50%", 125), ("100%", 250)],
)
def test_a_part_is_a_count_or_a_percentage_rounded_up(part: str, number: int) -> None:
    assert part_of("limit", part, 250) == number


@pytest.mark.parametrize("part", ["0", "-1", "0%", "101%", "nan%", "all", "2.5", ""])
def test_what_is_no_part_is_refused(part: str) -> None:
    with pytest.raises(ConfigError, match=f"--some-limit is '{part}'\n  Give a number such as"):
        part_of("some_limit", part, 250)


def test_text_from_a_file_that_a_flag_names(tmp_path: Path) -> None:
    (tmp_path / "good.md").write_text("Be kind. ✓", encoding="utf-8")
    assert read_text(tmp_path / "good.md", "--rubric") == "Be kind. ✓"
    assert read_text(None, "--rubric") == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("latin.md", "it is not UTF-8 text"),
        ("none.md", "No such file or directory"),
        ("folder", "Is a directory"),
    ],
)
def test_text_that_cannot_be_read(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "latin.md").write_bytes("é".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError) as caught:
        read_text(tmp_path / name, "--rubric")
    assert caught.value.problem == f"--rubric {tmp_path / name} cannot be read: {reason}"


@dataclass(frozen=True, kw_only=True)
class Renamed:
    OLD_NAMES: ClassVar = {"rate": "inner.rate", "inner.speed": "inner.rate", "inner": "kind"}
    OLD_VALUES: ClassVar = {"kind": {"fast": "quick"}}
    ZERO_IS_NONE: ClassVar = frozenset({"every", "loud"})
    kind: Literal["quick", "slow"] = "slow"
    loud: bool = False
    every: float | None = None
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rate": 1.0}, {"inner": {"rate": 1.0}}),
        ({"inner": {"speed": 2.0}}, {"inner": {"rate": 2.0}}),
        ({"rate": 1.0, "inner": {"rate": 2.0}}, {"inner": {"rate": 2.0}}),
        ({"inner": "fast"}, {"kind": "quick"}),
        ({"kind": "fast"}, {"kind": "quick"}),
        ({"kind": "slow", "other": 3}, {"kind": "slow", "other": 3}),
        ({"every": 0}, {"every": None}),
        ({"every": 0.0, "loud": False}, {"every": None, "loud": False}),
        ({"every": 0.5, "other": 0}, {"every": 0.5, "other": 0}),
    ],
)
def test_old_names_and_values_in_files_become_todays(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = json.dumps(given)
    assert with_new_names(given, Renamed) == expected
    assert json.dumps(given) == before


def test_a_later_file_wins_by_its_old_name_too(tmp_path: Path) -> None:
    new = write(tmp_path / "new.yaml", "inner:\n  rate: 1\n")
    old = write(tmp_path / "old.yaml", "rate: 2\n")
    assert load_settings([new, old], Renamed) == {"inner": {"rate": 2}}
    assert load_settings([old, new], Renamed) == {"inner": {"rate": 1}}


def test_old_flags_and_values_become_todays() -> None:
    words = [
        "cmd",
        "--rate",
        "1",
        "--rate=2",
        "--inner",
        "fast",
        "--kind=fast",
        "--no-loud",
        "fast",
        "--empty-rate",
        *("--every", "0", "--every=0.0", "--every", "10", "0"),
    ]
    assert with_new_flags(words, Renamed) == [
        *("cmd", "--inner.rate", "1", "--inner.rate=2", "--kind", "quick", "--kind=quick"),
        *("--no-loud", "fast", "--inner.empty-rate"),
        *("--every", "none", "--every=none", "--every", "10", "0"),
    ]


def test_settings_are_read_and_changed_by_path() -> None:
    assert list(setting_names(Renamed)) == ["kind", "loud", "every", "inner.rate"]
    changed = with_changes(Renamed(), {"inner.rate": 0.5, "kind": "quick"})
    assert (read_setting(changed, "inner.rate"), changed.kind) == (0.5, "quick")
