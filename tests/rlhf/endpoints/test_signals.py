import sys
from pathlib import Path

import pytest

from rlhf.endpoints.signals import load_signal
from rlhf.errors import GuardError, InputError

FAILING = """from rlhf.errors import GuardError

def mean_length(prompt, response):
    words = response.split()
    return sum(map(len, words)) / len(words)

def stop(prompt, response):
    raise GuardError("Enough", "Rest.")

def large(prompt, response):
    return bytearray(10**18)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a module of signals; import state is put back afterwards."""
    text = "LIMIT = 3\n\ndef words(prompt, response):\n    return float(len(response.split()))\n"
    (tmp_path / "my_signals.py").write_text(text, encoding="utf-8")
    (tmp_path / "typing_error.py").write_text("def words(:\n", encoding="utf-8")
    (tmp_path / "failing_signals.py").write_text(FAILING, encoding="utf-8")
    (tmp_path / "broken_signals.py").write_text("import no_such_package\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_a_function_of_the_current_folder_is_found(here: Path) -> None:
    assert load_signal("my_signals:words")("a prompt", "one two three") == 3.0
    load_signal("my_signals:words")
    assert sys.path.count(str(here)) == 1


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("my_signals", "'my_signals' does not name a function"),
        ("my_signals:", "'my_signals:' does not name a function"),
        (":words", "':words' does not name a function"),
        ("my_signals:length", "my_signals has no function length"),
        ("my_signals:LIMIT", "my_signals has no function LIMIT"),
        ("their_signals:words", "Cannot import their_signals (No module named 'their_signals')"),
        (
            "broken_signals:words",
            "Cannot import broken_signals (No module named 'no_such_package')",
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_names_that_lead_nowhere(name: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        load_signal(name)
    assert caught.value.problem == problem
    assert caught.value.remedy


def test_an_error_of_the_function_is_reported_with_its_place_and_text(here: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_signal("failing_signals:mean_length")("Why?", " ")
    assert caught.value.problem == (
        "failing_signals:mean_length failed for the response ' ' to 'Why?': ZeroDivisionError: "
        f"division by zero ({here / 'failing_signals.py'}, line 5)"
    )
    with pytest.raises(GuardError, match="Enough"):  # which has a message already
        load_signal("failing_signals:stop")("Why?", " ")
    with pytest.raises(MemoryError):  # which the command diagnoses
        load_signal("failing_signals:large")("Why?", " ")


def test_an_error_in_the_module_is_reported(here: Path) -> None:
    with pytest.raises(InputError, match=r"typing_error cannot be imported: SyntaxError: .*line 1"):
        load_signal("typing_error:words")
    (here / "late.py").write_text("LIMIT = 1 / 0\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"ZeroDivisionError: .*late\.py, line 1\)"):
        load_signal("late:words")
