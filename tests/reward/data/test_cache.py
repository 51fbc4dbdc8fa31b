import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import processors

from reward.data import cache, groups, stored_groups
from reward.data.groups import PointwiseRules
from reward.data.loading import read_data
from reward.data.reliability import weights_of
from rlhf.errors import InputError
from rlhf.modeling.chat_template import set_end_tokens
from rlhf.modeling.tokens import load_tokenizer
from rlhf.records.fingerprints import text_hash
from rlhf.records.pairs import pairs_of_tiers
from rlhf.records.ranked import read_ranked
from rlhf.records.reliability import run_em
from rlhf.records.schema import Sampling
from rlhf.records.thumbs import pointwise_judgments
from tests.reward.conftest import build_record, export, thumbed
from tests.reward.data.grouping import build_groups
from tests.servers.commands import start_group
from tests.settings import reward_settings


def read(folder, tiny_model, model="me", **changes):
    settings = reward_settings(rankings=folder, model=str(tiny_model), out=folder / "o", **changes)
    return read_data(settings, load_tokenizer(str(tiny_model)), model)


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "tokens").glob("*.arrow")}


@pytest.fixture
def variety(tmp_path):
    """Rankings of all kinds: ties, strengths, scores, thumbs, several annotators, equal prompts."""
    records = [build_record(n) for n in range(9)]
    ranking = records[0].rankings[0]
    records[0] = replace(
        records[0], rankings=(replace(ranking, strengths=(1, 3)), replace(ranking, annotator="b"))
    )
    records[1] = build_record(1, scores=(3, 2.5, 1, 0.25))
    records[2] = thumbed(2, {0: "thumbs-up", 3: "thumbs-down"}, annotator="cé")
    records[3] = replace(records[3], rankings=())
    twin = build_record(4)
    records[5] = replace(twin, prompt=replace(twin.prompt, id="twin"))
    records[6] = replace(
        records[6], rankings=(replace(records[6].rankings[0], flags=("all-bad",)),)
    )
    return export(tmp_path / "variety", [*records, *(build_record(n, "test") for n in (20, 21))])


def test_groups_in_a_file_are_those_in_memory(variety, tiny_model, monkeypatch):
    monkeypatch.setattr(stored_groups, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(groups, "RECORDS_AT_ONCE", 3)
    tokenizer = load_tokenizer(str(tiny_model))
    rules = PointwiseRules({"thumbs": 1.0, "all_bad": 1.0})
    encoder = groups.Encoder.create(tokenizer, 2048, truncate=False, pointwise=rules)
    records = [one for one in read_ranked(variety) if one.prompt.split == "train"]
    expected, counts = build_groups(records, encoder)
    data = read(variety, tiny_model)
    assert len(expected) == len(data.train) == 8
    assert list(data.train) == [data.train[n] for n in range(8)] == expected
    assert data.train[-1] == expected[-1]
    assert list(data.train[2:5]) == expected[2:5]
    assert data.counts["train"] == counts
    assert list(data.counts["train"]) == list(counts)  # the report's bytes
    for column, number in stored_groups.NUMBERS.items():
        assert data.train.numbers(column).tolist() == [number(group) for group in expected]
    by_hash = sorted(expected, key=lambda group: int(text_hash(group.prompt_id), 16))
    assert data.train.take_part(3) == [group for group in expected if group in by_hash[:3]]
    assert data.train.with_pointwise() == [expected[2], expected[5]]


def test_a_second_reading_takes_the_file(variety, tiny_model, monkeypatch):
    first = read(variety, tiny_model, annotator_weights={"b": 0.25})
    monkeypatch.setattr(groups.Encoder, "encode", None)  # nothing may be encoded again
    changes = {"annotator_weights": {"b": 0.25}, "seed": 3, "loss": "plackett_luce"}
    assert read(variety, tiny_model, **changes) == first


def test_another_setting_that_matters_makes_another_file(variety, tiny_model):
    read(variety, tiny_model)
    changed = [
        {"model": "you"},
        {"max_length": 300},
        {"too_long": "truncate"},
        {"reads_thinking": True},
        {"annotator_weights": {"b": 0.5}},
        {"thumbs_weight": 0.5},
    ]
    for number, changes in enumerate(changed, start=2):
        read(variety, tiny_model, **changes)
        assert len(files(variety)) == number
    assert not list((variety / "tokens").glob(".*"))


def add_post_processor(tokenizer, _):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", tokenizer.eos_token_id)]
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer, _: set_end_tokens(tokenizer, [3, 4]),
        lambda tokenizer, _: setattr(tokenizer, "bos_token", "<|im_start|>"),
        add_post_processor,
        lambda _, monkeypatch: monkeypatch.setattr(cache, "is_for_pairs", lambda _: True),
        lambda _, monkeypatch: monkeypatch.setattr(cache, "package_version", lambda _: "9"),
        lambda _, monkeypatch: monkeypatch.setattr(cache, "file_hash", lambda _: "new code"),
    ],
    ids=["end tokens", "special tokens", "backend", "pairs", "versions", "code"],
)
def test_whatever_decides_the_tokens_decides_the_name(variety, tiny_model, monkeypatch, change):
    tokenizer = load_tokenizer(str(tiny_model))
    settings = reward_settings(rankings=variety, model=str(tiny_model), out=variety / "o")
    source = cache._Source(settings, tokenizer, "me", 2048)
    before = source.describe()
    assert source.describe() == before
    change(tokenizer, monkeypatch)
    assert source.describe() != before


@pytest.mark.parametrize("function", [run_em, weights_of, pairs_of_tiers, pointwise_judgments])
def test_the_code_that_judgments_and_their_weights_come_from_decides_the_name(function):
    assert sys.modules[function.__module__] in cache.CODE


def test_a_template_that_tells_the_day_is_read_anew_every_day(variety, tiny_model, monkeypatch):
    tokenizer = load_tokenizer(str(tiny_model))
    settings = reward_settings(rankings=variety, model=str(tiny_model), out=variety / "o")
    source, days = (
        cache._Source(settings, tokenizer, "me", 2048),
        iter(["2026-01-02", "2026-01-03"]),
    )
    monkeypatch.setattr(cache, "date", SimpleNamespace(today=lambda: next(days)))
    assert source.describe()["today"] is None
    tokenizer.chat_template = "{{ strftime_now('%d') }}"
    assert [source.describe()["today"] for _ in range(2)] == ["2026-01-02", "2026-01-03"]


def test_another_export_and_other_flags_are_read_anew(tmp_path, tiny_model):
    records = [build_record(n) for n in range(4)]
    flagged = replace(records[0].rankings[0], flags=(f"unsafe@{records[0].responses[0].id}",))
    records[0] = replace(records[0], rankings=(flagged,))
    export(tmp_path, records)
    read(tmp_path, tiny_model)
    read(tmp_path, tiny_model, thumbs_down_flags=("unsafe",))
    assert len(files(tmp_path)) == 2
    export(tmp_path, [build_record(n) for n in range(4)])
    assert not any(group.pointwise for group in read(tmp_path, tiny_model).train)
    assert len(files(tmp_path)) == 3


def test_another_template_is_read_anew(variety, tiny_model):
    plain = read(variety, tiny_model)
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    settings = reward_settings(rankings=variety, model=str(tiny_model), out=variety / "o")
    short = read_data(settings, tokenizer, "me")
    assert len(files(variety)) == 2
    assert len(short.train[0].prompt) < len(plain.train[0].prompt)


@pytest.mark.parametrize("broken", ["arrow", "json", "cut", "forged"])
def test_a_broken_file_is_made_again(variety, tiny_model, capsys, broken):
    whole = list(read(variety, tiny_model).train)
    (path,) = (variety / "tokens").glob("*.arrow")
    content, facts = path.read_bytes(), path.with_suffix(".json").read_text()
    if broken == "arrow":
        place = content.index(b"bob") if b"bob" in content else content.index(b"ann")
        path.write_bytes(content[:place] + b"eve" + content[place + 3 :])
    elif broken == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif broken == "json":
        path.with_suffix(".json").write_text(facts[:40])
    else:  # with its own hash
        path.write_bytes(b"no Arrow file")
        forged = json.loads(facts) | {"hash": cache.file_hash(path)}
        path.with_suffix(".json").write_text(json.dumps(forged))
    assert list(read(variety, tiny_model).train) == whole
    assert f"{path} is broken, and is made again." in capsys.readouterr().err
    assert (path.read_bytes(), path.with_suffix(".json").read_text()) == (content, facts)


def test_a_changed_export_is_refused_also_with_a_file(variety, tiny_model):
    read(variety, tiny_model)
    with (variety / "train.jsonl").open("a") as stream:
        stream.write("\n")
    with pytest.raises(InputError, match=r"do not match its manifest.json \(content hash differs"):
        read(variety, tiny_model)


def test_a_refused_export_leaves_no_file(variety, tiny_model):
    with pytest.raises(InputError, match="8 of 9 prompts with their responses are longer than 20"):
        read(variety, tiny_model, max_length=20)
    assert not list((variety / "tokens").iterdir())


def test_an_export_that_cannot_be_written_to_is_read_beside_the_run(tmp_path, tiny_model):
    if os.geteuid() != 0:
        pytest.skip("mounting a disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode()}")
    try:
        export(disk, [build_record(n) for n in range(4)])
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        settings = reward_settings(rankings=disk, model=str(tiny_model), out=tmp_path / "run")
        tokenizer = load_tokenizer(str(tiny_model))
        first, again = (read_data(settings, tokenizer, "me") for _ in range(2))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert len(first.train) == 3
    assert first == again
    assert len(list((tmp_path / ".run.tokens").glob("*.arrow"))) == 1


GROUP = """
import os, sys
from pathlib import Path
from reward.data import cache
from reward.data.loading import read_data
from reward.data.reliability import weights_of
from rlhf.errors import InputError
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start
from tests.settings import reward_settings

rankings, model = sys.argv[1:]
accelerator = start("fp32", 0)
make, rank = cache._make, accelerator.process_index
made = []
cache._make = lambda *given: made.append(1) or make(*given)
words = []
for changes in ({}, {}, {"annotator_weights": "auto"}):
    settings = reward_settings(rankings=Path(rankings), model=model, out=Path("o"), **changes)
    try:
        data = read_data(settings, load_tokenizer(model), "me")
        words.append((len(data.train), sum(sum(one.prompt) for one in data.train)))
    except InputError as error:
        words.append(error.problem[:24])
os.write(1, f"{rank} made {len(made)} {words}\\n".encode())
accelerator.end_training()
"""


def test_of_two_processes_the_first_makes_the_file(tmp_path, tiny_model):
    export(tmp_path / "rankings", [build_record(n) for n in range(6)])
    program = tmp_path / "program.py"
    program.write_text(GROUP, encoding="utf-8")
    group = start_group(2, program, tmp_path / "rankings", tiny_model)
    said = "".join(process.communicate()[0] for process in group)
    assert [process.returncode for process in group] == [0, 0]
    train = read(tmp_path / "rankings", tiny_model).train
    tokens = (5, sum(sum(group.prompt) for group in train))
    found = [tokens, tokens, "--annotator-weights auto"]  # nobody shares a prompt: refused
    lines = [line for line in said.splitlines() if " made " in line]
    # the first one also reads the third time, which fails
    assert sorted(lines) == [f"0 made 2 {found}", f"1 made 0 {found}"]


def test_reference_outputs_are_untruncated_samples_of_the_same_model(
    tmp_path, tiny_model, monkeypatch
):
    records = []
    for number in range(6):
        record = build_record(number)
        sampled = [
            replace(record.responses[0], model_fingerprint="me", sampling=Sampling()),
            replace(record.responses[1], model_fingerprint="me", sampling=Sampling(top_p=0.9)),
            replace(record.responses[2], model_fingerprint="you", sampling=Sampling()),
            replace(record.responses[3], model_fingerprint="me", sampling=Sampling(seed=1)),
        ]
        records.append(replace(record, responses=tuple(sampled)))
    export(tmp_path, records)
    found = read(tmp_path, tiny_model).reference
    ids = [record.prompt.id for record in records]
    assert [group.prompt_id for group in found] == ids
    assert [len(group.responses) for group in found] == [2] * 6
    assert read(tmp_path, tiny_model, model="nobody").reference == []
    monkeypatch.setattr(cache, "MAX_REFERENCE_OUTPUTS", 4)
    limited = read(tmp_path, tiny_model, max_length=300).reference
    # every third of the twelve: the first of prompts 0 and 3, the second of prompts 1 and 4
    assert [group.prompt_id for group in limited] == [ids[0], ids[1], ids[3], ids[4]]
    expected = [found[0].responses[0], found[1].responses[1], found[3].responses[0]]
    assert [group.responses[0] for group in limited[:3]] == expected
