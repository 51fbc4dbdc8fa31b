"""What the experiments share: configurations, ranked data, and results as files.

Every experiment is one command, `python -m examples.evidence.FOLDER.NAME`, typed in the root of the
repository. It reads NAME.yaml beside NAME.py, works in runs/evidence/NAME, goes on where it was
stopped, and writes result.json there and, where a picture says more than a table, NAME.png; with
--keep also results/NAME.json and NAME.png in its folder, for the README.
"""

import argparse
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.evidence.commands import Config, flags, rlhf
from labeling_app.db.store import Store
from labeling_app.rankings.tiers import tiers_of_scores
from policies.ppo.settings import PPOSettings
from reward.settings import RewardSettings
from rlhf.config import merge
from rlhf.config.paths import with_new_names
from rlhf.endpoints.signals import Signal, load_signal
from rlhf.errors import InputError, RlhfError
from rlhf.records.jsonl import new_folder, read_jsonl, write_json, write_jsonl
from rlhf.records.ranked import write_ranked
from rlhf.records.schema import Message, RankedPrompt, Ranking, Response
from rlhf.run.provenance import describe_environment

PACKAGES = ("torch", "transformers", "trl")
SETTINGS = {"ppo": PPOSettings, "reward": RewardSettings}  # of parts whose names have changed
SHOWN_N = (2, 4, 8, 16)  # rows of best-of-n in a table; results hold, and plots show, all

Table = list[list[str]]


def run(
    name: str,
    measure: Callable[[Config, Path], Config],
    tabulate: Callable[[Config], Table],
    plot: Callable[[Config], Figure] | None = None,
    compare: Callable[[Config], Table] | None = None,
) -> None:
    """Read the command line, measure, and write result and picture; the tables go to stdout.

    `compare` makes a second table of the result.
    """
    here = Path(inspect.getfile(measure)).parent
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or "").strip())
    parser.add_argument("--config", type=Path, default=here / f"{name}.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence") / name)
    parser.add_argument("--keep", action="store_true", help="write results/ for the README too")
    parser.add_argument("--json", action="store_true", help="the result on the last line of stdout")
    arguments = parser.parse_args()
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    try:
        with timed(arguments.out, resolved(config)) as diary:
            measured = measure(config, arguments.out)
    except RlhfError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    result = {"experiment": name, **measured, **diary, **provenance()}
    for folder in (arguments.out, here / "results") if arguments.keep else (arguments.out,):
        path = folder / ("result.json" if folder == arguments.out else f"{name}.json")
        write_json(path, result)
        if plot:
            plot(result).savefig(path.with_name(f"{name}.png"), dpi=150)
    print(markdown(tabulate(result)))
    if compare:
        print(f"\n{markdown(compare(result))}")
    if arguments.json:
        print(json.dumps(result))


@contextmanager
def timed(out: Path, config: Config) -> Iterator[Config]:
    """Keep beside an experiment its configuration and how long it has worked in all its runs.

    Raises:
        InputError: the folder holds an experiment of another configuration.
    """
    file = out / "experiment.json"
    diary = {"config": config, "wall_seconds": 0.0}
    if file.is_file():
        diary = json.loads(file.read_text(encoding="utf-8"))
    if diary["config"] != config:
        raise InputError(
            f"{out} holds an experiment of another configuration",
            "Give another --out, or remove the folder.",
        )
    out.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stopped one counts, too
    began = time.monotonic()
    try:
        yield diary
    finally:
        diary["wall_seconds"] = round(diary["wall_seconds"] + time.monotonic() - began, 3)
        write_json(file, diary)
        signal.signal(signal.SIGTERM, before)


def provenance() -> Config:
    """Versions, the commit, and what they ran on."""
    environment = describe_environment()
    versions = {package: version(package) for package in PACKAGES}
    return {"versions": versions, "git_commit": environment["git_commit"], "cores": os.cpu_count()}


def resolved(config: Config) -> Config:
    """A configuration with the files read in that it names as `config`, in today's names."""

    def read(name: str, part: Any) -> Any:
        if not isinstance(part, dict) or "config" not in part:
            return part
        file = resolved(yaml.safe_load(Path(part["config"]).read_text(encoding="utf-8")))
        kind = SETTINGS.get(name)
        return merge(with_new_names(file, kind), with_new_names(part, kind))

    return {name: read(name, part) for name, part in config.items()}


def markdown(table: Table) -> str:
    """A table, its header first, as Markdown."""
    header, *rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def empty_plot(x: str, start: float) -> tuple[Figure, Axes]:
    """Gold reward against x, with a line at what the original model reaches."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel("gold reward")
    axes.spines[["top", "right"]].set_visible(False)
    axes.axhline(start, color="#94a3b8", linewidth=1)
    position = {"xytext": (-6, 4), "textcoords": "offset points", "ha": "right"}
    right = axes.get_yaxis_transform()  # x from 0 to 1, y in rewards
    text = {"color": "#64748b", "fontsize": 8}
    axes.annotate("original model", (1, start), xycoords=right, **position, **text)
    return figure, axes


def sampled_prompts(config: Config) -> list[RankedPrompt]:
    """A configuration's prompts with its model's responses, in a database that others share."""
    db, prompts = Path(config["db"]), Path(config["prompts"])
    db.parent.mkdir(parents=True, exist_ok=True)
    if number := config.get("train_prompts"):
        prompts = write_part(prompts, number, db.with_suffix(".jsonl"))
    rlhf("import", prompts, "--db", db)
    rlhf("generate", "--db", db, "--model", config["model"], *flags(config["sampling"]))
    with Store(db) as store:
        return list(store.ranked_prompts())


def write_part(prompts: Path, number: int, part: Path) -> Path:
    """Write `number` training prompts, drawn at random, and all test prompts to a file."""
    lines = list(read_jsonl(prompts))
    train = [index for index, line in enumerate(lines) if line["split"] == "train"]
    drawn = set(np.random.default_rng(0).permutation(train)[:number].tolist())
    chosen_lines = (
        line for index, line in enumerate(lines) if index in drawn or line["split"] == "test"
    )
    write_jsonl(part, chosen_lines)
    return part


def rank_by_signal(
    records: Sequence[RankedPrompt], signal: Signal, *, size: int, tie_within: float
) -> list[RankedPrompt]:
    """Rankings of `size` responses each, as many as the responses of a prompt give.

    Every ranking has a prompt of its own, the same in all but the id, so that rankings can be
    counted and drawn one by one.
    """
    ranked = []
    for record in records:
        for number in range(len(record.responses) // size):
            part = record.responses[number * size : (number + 1) * size]
            scores = [signal(record.prompt.text, response.text) for response in part]
            tiers = tiers_of_scores(scores, tie_within)
            ranked.append(_ranked(record, f"{record.prompt.id}-{number}", part, tiers))
    return ranked


def _ranked(
    record: RankedPrompt, id_: str, responses: Sequence[Response], tiers: list[list[int]]
) -> RankedPrompt:
    ranking = Ranking(
        id=id_,
        prompt_id=id_,
        annotator="signal",
        kind="signal",
        tiers=tuple(tuple(responses[index].id for index in tier) for tier in tiers),
    )
    moved = tuple(replace(response, prompt_id=id_) for response in responses)
    prompt = replace(record.prompt, id=id_)
    return RankedPrompt(prompt=prompt, responses=moved, rankings=(ranking,))


def draw(records: Sequence[RankedPrompt], number: int, seed: int) -> list[RankedPrompt]:
    """`number` training records at random, and all test records.

    Raises:
        InputError: there are fewer.
    """
    train = [record for record in records if record.prompt.split == "train"]
    if number > len(train):
        raise InputError(
            f"{number} rankings are wanted and {len(train)} are there",
            "Raise k or name more prompts in the configuration.",
        )
    order = np.random.default_rng(seed).permutation(len(train))[:number]
    test = [record for record in records if record.prompt.split == "test"]
    return [train[index] for index in order] + test


def together(records: Sequence[RankedPrompt]) -> list[RankedPrompt]:
    """One record a prompt, with all its rankings: it is then read once for all of them."""
    by_prompt: dict[tuple[Message, ...], list[RankedPrompt]] = {}
    for record in records:
        by_prompt.setdefault(record.prompt.messages, []).append(record)
    joined = []
    for parts in by_prompt.values():
        prompt = parts[0].prompt
        responses = [replace(r, prompt_id=prompt.id) for part in parts for r in part.responses]
        rankings = [replace(r, prompt_id=prompt.id) for part in parts for r in part.rankings]
        joined.append(
            RankedPrompt(prompt=prompt, responses=tuple(responses), rankings=tuple(rankings))
        )
    return joined


def with_noise(records: Sequence[RankedPrompt], share: float, seed: int) -> list[RankedPrompt]:
    """The same records with that share of the training rankings turned upside down."""
    generator = np.random.default_rng(seed)
    noisy = []
    for record in records:
        turn = record.prompt.split == "train" and generator.random() < share
        rankings = tuple(
            replace(ranking, tiers=ranking.tiers[::-1], strengths=ranking.strengths[::-1])
            for ranking in record.rankings
        )
        noisy.append(replace(record, rankings=rankings) if turn else record)
    return noisy


def write_dataset(out: Path, records: Sequence[RankedPrompt]) -> Path:
    """Write an export that `rlhf train-reward` and `rlhf reference` read, once."""
    if not out.exists():
        with new_folder(out) as folder:
            write_ranked(folder, records, {})
    return out


def score(records: list[RankedPrompt], reward: Path, settings: Config) -> np.ndarray:
    """The rewards (P, M) by a reward model of all responses to some prompts, once."""
    answers, scored = reward / "answers.jsonl", reward / "scored.jsonl"
    if not scored.exists():
        write_jsonl(answers, (record.to_json() for record in records))
        rlhf("score", answers, "--reward", reward, "--out", scored, *flags(settings))
    return np.array([line["rewards"] for line in read_jsonl(scored)])


def gold_of(config: Config) -> Signal:
    """The function that stands for what people want."""
    return load_signal(config["gold"])


def signed(difference: Config) -> str:
    """A difference with its interval, as a cell: `+0.21 (+0.13 to +0.29)`."""
    if difference["low"] is None:
        return f"{difference['value']:+.2f}"
    return "{value:+.2f} ({low:+.2f} to {high:+.2f})".format(**difference)


def signed_points(difference: Config) -> str:
    """A difference of two shares in percentage points, as a cell: `+2.1 (+1.3 to +2.9)`."""
    if difference["low"] is None:
        return f"{100 * difference['value']:+.1f}"
    value, low, high = (100 * difference[name] for name in ("value", "low", "high"))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def interval(rate: Config) -> str:
    """A share with its interval, as a cell: `67 % (56–78 %)`."""
    if rate["low"] is None:
        return f"{100 * rate['value']:.0f} %"
    return f"{100 * rate['value']:.0f} % ({100 * rate['low']:.0f}–{100 * rate['high']:.0f} %)"
