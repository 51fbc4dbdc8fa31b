"""Installed, not cloned: the wheel holds all that the commands read, and needs no checkout."""

import ast
import json
import re
import shutil
import sys
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from urllib.parse import urlencode

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from labeling_app.db.store import Store
from rlhf import __version__
from rlhf.cli import COMMANDS
from rlhf.records.jsonl import write_jsonl
from tests.examples.deploy.conftest import PACKAGES, Installed
from tests.examples.deploy.serving import running
from tests.servers.chat import ChatServer
from tests.servers.commands import REPOSITORY, free_port

MODEL = "models/SmolLM2-135M-Instruct"  # of the examples
FOR_READERS = ("README.md", ".png")
LINKED = re.compile(r'(?:src|href)="(?:\.?/)?((?:assets|static|live|lead/files)/[^"?]+)')
LEAD_PAGES = ("data", "people", "quality", "rubric", "runs")
PAGES = ("/", "/live", "/password", *(f"/lead/{page}" for page in LEAD_PAGES))
PASSWORD = "long enough"
HELP = """
import sys
from rlhf.cli import COMMANDS, main
codes = {main([*command.split(), "--help"]) for command in ("", *COMMANDS)}
places = {module.__file__ for name, module in sys.modules.items() if name.startswith("rlhf")}
print("CODES", codes, "FROM", *{str(place).partition("/rlhf/")[0] for place in places})
"""
STAGE = """
from rlhf.cli import main
for command in (
    ["import", "ranked.jsonl", "--db", "labels.db"],
    ["export", "--db", "labels.db", "--out", "rankings"],
    ["train-reward", "--rankings", "rankings", "--model", "MODEL", "--out", "runs/first/reward",
     "--precision", "fp32"],
):
    assert main(command) == 0, command
""".replace("MODEL", MODEL)
LOOP = """
import shlex
from importlib import import_module
from rlhf.cli import COMMANDS, main
model, short = ["--model", "MODEL"], ["--max-new-tokens", "8", "--precision", "fp32"]
signal, fast = "vowels:count", ["--precision", "fp32"]
judge = ["--reward", "runs/first/reward", "--reference", "runs/first/reference"]
for command in (
    ["generate", "--db", "labels.db", *model, "-k", "2", *short],
    ["annotate", "--db", "labels.db", "--annotator", f"signal:{signal}"],
    ["reference", "--prompts", "rankings", *model, "--reward", "runs/first/reward",
     "--samples", "2", "--out", "runs/first/reference", *short],
    ["ppo", *model, *judge, "--out", "runs/first/ppo", "--steps", "1",
     "--episodes-per-step", "4", *fast],
    ["evaluate", "--policy", "runs/first/ppo", *judge, "--samples", "1", "--gold", signal,
     "--out", "runs/first/evaluate", *fast],
    ["status", "runs/first"],
    ["score", "--rankings", "rankings", "--reward", "runs/first/reward",
     "--out", "runs/first/agreement", *fast],
    ["prioritize", "--db", "labels.db", "--reward", "runs/first/reward", *fast],
    ["round", "--db", "labels.db", "--policy", "runs/first/ppo", *judge,
     "--pick", "2", "-k", "2", *fast],
    ["sft", "--best-of", "runs/first/reference", *model, "--out", "runs/first/sft", *fast],
    ["dpo", "--rankings", "rankings", *model, "--out", "runs/first/dpo", *fast],
    ["reference", "--prompts", "rankings", "--model", "runs/first/ppo/policy", "--samples", "1",
     "--out", "runs/first/teacher-outputs", *short],
    ["distill", "--teacher", "runs/first/ppo", "--student", "MODEL", "--half",
     "--outputs", "runs/first/teacher-outputs", "--out", "runs/first/distill", *short],
    ["quantize", "runs/first/ppo", "--to", "int8", "--prompts", "rankings", "--num-prompts", "4",
     "--samples", "1", "--max-loss", "100", "--max-log-prob-change", "10",
     "--reward", "runs/first/reward", "--out", "runs/first/int8", *short],
    ["benchmark", "runs/first/ppo", "runs/first/reward", "--out", "runs/first/benchmark",
     "--batch-sizes", "1", "--prompt-tokens", "8", "--answer-tokens", "4", "--repeats", "1", *fast],
    ["backup", "--db", "labels.db", "--out", "backups/monday.db"],
    ["users", "add", "ann", "--db", "backups/monday.db"],
    ["trace", "RANKING", "--db", "labels.db"],
    ["plan", *model, "--gpus", "8", "--gpu-memory", "24"],
    ["loop", "--config", "loop.yaml"],
    ["runs", "promote", "runs/loop"],
    ["runs", "history", "runs/loop"],
    ["doctor"],
):
    assert main(command) == 0, command
for name, module in COMMANDS.items():
    example = import_module(f"rlhf.commands.{module}").EXAMPLE
    words = shlex.split(example.replace(chr(92), " "))[1:]
    assert main([*words, "--dry-run"]) == 0, words
    print("CHECKED", name)
""".replace("MODEL", MODEL)
ROUND = {
    "out": "runs/loop",
    "model": MODEL,
    "prompts": ["prompts.jsonl"],
    "annotator": "signal:vowels:count",
    "rounds": 1,
    "stages": {
        "generate": {"k": 2, "max_new_tokens": 8, "precision": "fp32"},
        "train-reward": {"precision": "fp32"},
        "reference": {"samples": 2, "max_new_tokens": 8, "precision": "fp32"},
        "ppo": {"steps": 1, "batch": {"episodes_per_step": 4}, "precision": "fp32"},
        "evaluate": {"samples": 1, "precision": "fp32"},
    },
}


def files_of(package: str) -> Iterator[Path]:
    for path in (REPOSITORY / package).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(REPOSITORY)


def imports_of(path: Path, *, at_once: bool = False) -> Iterator[str]:
    """The first names of all modules that a file imports: wherever in it, or when it is loaded."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    for node in module.body if at_once else ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def declared(*, with_extras: bool = True) -> set[str]:
    """What a user installs: the dependencies and the extras but dev, and what these require."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"] if with_extras else {}
    lines = [
        *project["dependencies"],
        *(one for name in extras if name != "dev" for one in extras[name]),
    ]
    names = {canonicalize_name(Requirement(line).name) for line in lines}
    for name in list(names):
        try:
            needed = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:  # an extra that is not installed here
            continue
        names |= {canonicalize_name(one.name) for one in needed if not one.marker}
    return names


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(path) for package in PACKAGES for path in files_of(package)}
    missing = {path for path in wanted - inside if not path.endswith(FOR_READERS)}
    assert not missing, "add them to [tool.setuptools.package-data] in pyproject.toml"
    assert not [path for path in inside if path.startswith(("tests/", "examples/"))]


def strangers(known: set[str], *, at_once: bool) -> set[tuple[str, str]]:
    """Files of the packages, and modules that they import from none of the known packages."""
    owners = packages_distributions()
    found = set()
    for path in (path for package in PACKAGES for path in files_of(package)):
        if path.suffix != ".py":
            continue
        for name in imports_of(REPOSITORY / path, at_once=at_once):
            packages = {canonicalize_name(one) for one in owners.get(name, [name])}
            if name not in (*PACKAGES, *sys.stdlib_module_names) and not packages & known:
                found.add((str(path), name))
    return found


def test_the_packages_import_only_what_is_installed_with_them() -> None:
    by_vllm = {("policies/sampling/vllm_engine.py", "vllm")}  # only where it is there
    assert strangers(declared(), at_once=False) == by_vllm
    by_deepspeed = {("rlhf/parallel/zero.py", "deepspeed")}  # only with --sharding zero1 to zero3
    assert strangers(declared(with_extras=False), at_once=True) == by_deepspeed


def test_the_server_that_serve_starts_is_installed_without_extras() -> None:
    found = [Requirement(line) for line in requires("transformers") or ()]
    needed = {
        canonicalize_name(one.name) for one in found if 'extra == "serving"' in str(one.marker)
    }
    assert "openai" in needed
    assert not needed - declared(with_extras=False)


def test_every_command_explains_itself(installed: Installed) -> None:
    assert installed.run("rlhf", "--version").strip() == __version__
    shown = installed.run("python", "-c", HELP)
    codes, place = re.findall(r"^CODES (.+) FROM (.+)$", shown, re.MULTILINE)[0]
    assert codes == "{0}"
    assert Path(place).is_relative_to(installed.bin.parent)


@pytest.fixture(scope="session")
def work(installed: Installed, tiny_model: Path) -> Path:
    """A folder in which the installed commands have trained a reward model."""
    folder = installed.folder
    shutil.copytree(tiny_model, folder / MODEL)
    words = ["house", "dog", "train", "garden", "meeting", "music", "hotel", "trip"]
    asked = [(f"Tell me about the {word}.", "train") for word in words]
    asked += [(f"How was the {word}?", "test") for word in words[:4]]
    answers = {"responses": ["It was lovely.", "It was awful."], "tiers": [[0], [1]]}
    rows = [{"prompt": prompt, "split": split, **answers} for prompt, split in asked]
    write_jsonl(folder / "ranked.jsonl", rows)
    asked_alone = ({"prompt": prompt, "split": split} for prompt, split in asked)
    write_jsonl(folder / "prompts.jsonl", asked_alone)
    (folder / "loop.yaml").write_text(json.dumps(ROUND))
    installed.run("python", "-c", STAGE)
    return folder


def test_a_stage_runs_and_its_report_has_its_page(work: Path) -> None:
    require_page(work / "runs" / "first" / "reward")


def require_page(stage: Path) -> None:
    page = (stage / "report.html").read_text(encoding="utf-8")
    assert page.rstrip().endswith("</html>")
    assert "{{" not in page


@pytest.mark.slow
def test_the_whole_loop_runs_and_so_does_every_example(installed: Installed, work: Path) -> None:
    folder = work
    for name in ("vowels.py", "examples/rounds/loop.yaml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(REPOSITORY / "examples" / "rounds" / "loop.yaml", folder / "examples" / "rounds")
    (folder / "vowels.py").write_text(
        "def count(prompt, response):\n    return float(sum(one in 'aeiou' for one in response))\n"
    )
    with Store(folder / "labels.db", read_only=True) as store:
        ranking = next(iter(store.ranked_prompts())).rankings[0].id
    shown = installed.run("python", "-c", LOOP.replace("RANKING", ranking))
    assert re.findall(r"^CHECKED (.+)$", shown, re.MULTILINE) == list(COMMANDS)
    require_page(folder / "runs" / "first" / "evaluate")
    report = json.loads((folder / "runs" / "first" / "evaluate" / "report.json").read_text("utf-8"))
    assert report["win_rate"]["gold"]["n"] == 4
    for command, page in (
        (["serve", "--policy", "runs/loop", "--db", "served.db"], "health"),
        (["serve", "--reward", "runs/first/reward"], "health"),
        (["chat", "--policy", "runs/loop", "--reference", MODEL], "live"),
    ):
        port = free_port()
        started = ["rlhf", *command, "--port", str(port)]
        url = f"http://127.0.0.1:{port}/{page}"
        with running(started, url, installed.environment, folder):
            pass


def test_the_board_serves_its_pages_and_all_that_they_load(
    installed: Installed, work: Path
) -> None:
    installed.run("rlhf", "backup", "--db", "labels.db", "--out", "signed.db")
    add = ["rlhf", "users", "add", "ann", "--db", "signed.db", "--role", "admin"]
    installed.run(*add, "--password-stdin", text=f"{PASSWORD}\n")
    (work / "signed.json").write_text(json.dumps({**ROUND, "db": "signed.db"}))
    url = f"http://127.0.0.1:{free_port()}"
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())

    def get(path: str, form: dict[str, str] | None = None) -> str:
        request = urllib.request.Request(url + path, headers={"Accept": "text/html"})
        data = None if form is None else urlencode(form).encode()
        with browser.open(request, data) as answer:  # an error is raised
            assert answer.url == url + ("/" if data else path)
            text: str = answer.read().decode()
            return text

    with ChatServer() as models:
        label = ["rlhf", "label", "--db", "signed.db", "--port", url.rpartition(":")[2]]
        label += ["--endpoint", models.url, "--model", "small", "--loop", "signed.json"]
        with running(label, f"{url}/healthz", installed.environment, work):
            shown = [get("/sign-in"), get("/sign-in", {"name": "ann", "password": PASSWORD})]
            shown += [get(page) for page in PAGES]
            loaded = {path for page in shown for path in LINKED.findall(page)}
            for path in loaded:
                assert get(f"/{path}")
    assert {"live/live.css", "live/live.js", "lead/files/lead.css", "lead/files/data.js"} <= loaded
