"""Exports rankings: as our own `ranked` folder, or as a dataset that trl trains on directly.

DIR/train.jsonl  DIR/test.jsonl  DIR/manifest.json
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from labeling_app.db.files.label_file import empty_database
from labeling_app.db.people.pseudonyms import pseudonym
from labeling_app.db.rankings import (
    annotation_hours,
    last_finished_import,
    last_visible_ranking,
    ranking_annotators,
    ranking_counts,
)
from labeling_app.db.store import Store
from labeling_app.rankings.verdicts import EDITED, labels
from rlhf.errors import InputError
from rlhf.records.fingerprints import folder_hash
from rlhf.records.jsonl import JsonObject, new_folder, write_json, write_jsonl
from rlhf.records.pairs import preferences, trl_preference
from rlhf.records.ranked import MANIFEST, SPLITS, write_ranked
from rlhf.records.schema import AnnotatorKind, RankedPrompt
from rlhf.records.wording import counted, whole_text

Format = Literal["ranked", "trl", "trl-conversational", "hh", "kto", "demonstrations"]


def export(
    store: Store,
    out: Path,
    format: Format,
    *,
    kinds: Collection[AnnotatorKind] = (),
    annotators: Collection[str] = (),
    names: bool = False,
) -> dict[str, Any]:
    """Write the live rankings as a dataset and return its manifest.

    People stand in it under pseudonyms that stay the same for one database, unless `names`. By
    `newest_ranking` and `newest_import` the manifest says what was there to be exported.

    Raises:
        InputError: `out` exists, or there is nothing to export; the message names the command that
        comes first.
    """
    if out.exists():
        raise InputError(
            f"{out} already exists", f"Choose another --out, or remove it first: rm -r {out}"
        )
    _require_content(store)
    show = _Names(store, real=names)
    with store.connections.snapshot() as db:
        seen = {
            "newest_ranking": last_visible_ranking(db),
            "newest_import": last_finished_import(db),
        }
        ranked = store.ranked_prompts(kinds=kinds, annotators=annotators, moment=db)
        records = [show.in_record(record) for record in ranked]
        is_of_all = not (kinds or annotators)
        replaced = ranking_counts(db).replaced if is_of_all else 0
        without_responses = sum(store.prompts_by_split(db).values()) - len(records)
    by_kind = Counter(ranking.kind for record in records for ranking in record.rankings)
    if not by_kind:
        _raise_nothing_ranked(store, kinds, annotators)
    chosen = {"kinds": sorted(kinds), "annotators": sorted(map(show.of, annotators))}
    hours = annotation_hours(store.connections, kinds=kinds, annotators=annotators)
    extra = {
        "rankings_by_kind": dict(by_kind),
        "chosen": chosen,
        "annotator_hours": round(hours, 4),
        "replaced_by_decisions": replaced,
        "prompts_without_responses": without_responses,
        **seen,
    }
    with new_folder(out) as folder:
        if format == "ranked":
            return write_ranked(folder, records, extra)
        return _write_rows(folder, format, records, extra)


class _Names:
    """The names of annotators in an export."""

    def __init__(self, store: Store, *, real: bool) -> None:
        people = [name for name, kind in store.annotators().items() if kind == "human"]
        self.pseudonyms = {} if real else {name: pseudonym(store.secret, name) for name in people}

    def of(self, name: str) -> str:
        return self.pseudonyms.get(name, name)

    def in_record(self, record: RankedPrompt) -> RankedPrompt:
        rankings = tuple(replace(r, annotator=self.of(r.annotator)) for r in record.rankings)
        return replace(record, rankings=rankings)


def _require_content(store: Store) -> None:
    counts = store.counts()
    path = store.connections.path
    if not counts["prompts"]:
        raise empty_database(path)
    if not counts["responses"]:
        raise InputError(
            f"{path} holds {counted(counts['prompts'], 'prompt')} and no responses",
            f"Sample some first: rlhf generate --db {path} --model MODEL",
        )


def _raise_nothing_ranked(
    store: Store, kinds: Collection[str], annotators: Collection[str]
) -> None:
    path = store.connections.path
    if (kinds or annotators) and store.counts()["rankings"]:
        ranked = ranking_annotators(store.connections)
        known = store.annotators().items()
        there = ", ".join(f"{name} ({kind})" for name, kind in known if name in ranked)
        wanted = ", ".join([*kinds, *annotators])
        raise InputError(
            f"No ranking in {path} is by {wanted}",
            f"Change --kind or --annotator. There are: {there}.",
        )
    raise InputError(
        f"{path} holds responses and no rankings",
        f"Rank some first: rlhf label --db {path}, or rlhf annotate --db {path} --annotator …",
    )


def _write_rows(
    folder: Path, format: Format, records: list[RankedPrompt], extra: dict[str, Any]
) -> dict[str, Any]:
    rows_of = ROWS[format]
    counts = {}
    for split in SPLITS:
        rows = [row for r in records if r.prompt.split == split for row in rows_of(r)]
        counts[split] = write_jsonl(folder / f"{split}.jsonl", rows)
    if not any(counts.values()):
        raise InputError(*_nothing_in(format))
    manifest = {
        "format": format,
        "rows": counts,
        "rankings": sum(len(record.rankings) for record in records),
        "content_hash": folder_hash(folder, ("*.jsonl",)),
        **extra,
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _nothing_in(format: Format) -> tuple[str, str]:
    if format == "demonstrations":
        problem = "Nobody has edited a response, so there are no demonstrations"
        return problem, "Ask and edit some first: rlhf label --db DB --model MODEL"
    if format == "kto":
        problem = "All rankings are ties, and there are no thumbs: format kto would have no rows"
    else:
        problem = f"All rankings are ties or thumbs: format {format} would have no rows"
    return problem, "Export with --format ranked, which keeps everything, or rank more."


def _trl_rows(record: RankedPrompt) -> Iterator[JsonObject]:
    for pair in preferences(record):
        yield {
            "prompt": whole_text(record.prompt),
            "chosen": pair.chosen.text,
            "rejected": pair.rejected.text,
            "margin": float(pair.margin),
        }


def _completion(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _conversational_rows(record: RankedPrompt) -> Iterator[JsonObject]:
    for pair in preferences(record):
        yield {**trl_preference(record, pair), "margin": float(pair.margin)}


def _hh_rows(record: RankedPrompt) -> Iterator[JsonObject]:
    """HH-RLHF strings. They have no system turn: its text precedes the first human turn."""
    names = {"system": "Human", "user": "Human", "assistant": "Assistant"}
    text = ""
    after_system = False
    for message in record.prompt.messages:
        start = "\n\n" if after_system else f"\n\n{names[message.role]}: "
        text += start + message.content
        after_system = message.role == "system"
    for pair in preferences(record):
        yield {
            "chosen": f"{text}\n\nAssistant: {pair.chosen.text}",
            "rejected": f"{text}\n\nAssistant: {pair.rejected.text}",
        }


def _kto_rows(record: RankedPrompt) -> Iterator[JsonObject]:
    texts = {response.id: response.text for response in record.responses}
    for response_id, label in labels(record.rankings):
        completion = _completion(texts[response_id])
        yield {"prompt": record.prompt.chat, "completion": completion, "label": label}


def _demonstration_rows(record: RankedPrompt) -> Iterator[JsonObject]:
    """The texts that people wrote when they edited a response."""
    texts = {response.id: response.text for response in record.responses}
    for ranking in record.rankings:
        if EDITED in ranking.flags:
            completion = _completion(texts[ranking.tiers[0][0]])
            yield {"prompt": record.prompt.chat, "completion": completion}


ROWS: dict[str, Callable[[RankedPrompt], Iterator[JsonObject]]] = {
    "trl": _trl_rows,
    "trl-conversational": _conversational_rows,
    "hh": _hh_rows,
    "kto": _kto_rows,
    "demonstrations": _demonstration_rows,
}
