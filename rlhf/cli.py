"""`rlhf COMMAND`: reads settings, runs one command, turns errors into one message and an exit code.

Every command has its own file below `rlhf.commands` with four names: `Settings` (a
dataclass whose fields are the flags), `run(settings)` (returns what the command found, as plain
JSON values), `describe(settings, result)` (the same in sentences, for people) and `EXAMPLE` (the
command line at the end of its help). What --dry-run prints besides the settings is a training's
`memory_plan(settings)`, and the `commands(settings)` of a command that runs others. Nothing here
imports torch: `rlhf --help` answers at once.
"""

import json
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter
from rich.console import Console

from rlhf import __version__
from rlhf.commands.files import settings_from_files
from rlhf.commands.help_page import help_page
from rlhf.commands.parse_errors import explain, is_required, refuse_groups, unknown_flag
from rlhf.commands.wording import cost_sentence
from rlhf.config import missing_inputs, to_plain, to_yaml
from rlhf.config.paths import with_new_flags
from rlhf.diagnose import diagnose
from rlhf.errors import ConfigError, InputError, LostPeerError, MismatchError, RlhfError
from rlhf.ranks import (
    end_with_parent,
    exit_process,
    is_in_group,
    is_main_process,
    world_size,
)
from rlhf.run.watchdog import reporting_to_loop

COMMANDS = {
    "import": "labels.import_",
    "generate": "models.generate",
    "label": "labels.label",
    "users": "labels.users",
    "annotate": "labels.annotate",
    "prioritize": "labels.prioritize",
    "export": "labels.export",
    "backup": "labels.backup",
    "sft": "models.sft",
    "train-reward": "models.train_reward",
    "score": "models.score",
    "serve": "models.serve",
    "reference": "models.reference",
    "ppo": "models.ppo",
    "dpo": "models.dpo",
    "distill": "models.distill",
    "evaluate": "models.evaluate",
    "chat": "models.chat",
    "round": "models.round",
    "quantize": "deployment.quantize",
    "benchmark": "deployment.benchmark",
    "loop": "runs.loop",
    "runs": "runs.runs",
    "trace": "runs.trace",
    "plan": "machine.plan",
    "status": "runs.status",
    "doctor": "machine.doctor",
}

LIBRARY_SETTINGS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads slow a shared machine down tenfold
    "TRANSFORMERS_VERBOSITY": "error",  # no warning about a new reward head
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # loading takes seconds; our own bars show the work
    "TOKENIZERS_PARALLELISM": "false",
}

HELP = """RLHF from annotation to evaluation.

People rank responses in the browser, a reward model learns from the rankings, PPO trains a policy
against it while keeping it close to the original model, and an evaluation says whether the result
is better.
"""
HELP_GROUPS = {
    "labels": Group.create_ordered("Labels"),
    "models": Group.create_ordered("Models"),
    "deployment": Group.create_ordered("Deployment"),
    "runs": Group.create_ordered("Runs and machines"),
    "": Group.create_ordered("Flags"),
}
HELP_GROUPS["machine"] = HELP_GROUPS["runs"]

errors = Console(stderr=True, highlight=False, emoji=False)  # :100: is a line, not an emoji


def build_app() -> App:
    """The command line with all its commands."""
    app = App(
        name="rlhf",
        help=HELP,
        version=__version__,
        config=settings_from_files,
        help_epilogue=None,
        default_parameter=Parameter(consume_multiple=1),  # lists: at least one value after a flag
        suppress_keyboard_interrupt=False,  # it would exit with 130 before `main` can say 75
    )
    for flag in ("--help", "--version"):
        app[flag].group = HELP_GROUPS[""]
    for index, (name, module) in enumerate(COMMANDS.items()):
        command = import_module(f"rlhf.commands.{module}")
        app.command(
            _as_command(command),
            name=name,
            sort_key=index,
            group=HELP_GROUPS[module.rpartition(".")[0]],
            help_formatter=help_page(command.Settings),
            help_epilogue=f"Example:\n\n```\n{command.EXAMPLE}\n```",
        )
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (0, 1, 2, 3 or 75, as `rlhf.errors` lists)."""
    tokens = _without_old_command(list(sys.argv[1:] if arguments is None else arguments))
    for name, value in LIBRARY_SETTINGS.items():
        os.environ.setdefault(name, value)
    if arguments is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # schedulers stop jobs with it
        if is_in_group():
            end_with_parent()
    try:
        code = _run(tokens)
    except KeyboardInterrupt:  # while the commands are imported
        errors.print("[bold red]interrupted[/] Run the same command again.")
        code = 75
    if arguments is None and world_size() > 1:
        exit_process(code)
    return code


def _run(tokens: list[str]) -> int:
    app, settings = build_app(), _settings_of(tokens)
    tokens = with_new_flags(tokens, settings)
    try:
        if settings is not None:
            refuse_groups(tokens, settings)
        with reporting_to_loop():
            app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _fail(explain(error, tokens, list(COMMANDS), settings))
    except RlhfError as error:
        unknown = None
        if settings is not None and isinstance(error, ConfigError):
            unknown = unknown_flag(app, tokens, settings)
        return _fail(unknown or error)
    except KeyboardInterrupt:
        if is_main_process():
            errors.print(f"[bold red]interrupted[/] {_how_to_go_on(tokens)}")
        return 75
    except Exception as error:
        known = diagnose(error, settings)
        if known is not None:
            return _fail(known)
        traceback.print_exc()
        errors.print(
            "[bold red]bug[/] This should not happen. Please report it with the lines above."
        )
        return 1
    return 0


def _without_old_command(tokens: list[str]) -> list[str]:
    """The words of `rlhf annotate --prioritise` as those of `rlhf prioritize`."""
    flag = "--prioritise"
    given = [word for word in tokens if word.partition("=")[0] == flag]
    if tokens[:1] != ["annotate"] or not given:
        return tokens
    rest = [word for word in tokens[1:] if word not in given]
    if given[-1].lower() in (f"{flag}=false", f"{flag}=0", f"{flag}=no"):
        return ["annotate", *rest]
    errors.print(f"rlhf annotate {flag} is now: rlhf prioritize")
    return ["prioritize", *rest]


def _how_to_go_on(tokens: list[str]) -> str:
    """What to type after Ctrl-C; only commands with a run folder have --resume.

    One whose --out holds nothing yet starts from the beginning.
    """
    resumes = hasattr(_settings_of(tokens), "resume")
    arguments = [part for token in tokens for part in token.split("=", 1)]
    if resumes and "--out" in arguments[:-1]:
        out = Path(arguments[arguments.index("--out") + 1])
        resumes = out.is_dir() and any(out.iterdir())
    return f"Run the same command {'with --resume to go on' if resumes else 'again'}."


def _settings_of(tokens: list[str]) -> type[Any] | None:
    """The settings of the command that was typed, if there is such a command."""
    named = COMMANDS.get(tokens[0]) if tokens else None
    return import_module(f"rlhf.commands.{named}").Settings if named else None


def _fail(error: RlhfError) -> int:
    if isinstance(error, LostPeerError | MismatchError) and not is_main_process():
        return error.exit_code  # the main process reports it
    errors.print("[bold red]error[/]", end=" ")
    errors.print(str(error), markup=False, soft_wrap=True)
    return error.exit_code


Config = Annotated[
    tuple[Path, ...],
    Parameter(
        help="YAML file of settings. Repeatable: later files override earlier ones, flags override "
        "files.",
        consume_multiple=False,  # else it would take the words without a flag that follow
    ),
]
DryRun = Annotated[
    bool,
    Parameter(
        help="Print all settings, missing inputs and, for training, a memory plan; then exit.",
        negative="",
    ),
]
Json = Annotated[
    bool, Parameter(help="Print one JSON object on the last line of stdout.", negative="")
]


def _as_command(module: ModuleType) -> Callable[..., None]:
    """Wrap a command module with the flags that every command has."""

    def command(
        settings: Any, *, config: Config = (), dry_run: DryRun = False, json: Json = False
    ) -> None:
        result, text = _dry_run(module, settings) if dry_run else (module.run(settings), "")
        if not is_main_process():
            return
        if not (text or json):
            text = "\n".join(
                [module.describe(settings, result), *cost_sentence(result.get("cost"))]
            )
        _show(result, text, as_json=json)

    command.__annotations__["settings"] = Annotated[module.Settings, Parameter(name="*")]
    if not any(is_required(setting) for setting in fields(module.Settings)):
        command.__defaults__ = (module.Settings(),)  # cyclopts asks for it when all is optional
    command.__doc__ = module.run.__doc__
    command.__module__ = module.__name__
    return command


def _dry_run(module: ModuleType, settings: Any) -> tuple[dict[str, Any], str]:
    """The resolved settings, and the plan as a comment, which `--config` ignores."""
    missing = missing_inputs(settings)
    result: dict[str, Any] = {"settings": to_plain(settings), "missing": missing}
    text = to_yaml(settings)
    text += "".join(f"# Not there yet: {flag}\n" for flag in missing)
    for name in ("memory_plan", "commands"):
        if hasattr(module, name):
            try:
                result[name] = getattr(module, name)(settings)
            except InputError as error:
                if not missing:
                    raise
                result[name] = f"Not known while inputs are missing: {error.problem}."
            text += "\n" + textwrap.indent(result[name], "# ", lambda line: True)
    return result, text.rstrip("\n")


def _show(result: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print a command's result on stdout: as text, or as one JSON line."""
    sys.stdout.write((json.dumps(result, ensure_ascii=False) if as_json else text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
