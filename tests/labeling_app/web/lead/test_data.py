"""The page Data: pieces of an upload, the preview, import, export and backup."""

import asyncio
import gzip
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path
from tempfile import gettempdir

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from labeling_app.data_io.reading import Part, read_rows
from labeling_app.db.store import Store
from rlhf.cli import main
from tests.labeling_app.conftest import fill_up
from tests.labeling_app.web.lead.files import GOOD, HOSTILE, importing, jsonl, upload


def left_over() -> list[str]:
    """Files that uploads and exports have left."""
    return [path.name for path in Path(gettempdir()).glob("rlhf-lead-files-*/*")]


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Temporary files of this test alone: other tests import meanwhile."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def test_nothing_is_left_of_an_imported_file_and_a_downloaded_export(own_folder, ask, import_lines):
    before = left_over()

    async def run(client: httpx.AsyncClient) -> list[list[str]]:
        _, state = await importing("mine.jsonl", jsonl(GOOD))(client)
        assert state["say"].startswith("Imported")
        header = {"content-type": "application/x-www-form-urlencoded"}
        packed = await client.post("/lead/data/export", content="format=trl", headers=header)
        assert packed.status_code == 200
        return left_over()

    assert ask(run) == before


def test_a_later_export_replaces_the_earlier_under_one_name_with_the_command_line(
    ask, store, tmp_path
):
    def content(*annotators: str) -> bytes:
        return jsonl(*({**GOOD, "annotator": name} for name in annotators))

    file = tmp_path / "project.json"
    file.write_bytes(content("ann", "bob"))
    assert main(["import", str(file), "--db", str(store.connections.path)]) == 0
    _, state = ask(importing("project.jsonl", content("ann"), replace="yes"))
    assert state["say"] == (
        "project.jsonl: nothing in it is new. Earlier rankings of this source: 1 replaced and no "
        "longer counted, 1 unchanged."
    )


def test_nothing_is_replaced_under_a_new_name_and_a_kind_can_be_chosen(ask, store, import_lines):
    import_lines({**GOOD, "annotator": "ann"})
    chosen = {"replace": "yes", "kind": "ai", "annotator": "judge"}
    _, state = ask(importing("else.jsonl", jsonl(GOOD), **chosen))
    assert state["say"].endswith(
        "Nothing was replaced: no earlier import has this source. To replace another one, name it "
        "as the source: more."
    )
    [record] = store.ranked_prompts()
    said = [(one.annotator, one.kind) for one in record.rankings]
    assert said == [("ann", "human"), ("judge", "ai")]


@pytest.mark.parametrize("name", ["many.jsonl", "many.json", "many.jsonl.gz", "many.csv"])
def test_how_much_of_a_file_is_read_is_said(name, tmp_path):
    rows = [{"prompt": f"{n} " + 4_000 * "x"} for n in range(100)]
    content = (
        b"[" + jsonl(*rows).replace(b"\n", b",") + b"]" if name.endswith("json") else jsonl(*rows)
    )
    if name.endswith("csv"):
        content = "\n".join(["prompt", *(row["prompt"] for row in rows)]).encode()
    file, said = tmp_path / name, []
    file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert len(list(read_rows(file, Part(), said.append))) == 100
    assert said == sorted(said)
    assert (said[0] > 0, said[-1]) == (True, 1.0)
    if name in ("many.jsonl", "many.csv"):  # read in pieces of 8 KiB
        assert said[49] == pytest.approx(0.5, abs=0.03)


def test_the_state_of_an_import_has_the_share_that_its_job_has_written(ask, store):
    async def run(client: httpx.AsyncClient) -> list[object]:
        rows = [{"prompt": f"{n}?", "responses": ["a", "b"]} for n in range(4_000)]
        one = await upload(client, "mine.jsonl", jsonl(*rows))
        await client.post("/lead/data/import", json={"id": one})
        assert (
            'class="progress" role="status" data-running' in (await client.get("/lead/data")).text
        )
        shares = []
        while not (state := (await client.get("/lead/data/import")).json())["over"]:
            shares.append(state["share"])
            assert state["name"] == "mine.jsonl"
            await asyncio.sleep(0.02)
        assert "data-running" not in (await client.get("/lead/data")).text
        return [shares, state["say"], [name for name in left_over() if name.startswith(one)]]

    shares, said, left = ask(run)
    assert shares == sorted(shares)
    assert any(0 < share < 1 for share in shares)
    assert said == "Imported mine.jsonl: 4,000 prompts, 8,000 responses."
    assert left == []


@pytest.mark.parametrize(
    "fields", [{"split": "dev"}, {"kind": "robot"}, {"source": "x" * 201}, {"annotator": "x" * 201}]
)
def test_what_is_chosen_for_a_file_is_checked(fields, ask, store):
    async def run(client: httpx.AsyncClient) -> list[int]:
        chosen = {"id": await upload(client, "mine.jsonl", jsonl(GOOD)), **fields}
        sent = [
            await client.post(f"/lead/data/{name}", json=chosen) for name in ("preview", "import")
        ]
        return [answer.status_code for answer in sent]

    assert ask(run) == [400, 400]
    assert store.counts()["prompts"] == 0


def test_bad_lines_are_left_out_if_asked(ask, store):
    content = jsonl(GOOD, {"prompt": 3}, {"prompt": "Hi?"})
    _, state = ask(importing("mine.jsonl", content, leave_out="yes"))
    assert state["say"].endswith(" Lines left out: 1.")
    [left_out] = state["left_out"]
    assert left_out.startswith("mine.jsonl:2: ")
    assert store.counts()["prompts"] == 2


@pytest.mark.parametrize(
    ("num_bad", "length", "last"), [(100, 100, "mine.jsonl:101: "), (1_102, 101, "and 1,002 more")]
)
def test_a_list_of_bad_lines_says_how_many_it_leaves_out(num_bad, length, last, ask):
    content = jsonl(GOOD, *[{"prompt": 3}] * num_bad)
    shown, state = ask(importing("mine.jsonl", content, leave_out="yes"))
    for listed in (shown["first_bad"], state["left_out"]):
        assert len(listed) == length
        assert listed[-1].startswith(last)
    assert state["say"].endswith(f" Lines left out: {num_bad:,}.")


def test_the_last_import_and_what_it_left_out_stay_on_the_page(ask):
    async def run(client: httpx.AsyncClient) -> str:
        content = jsonl(GOOD, {"prompt": 3, "note": HOSTILE})
        await importing("mine.jsonl", content, leave_out="yes")(client)
        return (await client.get("/lead/data")).text

    page = ask(run)
    assert "Your last import: Imported mine.jsonl: 1 prompt," in page
    assert "<li>mine.jsonl:2: " in page


def test_one_of_anything_is_said_in_the_singular(ask, store):
    gold = {"prompt": "Why?", "responses": ["a", "b"], "tiers": [[0], [1]], "purpose": "gold"}
    _, state = ask(importing("mine.jsonl", jsonl(GOOD, gold)))
    assert state["say"] == "Imported mine.jsonl: 2 prompts, 4 responses, 1 ranking, 1 check."
    other = {**gold, "responses": ["c", "d"]}
    _, state = ask(importing("more.jsonl", jsonl(other, {"prompt": "New?"})))
    assert " 1 check not made: " in state["say"]
    [shown] = ask([("GET", "/lead/quality", None)])
    assert "Measured on the latest 1 ranking." in shown.text


def test_a_piece_that_a_full_disk_took_in_part_is_written_again(small_disk, monkeypatch, ask):
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))

    async def run(client: httpx.AsyncClient) -> list[httpx.Response]:
        content = jsonl(*[GOOD] * 400)
        begun = await client.post(
            "/lead/data/upload", json={"name": "m.jsonl", "size": len(content)}
        )
        one = begun.json()["id"]
        fill_up(small_disk)
        os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - 8192)
        refused = await client.post(f"/lead/data/upload/{one}/0", content=content)
        (small_disk / "filler").unlink()
        again = await client.post(f"/lead/data/upload/{one}/0", content=content)
        return [refused, again, await client.post("/lead/data/preview", json={"id": one})]

    refused, again, shown = ask(run)
    assert refused.status_code == 507
    assert "No space left on device" in refused.json()["error"]
    assert again.status_code == 200
    assert (shown.json()["lines"], shown.json()["bad_lines"]) == (400, 0)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_are_imported(suffix, ask, store):
    table = pa.table({"prompt": ["Hi?"], "chosen": ["Hello"], "rejected": ["No"]})
    packed = io.BytesIO()
    pq.write_table(table, packed)
    content = b"prompt,chosen,rejected\nHi?,Hello,No\n" if suffix == "csv" else packed.getvalue()
    shown, state = ask(importing(f"t.{suffix}", content))
    assert shown["rows"][0]["rankings"] == ["A > B"]
    assert state["say"] == f"Imported t.{suffix}: 1 prompt, 2 responses, 1 ranking."
    assert store.counts()["rankings"] == 1


def test_a_broken_file_is_refused_by_its_name(ask, store):
    shown, state = ask(importing("t.parquet", b"PAR1 and nothing that belongs there PAR1"))
    assert shown["error"].startswith("t.parquet:1: cannot be read as parquet")
    assert gettempdir() not in shown["error"] + state["error"]


@pytest.mark.parametrize(
    ("name", "size", "problem"),
    [
        ("mine.exe", 5, "'mine.exe' is not a file that can be imported"),
        ("mine.jsonl", 3_000_001, "mine.jsonl has 3,000,001 bytes. Upload 1 to 3,000,000 bytes."),
        ("mine.jsonl", 0, "mine.jsonl has 0 bytes"),
    ],
)
def test_other_files_are_refused(name, size, problem, ask):
    [answer] = ask([("POST", "/lead/data/upload", {"name": name, "size": size})])
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(problem)


def test_an_upload_is_bounded_and_private(ask):
    async def run(client: httpx.AsyncClient) -> list[int]:
        begun = await client.post("/lead/data/upload", json={"name": "../../x.jsonl", "size": 10})
        address = f"/lead/data/upload/{begun.json()['id']}"
        [path] = Path(gettempdir()).glob(f"rlhf-lead-files-*/{begun.json()['id']}.jsonl")
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        sent = [
            await client.post(f"{address}/0", content=b"x" * 11),  # more than was announced
            await client.post(f"{address}/5", content=b"x"),  # a gap
            await client.post(f"{address}/0", content=b"x" * 1_000_001),
            await client.post(f"{address}/0", content=b"x" * 4),
            await client.post(f"{address}/0", content=b"x" * 4),  # again: a retry
            await client.post("/lead/data/preview", json={"id": begun.json()["id"]}),
        ]
        assert path.read_bytes() == b"xxxx"
        return [answer.status_code for answer in sent]

    assert ask(run) == [400, 400, 413, 200, 200, 400]


def test_an_export_is_a_zip_with_pseudonyms(ask, store, import_lines):
    import_lines({**GOOD, "annotator": "ann"})

    async def run(client: httpx.AsyncClient) -> list[httpx.Response]:
        header = {"content-type": "application/x-www-form-urlencoded"}
        asked = ("format=trl", "format=nothing", "format=kto", "")
        return [
            await client.post("/lead/data/export", content=form, headers=header) for form in asked
        ]

    packed, unknown, *_ = ask(run)
    assert packed.headers["content-disposition"] == 'attachment; filename="rankings-trl.zip"'
    with zipfile.ZipFile(io.BytesIO(packed.content)) as files:
        [row] = map(json.loads, files.read("train.jsonl").splitlines())
        assert json.loads(files.read("manifest.json"))["rankings"] == 1
    assert (row["chosen"], row["rejected"]) == ("good", "bad")
    assert unknown.status_code == 400
    assert "There is no format &#39;nothing&#39;" in unknown.text


def test_a_backup_is_a_whole_private_database_beside_the_first(ask, store, import_lines):
    import_lines(GOOD)
    [answer] = ask([("POST", "/lead/data/backup", {"now": "yes"})])
    assert answer.json()["say"].endswith("beside the database: 1 prompt, 1 ranking.")
    [copy] = (store.connections.path.parent / "backups").iterdir()
    assert copy.stat().st_mode & 0o777 == 0o600
    with Store(copy) as opened:
        assert opened.counts()["rankings"] == 1
