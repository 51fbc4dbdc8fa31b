"""Help pages: settings by group, the required and the most used ones first, an example last."""

from ast import literal_eval
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from cyclopts.help import ColumnSpec, DefaultFormatter, HelpEntry, HelpPanel
from cyclopts.help.specs import NameRenderer, get_default_parameter_columns
from rich.console import Console, ConsoleOptions

from rlhf.parallel.settings import ClusterSettings

FLAGS_OF_ALL = ("--config", "--dry-run", "--json", "--help")
PARALLEL = "parallel"  # the group that is shown among ON_CLUSTERS
ON_CLUSTERS = {
    "--" + field.name.replace("_", "-")
    for field in fields(ClusterSettings)
    if field.name != PARALLEL
}
FIRST = "Settings"
NO_DEFAULTS = ("False", "()", "{}", '""')
CLUSTER = "Processes and clusters"
LAST = "Every command"

Formatter = Callable[[Console, ConsoleOptions, HelpPanel], None]


def help_page(settings: type[Any]) -> Formatter:
    """Shows the help panels of a command, its settings by group."""
    purposes = dict(_groups(settings))
    has_processes = any(field.name == "processes" for field in fields(settings))
    on_clusters = ON_CLUSTERS if has_processes else set()

    def show(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if panel.format != "parameter":
            DefaultFormatter()(console, options, panel)
            return
        for group_panel in _by_group(panel, purposes, on_clusters):
            DefaultFormatter(column_specs=_columns)(console, options, group_panel)

    return show


def _columns(
    console: Console, options: ConsoleOptions, entries: list[HelpEntry]
) -> tuple[ColumnSpec, ...]:
    """The usual columns, that of names as wide as the longest: a broken name cannot be copied."""
    longest = max(len(name) for entry in entries for name in (*entry.names, *entry.negative_names))

    def wide(column: ColumnSpec) -> ColumnSpec:
        width = max(column.max_width or 0, longest)
        return column.copy(renderer=NameRenderer(max_width=width), max_width=width)

    usual = get_default_parameter_columns(console, options, entries)
    return tuple(
        wide(column) if isinstance(column.renderer, NameRenderer) else column for column in usual
    )


def _groups(settings: type[Any]) -> Iterator[tuple[str, str]]:
    """Every group's name and purpose."""
    types = get_type_hints(settings)
    for setting in fields(settings):
        group = types[setting.name]
        if is_dataclass(group) and setting.name != PARALLEL:
            yield setting.name.replace("_", "-"), (group.__doc__ or "").partition("\n\n")[0]


def _by_group(
    panel: HelpPanel, purposes: dict[str, str], on_clusters: Container[str]
) -> Iterator[HelpPanel]:
    """A panel of settings as several, each with those of one group."""
    by_group: dict[str, list[HelpEntry]] = {name: [] for name in (FIRST, *purposes, CLUSTER, LAST)}
    for entry in panel.entries:
        by_group[_group_of(entry, purposes, on_clusters)].append(_shown(entry))
    for name, entries in by_group.items():
        if entries:
            # Python's sort keeps the order of the dataclass within both halves.
            first = sorted(entries, key=lambda entry: not entry.required)
            yield panel.copy(title=name, description=purposes.get(name), entries=first)


def _group_of(entry: HelpEntry, groups: Iterable[str], on_clusters: Container[str]) -> str:
    prefix, dot, _ = entry.names[0].removeprefix("--").partition(".")
    if (prefix == PARALLEL and dot) or any(name in on_clusters for name in entry.names):
        return CLUSTER
    if not {*FLAGS_OF_ALL, "--version"}.isdisjoint(entry.names):
        return LAST
    return prefix if prefix in groups else FIRST


def _shown(entry: HelpEntry) -> HelpEntry:
    """An entry without an uninformative default and without a `--no-…` that has no effect."""
    if entry.default in NO_DEFAULTS:
        return entry.copy(default=None, negative_names=())
    if entry.default is not None and entry.default.startswith("("):
        entry = entry.copy(default=" ".join(map(str, literal_eval(entry.default))))
    if entry.default == "True" or (entry.default is None and not entry.required):
        return entry
    return entry.copy(negative_names=())
