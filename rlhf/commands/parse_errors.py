"""Error messages for command lines that cannot be parsed."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Token,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from rlhf.commands.help_page import FLAGS_OF_ALL
from rlhf.config import load_settings
from rlhf.config.paths import flag_of, old_names, setting_names
from rlhf.errors import ConfigError, closest, did_you_mean

# What other trainers call a setting: where it is here, the first of these that a command has.
NAMES_IN_OTHER_TRAINERS = {
    "lr": ("optim.learning_rate", "learning_rate"),
    **dict.fromkeys(("kl-coef", "kl-coeff", "init-kl-coef", "coef", "beta"), ("kl.coefficient",)),
    **dict.fromkeys(("num-epochs", "num-train-epochs"), ("optim.epochs", "epochs")),
    "batch-size": ("batch.episodes_per_step", "batch.prompts"),
    "per-device-train-batch-size": ("batch.micro_batch_size", "micro_batch_size"),
    **dict.fromkeys(("gpus", "num-gpus", "nproc-per-node"), ("processes",)),
    **dict.fromkeys(("data", "dataset", "dataset-name"), ("rankings", "prompts")),
    **dict.fromkeys(("rank", "lora-r", "use-lora", "use-peft"), ("lora.rank",)),
    **dict.fromkeys(("output-dir", "output"), ("out",)),
    **dict.fromkeys(("rloo", "grpo"), ("advantages",)),
    "model": ("policy",),
    **dict.fromkeys(("max-length", "max-seq-length"), ("data.max_length", "max_length")),
}
SAMPLED_LIKE_THE_REFERENCE = ("temperature", "max_new_tokens")  # by PPO and evaluations
# What is no choice of a flag, and what to do instead.
ALTERNATIVES = {
    ("to", "gguf"): "llama.cpp's own script writes GGUF from the folder of a policy: python "
    "convert_hf_to_gguf.py DIR --outtype q8_0."
}
KINDS = {int: "a whole number", float: "a number"}


def explain(
    error: CycloptsError, tokens: Sequence[str], commands: Sequence[str], settings: Any
) -> ConfigError:
    """What is wrong with a command line, and what to type instead.

    `tokens` is what was typed after `rlhf`; `settings` is None if no command was recognized.
    """
    if isinstance(error, UnknownCommandError):
        close = did_you_mean(tokens[0], commands)
        return ConfigError(f"Unknown command {tokens[0]}", f"{close}See: rlhf --help")
    see = f"See: rlhf {tokens[0]} --help" if settings else "See: rlhf --help"
    if settings and isinstance(error, UnknownOptionError):
        return _unknown_flag(error.token.keyword or error.token.value, settings, see)
    if settings and isinstance(error, MissingArgumentError) and error.argument:
        return _missing(error, tokens, settings, see)
    if isinstance(error, UnusedCliTokensError):
        return _unused((error.unused_tokens or [""])[0], tokens, see)
    if isinstance(error, CoercionError) and error.token:
        return _wrong_value(error, error.token, see)
    return ConfigError(str(error).strip(), see)


def _wrong_value(error: CoercionError, token: Token, see: str) -> ConfigError:
    name = (token.keyword or "").replace("][", ".").strip("[]")
    if instead := ALTERNATIVES.get((name.lstrip("-"), token.value)):
        return ConfigError(str(error).strip(), f"{instead} {see}")
    if error.target_type not in KINDS:
        return ConfigError(str(error).strip(), see)
    where = "" if token.source in ("", "cli") else f" in {token.source}"
    return ConfigError(
        f"{name} is {token.value!r}{where}", f"Give {KINDS[error.target_type]}. {see}"
    )


def unknown_flag(app: App, tokens: Sequence[str], settings: Any) -> ConfigError | None:
    """The error of the first flag that a command does not have, if there is one.

    Settings check themselves while the command line is parsed, before unknown flags are found.
    """
    known = app[tokens[0]].assemble_argument_collection()
    for token in takewhile(lambda token: token != "--", tokens[1:]):
        if not token.startswith("--"):
            continue
        try:
            known.match(token.partition("=")[0])
        except ValueError:
            return _unknown_flag(token, settings, f"See: rlhf {tokens[0]} --help")
    return None


def _unknown_flag(word: str, settings: Any, see: str) -> ConfigError:
    flag = word.partition("=")[0]
    names = list(setting_names(settings))
    elsewhere = called_elsewhere(flag, names)
    if elsewhere:
        return ConfigError(f"Unknown option {flag}", f"Did you mean {elsewhere}? {see}")
    last = flag.rpartition(".")[2].removeprefix("--").replace("-", "_")
    if last in SAMPLED_LIKE_THE_REFERENCE and "reference" in names:
        remedy = (
            f"It is that of the reference outputs: rlhf reference {flag_of(f'sampling.{last}')}"
        )
        return ConfigError(f"Unknown option {flag}", f"{remedy}. {see}")
    known = {flag_of(name): flag_of(name) for name in names} | {name: name for name in FLAGS_OF_ALL}
    known |= {flag_of(old): flag_of(new) for old, new in old_names(settings).items()}
    like = closest(flag, known)
    close = f"Did you mean {known[like]}? " if like else ""
    return ConfigError(f"Unknown option {flag}", f"{close}{see}")


def called_elsewhere(flag: str, names: Sequence[str]) -> str:
    """The flag of what other trainers call `flag`, within the group that it names; or empty."""
    group, dot, word = flag.removeprefix("--").replace("_", "-").rpartition(".")
    matches = [name for name in NAMES_IN_OTHER_TRAINERS.get(word, ()) if name in names]
    if dot and any(name.startswith(f"{group}.") for name in names):
        matches = [name for name in matches if name.startswith(f"{group}.")]
    return flag_of(matches[0]) if matches else ""


def refuse_groups(tokens: Sequence[str], settings: Any) -> None:
    """Refuse the name of a group of settings as a flag: it would be taken for its first setting.

    Raises:
        ConfigError: names the settings of the group.
    """
    names = list(setting_names(settings))
    groups = {name.partition(".")[0] for name in names if "." in name}
    for flag in (
        token.partition("=")[0] for token in takewhile(lambda token: token != "--", tokens)
    ):
        group = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and group in groups and group not in names:
            inside = [flag_of(name) for name in names if name.startswith(f"{group}.")]
            elsewhere = called_elsewhere(flag, names)
            meant = f"Did you mean {elsewhere}? " if elsewhere else ""
            raise ConfigError(
                f"{flag} is a group of settings", f"{meant}They are: {', '.join(inside)}."
            )


def _missing(
    error: MissingArgumentError, tokens: Sequence[str], settings: Any, see: str
) -> ConfigError:
    """A flag without its value, or all required settings that were not given.

    An unknown flag is named first: it may be the required one, misspelled. A stray word may be the
    missing value.
    """
    assert error.argument is not None
    if error.keyword or error.argument.tokens:
        flag = error.keyword or error.argument.tokens[-1].keyword
        return ConfigError(f"{flag} needs a value", f"For example: {flag} {_value(flag)}. {see}")
    strays = error.unused_tokens or []
    unknown = [token for token in strays if token.startswith("-")]
    if unknown:
        return _unknown_flag(unknown[0], settings, see)
    name = error.argument.name
    known_tokens = _without(tokens, strays)
    given = shlex.join(strays[:1]) or _value(name)
    flag = "" if error.argument.index is not None else f"{name} "
    others = [other for other in _not_given(tokens, settings) if other != name]
    typed = [
        f"rlhf {shlex.join(known_tokens)} {flag}{given}",
        *(f"{o} {_value(o)}" for o in others),
    ]
    first = flag.strip() or _value(name)
    problem = (
        f"{', '.join([first, *others[:-1]])} and {others[-1]} are" if others else f"{first} is"
    )
    return ConfigError(f"{problem} missing", f"Type: {' '.join(typed)}\n  {see}")


def _without(tokens: Sequence[str], strays: Iterable[str]) -> list[str]:
    """A command and its tokens less the strays: of equal ones, the last that follows no flag."""
    rest = list(tokens)
    for stray in strays:
        indices = [index for index, token in enumerate(rest) if index and token == stray]
        after_words = [index for index in indices if not rest[index - 1].startswith("--")]
        for index in after_words[-1:] or indices[-1:]:
            del rest[index]
    return rest


def _unused(stray: str, tokens: Sequence[str], see: str) -> ConfigError:
    """A word that belongs to no flag; it may be a second file of --config."""
    before = list(tokens[: tokens.index(stray)]) if stray in tokens else []
    if before[-2:-1] == ["--config"]:
        return ConfigError(
            f"--config takes one file, and {stray} follows it",
            f"Repeat the flag: --config {before[-1]} --config {stray}. {see}",
        )
    return ConfigError(f"{stray} belongs to no flag", f"Name the flag that it is a value of. {see}")


def _not_given(tokens: Sequence[str], settings: Any) -> list[str]:
    """Flags of required settings that are neither among the tokens nor in their --config files."""
    parts = [part for token in tokens for part in token.split("=", 1)]
    files = [Path(file) for flag, file in pairwise(parts) if flag == "--config"]
    in_files = {str(name).replace("-", "_") for name in load_settings(files, settings)}
    required = [field.name for field in fields(settings) if is_required(field) and field.kw_only]
    flags = [f"--{name.replace('_', '-')}" for name in required if name not in in_files]
    return [flag for flag in flags if flag not in parts]


def is_required(setting: Field[Any]) -> bool:
    """Whether a setting has no default."""
    return setting.default is MISSING and setting.default_factory is MISSING


def _value(flag: str | None) -> str:
    return (flag or "").lstrip("-").rpartition(".")[2].replace("-", "_").upper()
