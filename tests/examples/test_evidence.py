"""Every experiment runs at the smallest size; the pages have the numbers of its results."""

import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from tests.examples.small_experiments import (
    CHANGES,
    EVIDENCE,
    FOLDERS,
    PEOPLE,
    SMALL,
    load,
    write_chat,
    write_judgements,
    write_pairs,
    write_passages,
)
from tests.pipeline.loop import SIGNAL, run_loop, write_prompts
from tests.servers.commands import REPOSITORY

PAGES = "\n".join(page.read_text(encoding="utf-8") for page in sorted(EVIDENCE.glob("*.md")))
NAMES = sorted(FOLDERS)


def command_of(name: str) -> str:
    """What one types to run an experiment."""
    return f"python -m examples.evidence.{FOLDERS[name].name}.{name}"


def run(monkeypatch: pytest.MonkeyPatch, name: str, config: dict, folder: Path) -> dict:
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["--config", str(folder / "config.yaml"), "--out", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    module = load(monkeypatch, name)
    plot = getattr(module, "plot", None)
    load(monkeypatch, "experiment").run(name, module.measure, module.tabulate, plot)
    assert (folder / "out" / f"{name}.png").is_file() == (plot is not None)
    return json.loads((folder / "out" / "result.json").read_text())


WRITERS = {
    "people": write_pairs,
    "methods": write_pairs,
    "method_settings": write_pairs,
    "annotators": write_pairs,
    "priorities": write_pairs,
    "label_value": partial(write_pairs, size=32),
}


# trl asks transformers by the old name
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_an_experiment_runs_and_goes_on_where_it_was(
    name: str,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = {
        "model": str(tiny_model),
        "prompts": str(write_prompts(tmp_path / "prompts.jsonl")),
        "db": str(tmp_path / "labels.db"),
        "features": str(tmp_path / "features"),
        "data": str(WRITERS.get(name, write_judgements)(tmp_path / "data.jsonl.gz")),
    }
    config = {**SMALL, **base, "gold": SIGNAL, **CHANGES[name]}
    if name == "people":
        config["ptx"] |= {"texts": str(write_passages(tmp_path / "passages.jsonl.gz"))}
    if name == "methods":
        config["people"] = {**SMALL, **base, **PEOPLE}
    if name == "method_settings":
        config["of"] |= {"people": {**SMALL, **base, **PEOPLE}}
    if name == "student":
        config["runs"] = str(run_loop(tmp_path, tiny_model).folder)
    write_chat(tmp_path / "chat.jsonl.gz")
    for set_, part in config.get("sets", {}).items():
        config["sets"] = {**config["sets"], set_: {**part, "data": str(tmp_path / part["data"])}}
    first = run(monkeypatch, name, config, tmp_path)
    assert first["config"] == config
    again = run(monkeypatch, name, config, tmp_path)
    assert again.pop("wall_seconds") > first.pop("wall_seconds") > 0
    assert again == first
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, name, config | {"seed": 1}, tmp_path)
    assert "holds an experiment of another configuration" in capsys.readouterr().err


def test_an_experiment_without_its_data_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.jsonl.gz"
    config = {"seeds": [0], "sets": {"chat": {"data": str(missing)}}}
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "real_chat", config, tmp_path)
    remedy = "Give its path as `data` in a --config file."
    assert capsys.readouterr().err == f"No such data: {missing}\n  {remedy}\n"


@pytest.mark.slow
def test_the_configuration_for_one_gpu_goes_on_after_every_kill(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = yaml.safe_load(
        (FOLDERS["people"] / "one_gpu" / "people.yaml").read_text(encoding="utf-8")
    )
    config |= {"model": str(tiny_model), "data": str(write_pairs(tmp_path / "data.jsonl.gz"))}
    config |= {"pairs": 3, "test": 2, "validation": 1, "seeds": [0], "steps": [2]}
    config["reference"] |= {"max_new_tokens": 8}
    config["ppo"] |= {"steps": 3, "batch.episodes_per_step": 4}
    for part in ("reward", "score", "reference", "ppo", "evaluate"):
        config[part]["precision"] = "fp32"
    file, out = tmp_path / "config.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(config))
    module = "examples.evidence.human_labels.people"
    command = [sys.executable, "-m", module, "--config", file, "--out", out]
    kills = 0
    for begun in ("judge/metrics.jsonl", "ppo-0-3/metrics.jsonl", "evaluate-0-3/stage.json"):
        process = subprocess.Popen(command, cwd=REPOSITORY)
        while process.poll() is None and not (out / begun).is_file():
            time.sleep(0.05)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills == 3
    subprocess.run(command, cwd=REPOSITORY, check=True)
    result = json.loads((out / "result.json").read_text())
    assert [run["seed"] for run in result["runs"]] == [0]
    assert [run["steps"] for run in result["lengths"]] == [2, 3]


def test_every_experiment_has_its_configuration_and_its_place_on_a_page() -> None:
    assert set(NAMES) == set(CHANGES)
    for name in NAMES:
        assert command_of(name) in PAGES
        assert FOLDERS[name].joinpath(f"{name}.yaml").is_file()


def test_the_guide_to_ppo_has_the_coefficients_of_the_results() -> None:
    guide = EVIDENCE.parent / "guides" / "ppo.md"
    file = FOLDERS["kl_sources"] / "results" / "kl_sources.json"
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    for source in ("none", "reference 0.1", "reference 0.3", "reference 1", "reference 3"):
        of_source = [run for run in runs if run["source"] == source]
        nats = fmean(run["reverse"] / run["length"] for run in of_source)
        gain = fmean(run["gold"]["policy"] - run["gold"]["reference"] for run in of_source)
        title = "no KL term" if source == "none" else source.removeprefix("reference ")
        row = f"| {title} | {len(of_source)} | {nats:.3f} | {gain:.2f} |\n"
        assert row in guide.read_text(encoding="utf-8")


MINUTES = {  # as the page calls the experiments
    "People's labels": "people",
    "KL term": "kl_sources",
    "over-optimization": "overoptimization",
    "all pairs": "pairs",
    "shaping": "shaping",
    "one or several": "ensemble",
    "whom to trust": "annotators",
    "prioritize": "priorities",
    "the next label": "label_value",
    "real chat": "real_chat",
    "half the layers": "student",
    "which settings were tried": "method_settings",
    "PPO and its alternatives": "methods",
}


def test_the_page_has_the_minutes_of_the_results() -> None:
    rows = re.findall(r"^\| \*(.+?)\* \| (\d+)", PAGES, re.MULTILINE)
    assert {title for title, _ in rows} == MINUTES.keys()
    for title, minutes in rows:
        name = MINUTES[title]
        file = FOLDERS[name] / "results" / f"{name}.json"
        seconds = json.loads(file.read_text(encoding="utf-8"))["wall_seconds"]
        assert (title, int(minutes)) == (title, round(seconds / 60))
        assert seconds <= 3600


@pytest.mark.parametrize("name", NAMES)
def test_the_pages_have_the_numbers_of_the_results(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = FOLDERS[name] / "results" / f"{name}.json"
    if not place.is_file():
        section = PAGES.partition(command_of(name))[2].partition("\n## ")[0]
        assert "Not measured yet." in section or "**Measured in part" in section
        return
    result = json.loads(place.read_text())
    config = yaml.safe_load((FOLDERS[name] / f"{name}.yaml").read_text())
    experiment = load(monkeypatch, "experiment")
    monkeypatch.chdir(REPOSITORY)
    assert experiment.resolved(result["config"]) == experiment.resolved(config)
    module = load(monkeypatch, name)
    assert experiment.markdown(module.tabulate(result)) in PAGES
    if hasattr(module, "at_equal_kl"):
        assert experiment.markdown(module.at_equal_kl(result)) in PAGES


def is_met(run: dict) -> bool:
    """Whether a seed of *People's labels* meets every criterion that was set beforehand."""
    wins = [run["judge"], run["judge_at_equal_length"]]
    ends = run["eos_rate"]
    return (
        all(one["value"] >= 0.7 and one["low"] > 0.6 for one in wins)
        and run["nats_per_token"] <= 0.25
        and abs(ends["policy"] - ends["reference"]) <= 0.1
        and run["template"]["policy"]["share"] <= 0.05
        and run["retained"]["difference"]["value"] <= 0.05
    )


def test_the_pages_say_how_peoples_labels_did(monkeypatch: pytest.MonkeyPatch) -> None:
    result = json.loads((FOLDERS["people"] / "results" / "people.json").read_text())
    interval = load(monkeypatch, "experiment").interval
    page, first = (
        " ".join(folder.joinpath("README.md").read_text(encoding="utf-8").split())
        for folder in (EVIDENCE, REPOSITORY)
    )
    *some, last = (f"{100 * run['judge']['value']:.0f}" for run in result["runs"])
    wins = f"{', '.join(some)} and {last} % of comparisons"
    assert f"the policy wins {wins}" in page
    assert f"in {wins}" in first
    accuracy, bare = (result["accuracy"]["reward"][name] for name in ("accuracy", "bare"))
    assert f"**{interval(accuracy)} of {accuracy['pairs']} held-out judgments**" in page
    assert f"it agrees with {interval(bare)}" in page
    moved = [run["nats_per_token"] for run in result["runs"]]
    assert f"{min(moved):.2f}–{max(moved):.2f} nats per token" in page
    _, later, last = result["lengths"]
    own = [f"{100 * one['reward']['value']:.0f}" for one in (later, last)]
    assert (
        f"The first seed wins {interval(later['judge'])} after {later['steps']} steps and "
        f"{interval(last['judge'])} after {last['steps']}, by its own reward model "
        f"{' and '.join(own)} %"
    ) in page
    shares = [100 * one["template"]["policy"]["share"] for one in (last, later)]
    assert f"{shares[0]:.1f} % of the responses have the same four words" in page
    assert f"which {shares[1]:.1f} % have after {later['steps']}" in page
    praise = "All three seeds meet every criterion set beforehand"
    assert (praise in page) == all(map(is_met, result["runs"]))
    for sample in result["samples"]:
        begun, before, after = (
            " ".join(sample[part].removeprefix("Continue: ").replace("|", "\\|").split())
            for part in ("beginning", "original", "policy")
        )
        assert f"| {begun} | {before} | {after} |" in page


OTHER_TURNS = ["I went to the beach.", "I walked to the store."]
STORED = {"kl.coefficient": 0.1, "kl.rows_per_prompt": 0.25}  # no source: it is the default
EARLIER = {"people_stored": (2.0, 8), "people_first": (1.0, 2), "people_ends": (2.0, 2)}


@pytest.mark.parametrize("name", EARLIER)
def test_earlier_runs_with_peoples_labels_differ_by_what_their_page_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = json.loads((FOLDERS["people"] / "results" / f"{name}.json").read_text())
    config = yaml.safe_load((FOLDERS["people"] / "people.yaml").read_text())
    was = result["config"]
    penalty, samples = EARLIER[name]
    has_other_turns = [start for start, _ in was["turns"]] == OTHER_TURNS
    assert has_other_turns != (was["turns"] == config["turns"])
    assert has_other_turns == (name != "people_stored")
    assert was["reference"] == {**config["reference"], "samples": samples}
    settings = {key: value for key, value in config["ppo"].items() if not key.startswith("kl.")}
    assert was["ppo"] == {**settings, **STORED, "rewards.missing_eos_penalty": penalty}
    other = ("turns", "reference", "ppo", "steps", "ptx", "seeds")
    same = [key for key in config if key not in other]
    assert {key: was[key] for key in same} == {key: config[key] for key in same}
    table = load(monkeypatch, "experiment").markdown(load(monkeypatch, "people").tabulate(result))
    assert table in PAGES


def test_the_run_with_another_question_is_on_the_page_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = json.loads((FOLDERS["people"] / "results" / "people_told.json").read_text())
    config = yaml.safe_load((FOLDERS["people"] / "people.yaml").read_text())
    was = result["config"]
    assert (was["question"], was["turns"]) == ("Tell me what happened. Begin with: {}", [])
    settings = {key: value for key, value in config["ppo"].items() if not key.startswith("kl.")}
    assert was["ppo"] == {**settings, **STORED, "steps": 16, "rewards.missing_eos_penalty": 1.0}
    assert was["reference"] == {**config["reference"], "samples": 2}
    other = ("question", "turns", "reference", "ppo", "steps", "seeds")
    assert {key: was[key] for key in config if key not in other} == {
        key: config[key] for key in config if key not in other
    }
    table = load(monkeypatch, "experiment").markdown(load(monkeypatch, "people").tabulate(result))
    assert table in PAGES
    template = result["runs"][0]["template"]["policy"]
    share = f'{100 * template["share"]:.0f} % share one 4-gram ("{template["words"]}")'
    page = " ".join(PAGES.split())
    assert share in page
    for sample in result["samples"]:
        asked = sample["beginning"].removeprefix("Tell me what happened. Begin with: ")
        cells = (asked, sample["original"], sample["policy"])
        assert (
            f"| {' | '.join(' '.join(c.replace('|', chr(92) + '|').split()) for c in cells)} |"
            in page
        )
