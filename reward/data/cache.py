"""The groups of an export, made once: tokens and judgments in a file that all processes map.

    EXPORT/tokens/KEY.arrow   the groups (`reward.data.stored_groups`)
    EXPORT/tokens/KEY.json    what they were made from, the other file's hash, counts for the report

KEY is a hash of all that decides what the groups are: the export's content, the tokenizer with its
template, settings, and the code. The main process makes the files; where machines have their own
copies of the export, the first process of each machine. A broken file is made anew. If the export's
folder cannot be written to, the files are in `.NAME.tokens` beside the run NAME.
"""

import errno
import json
import os
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from reward.data import annotators, groups, reliability, stored_groups
from reward.data.annotators import AnnotatorWeights, estimate_weights
from reward.data.groups import (
    Encoder,
    Group,
    PointwiseRules,
    admit,
    build_reference_groups,
    encode_records,
    is_reference,
    refuse_repeated,
    refuse_too_long,
)
from reward.data.stored_groups import GroupFile, StoredGroups, write_groups
from reward.settings import RewardSettings
from rlhf.errors import ConfigError, InputError
from rlhf.modeling import chat_template, pairs, thinking, tokens
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.pairs import is_for_pairs
from rlhf.modeling.tokens import using_all_cores
from rlhf.parallel.distributed import on_main
from rlhf.ranks import is_main_process
from rlhf.records import pairs as ranked_pairs
from rlhf.records import reliability as annotator_reliability
from rlhf.records import schema, thumbs
from rlhf.records.documents import read_document
from rlhf.records.fingerprints import file_hash, text_hash
from rlhf.records.jsonl import new_file, write_json
from rlhf.records.ranked import SPLITS, iterate_ranked, read_manifest, require_ranked
from rlhf.records.reliability import Reliability
from rlhf.records.schema import Prompt, Response
from rlhf.run.metrics import progress
from rlhf.run.provenance import package_version

FOLDER = "tokens"
REFERENCE = "reference"  # the use of groups of the model's own responses; others are splits
MAX_REFERENCE_OUTPUTS = 512
PACKAGES = ("transformers", "tokenizers", "pyarrow")
CODE = (
    *(annotators, groups, reliability, stored_groups, sys.modules[__name__]),
    *(chat_template, pairs, thinking, tokens, ranked_pairs, annotator_reliability, schema, thumbs),
)


@dataclass(frozen=True)
class CachedGroups:
    """All groups of an export, mapped into memory, and what the report says of them.

    Attributes:
        file: with the groups of each split and the reference outputs.
        prompts: how many the export has.
        counts: by split.
        kinds: of the annotators of rankings with scores, and of those without.
        annotators: their weights.
    """

    file: GroupFile
    prompts: int
    counts: dict[str, dict[str, int]]
    kinds: dict[str, list[str]]
    annotators: AnnotatorWeights

    def of(self, use: str) -> StoredGroups:
        """The groups of a split, or those of REFERENCE."""
        return self.file.of_use(use)


@dataclass(frozen=True)
class _Source:
    """The inputs from which the groups are made; its JSON form decides KEY."""

    settings: RewardSettings
    tokenizer: PreTrainedTokenizerBase
    model_fingerprint: str
    max_length: int

    def describe(self) -> dict[str, Any]:
        settings, tokenizer = self.settings, self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        template = str(tokenizer.chat_template)
        return {
            "export": str(read_manifest(settings.rankings)["content_hash"]),
            "model": self.model_fingerprint,
            "tokenizer": tokens.tokenizer_fingerprint(tokenizer),
            "backend": text_hash(backend.to_str()) if backend is not None else None,
            "special_tokens": str(tokenizer.special_tokens_map),
            "end_tokens": list(end_token_ids(tokenizer)),
            "reads_pairs": is_for_pairs(tokenizer),
            "today": str(date.today()) if "strftime_now" in template else None,
            "max_length": self.max_length,
            "too_long": settings.data.too_long,
            "reads_thinking": bool(settings.data.reads_thinking),
            "weights": settings.annotator_weights,
            "pointwise_weights": settings.objective.pointwise_weights,
            "thumbs_down_flags": sorted(settings.data.thumbs_down_flags),
            "versions": {name: package_version(name) for name in PACKAGES},
            "code": text_hash(" ".join(file_hash(Path(str(module.__file__))) for module in CODE)),
        }


def read_groups(
    settings: RewardSettings,
    tokenizer: PreTrainedTokenizerBase,
    model_fingerprint: str,
    max_length: int,
) -> CachedGroups:
    """The groups of an export; all processes call this, and the file is made if it is not there.

    Args:
        settings: of the stage.
        tokenizer: of the model.
        model_fingerprint: of the model whose outputs are the reference.
        max_length: tokens of the longest prompt with a response.

    Raises:
        InputError: the export was changed, is malformed or too long, as
            `encode_records`, `refuse_repeated` and `refuse_too_long` say.
        ConfigError: a setting names an annotator or a flag that is not there.
    """
    source = _Source(settings, tokenizer, model_fingerprint, max_length)
    path = Path(on_main(lambda: str(_find_or_make(source, _folders(settings)))))
    if os.environ.get("LOCAL_RANK", "0") == "0" and not is_main_process():
        _find_or_make(source, [path.parent])  # this machine may have a copy of its own
    on_main(lambda: None)  # wait for the first process of this machine
    facts = read_document(path.with_suffix(".json"))
    estimates = {name: Reliability(**row) for name, row in facts["reliability"].items()}
    given = settings.annotator_weights
    weights = facts["weights"] if given == "auto" else given
    return CachedGroups(
        GroupFile.open(path),
        facts["prompts"],
        {split: dict(counts) for split, counts in facts["counts"].items()},
        facts["kinds"],
        AnnotatorWeights(weights, estimates),
    )


def _folders(settings: RewardSettings) -> list[Path]:
    """Where the files may be; the first one that can be written to is taken."""
    return [settings.rankings / FOLDER, settings.out.parent / f".{settings.out.name}.{FOLDER}"]


def _find_or_make(source: _Source, folders: list[Path]) -> Path:
    """The whole and unchanged file of the groups, made if there is none."""
    require_ranked(source.settings.rankings)
    description = source.describe()
    key = text_hash(json.dumps(description, sort_keys=True))
    for folder in folders:
        path = folder / f"{key}.arrow"
        if path.with_suffix(".json").is_file() and _is_whole(path):
            return path
    for folder in folders:
        path = folder / f"{key}.arrow"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with new_file(path) as partial:
                facts = _make(source, partial)
        except OSError as error:
            refused = error
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
        else:
            facts |= {"made_from": description, "hash": file_hash(path)}
            write_json(path.with_suffix(".json"), facts)
            return path
    raise refused


def _is_whole(path: Path) -> bool:
    """Whether a file of groups is as it was written; says so on stderr where it is not."""
    with suppress(InputError, OSError, pa.ArrowInvalid):
        if read_document(path.with_suffix(".json"))["hash"] == file_hash(path):
            GroupFile.open(path).validate()
            return True
    sys.stderr.write(f"{path} is broken, and is made again.\n")
    return False


def _make(source: _Source, path: Path) -> dict[str, Any]:
    """Write all groups into a file; returns the facts of `CachedGroups`."""
    settings = source.settings
    _refuse_unknown_names(settings)
    given = settings.annotator_weights
    estimated = AnnotatorWeights({} if given == "auto" else given)
    if given == "auto":
        estimated = estimate_weights(iterate_ranked(settings.rankings))
    encoder = Encoder.create(
        source.tokenizer,
        source.max_length,
        truncate=settings.data.too_long == "truncate",
        weights=estimated.weights,
        pointwise=PointwiseRules(
            settings.objective.pointwise_weights, settings.data.thumbs_down_flags
        ),
        reads_thinking=bool(settings.data.reads_thinking),
    )
    survey = _Survey(source, encoder)
    with using_all_cores():
        write_groups(path, survey.groups())
    return {
        "prompts": survey.prompts,
        "counts": {split: dict(survey.counts[split]) for split in SPLITS},
        "kinds": {name: sorted(kinds) for name, kinds in survey.kinds.items()},
        "weights": dict(estimated.weights),
        "reliability": {name: asdict(estimate) for name, estimate in estimated.reliability.items()},
    }


class _Survey:
    """Reads an export once, and a second time the few prompts of the reference outputs."""

    def __init__(self, source: _Source, encoder: Encoder) -> None:
        self._source, self._encoder = source, encoder
        self.prompts = 0
        self.counts = {split: Counter[str]() for split in SPLITS}
        self.kinds: dict[str, set[str]] = {"with_scores": set(), "without_scores": set()}

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Every group with its use."""
        rankings, encoder = self._source.settings.rankings, self._encoder
        ids: dict[str, list[str]] = {split: [] for split in SPLITS}
        own = array("q")  # the positions of prompts and the numbers of their responses, in turns
        total = sum(read_manifest(rankings).get("prompts", {}).values())
        with progress("reading the rankings", total) as bar:
            for record, group in encode_records(iterate_ranked(rankings), encoder):
                split = record.prompt.split
                ids[split].append(record.prompt.id)
                for ranking in record.rankings:
                    self.kinds["with_scores" if ranking.scores else "without_scores"].add(
                        ranking.kind
                    )
                for number, response in enumerate(record.responses):
                    if is_reference(response, self._source.model_fingerprint):
                        own.extend((self.prompts, number))
                if admit(record, group, encoder, self.counts[split]) and group:
                    yield split, group
                self.prompts += 1
                bar.advance()
        for split in SPLITS:
            refuse_repeated(ids[split])
            refuse_too_long(self.counts[split], len(ids[split]), encoder)
        for group in build_reference_groups(self._reference(own), encoder):
            yield REFERENCE, group

    def _reference(self, own: "array[int]") -> Iterator[tuple[Prompt, Response]]:
        """At most MAX_REFERENCE_OUTPUTS of the model's own responses, spread evenly."""
        positions, numbers = own[::2], own[1::2]
        stride = max(1, -(-len(positions) // MAX_REFERENCE_OUTPUTS))
        chosen: dict[int, list[int]] = {}
        for position, number in zip(positions[::stride], numbers[::stride], strict=True):
            chosen.setdefault(position, []).append(number)
        records = iterate_ranked(self._source.settings.rankings, chosen) if chosen else ()
        for record, response_numbers in zip(records, chosen.values(), strict=True):
            yield from ((record.prompt, record.responses[number]) for number in response_numbers)


def _refuse_unknown_names(settings: RewardSettings) -> None:
    named, wanted = settings.annotator_weights, set(settings.data.thumbs_down_flags)
    if not wanted and (named == "auto" or not named):
        return
    flags, known = set[str](), set[str]()
    for record in iterate_ranked(settings.rankings):
        for ranking in record.rankings:
            known.add(ranking.annotator)
            flags.update(flag.partition("@")[0] for flag in ranking.flags if "@" in flag)
    absent = sorted(wanted - flags)
    if absent:
        raise ConfigError(
            f"--data.thumbs-down-flags names {', '.join(absent)}, which no response is flagged as",
            f"Responses are flagged as: {', '.join(sorted(flags)) or 'nothing'}.",
        )
    unknown = sorted(set(named) - known) if named != "auto" else []
    if unknown:
        raise ConfigError(
            f"--annotator-weights names {', '.join(unknown)}, who ranked nothing here",
            f"The annotators are: {', '.join(sorted(known))}.",
        )
