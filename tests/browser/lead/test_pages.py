"""A lead imports a hostile file, invites a person and exports, in a browser without network."""

import json
import re
import zipfile

import pytest
from playwright.sync_api import Page, Route, expect

from labeling_app.annotators.users import Users
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.store import Store
from rlhf.records.schema import Message, Prompt, Response
from tests.browser.accessibility import require_accessible
from tests.browser.lead.pages import sign_in
from tests.labeling_app.data_io.lines import ARGILLA
from tests.labeling_app.served import TITLE, serve_and_judge

pytestmark = pytest.mark.browser

RUNS = "<img src=x onerror='window.hacked = 1'>${window.hacked = 1}"
LINES = [
    {"prompt": "Which one?", "responses": ["good", "bad"], "tiers": [[0], [1]]},
    {"prompt": "And here?", "responses": ["yes", "no"]},  # the lead's board takes it
    {"prompt": "And there?", "responses": ["yes", "no"]},
]


# A desk in the light, a phone in the dark.
SIZES = {"light": {"width": 1100, "height": 900}, "dark": {"width": 390, "height": 844}}
AT_A_DESK = pytest.mark.parametrize("lead", ["light"], indirect=True)


@pytest.fixture(params=["dark"])
def lead(request, serve, open_page, tmp_path):
    """A lead's browser, signed in, on the page Data: a phone if a test asks for nothing else."""
    with Store(tmp_path / "labels.db") as store:
        Users(store).add("lea", "lead", "long enough")
    app = serve(LINES)
    page = open_page(
        app.url,
        lambda page: sign_in(page, app, "lea"),
        "lead/data",
        color_scheme=request.param,
        viewport=SIZES[request.param],
    )
    page.wait_for_selector("nav a[aria-current]:has-text('Data')")
    return app, page


def require_good_looks(page: Page, where: str) -> None:
    """At a desk and on a phone, where it stays, a page is accessible and as wide as the window."""
    for scheme, size in SIZES.items():
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(size)
        require_accessible(page, f"{where}, {scheme}")
        assert no_sideways_scrolling(page), (where, scheme)


def no_sideways_scrolling(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_lead_imports_previews_and_exports(lead, tmp_path):
    app, page = lead
    page.goto(app.url)
    page.click(".rb-lead")
    page.wait_for_selector("nav a[aria-current]:has-text('Data')")
    require_good_looks(page, "data")
    file = tmp_path / f"{RUNS.replace('/', '')[:60]}.jsonl"
    rows = [{"prompt": f"{RUNS} {n}", "responses": [RUNS, "two"]} for n in range(60)]
    file.write_text("\n".join(map(json.dumps, [*rows, {"prompt": 3}])), encoding="utf-8")
    page.set_input_files("#file", file)
    page.click("text=Preview")
    page.wait_for_selector(".preview:visible")
    assert "61 lines, 1 bad" in page.inner_text(".preview h3")
    assert page.inner_text(".splits") == "60 train prompts and no test prompts."
    assert RUNS in page.inner_text(".preview tbody")
    require_good_looks(page, "preview")
    page.screenshot(path=tmp_path / "preview.png", full_page=True)
    page.check("#leave-out")
    page.click("[data-act=import]")
    page.wait_for_selector(".said:has-text('60 prompts, 120 responses')")
    assert page.inner_text(".numbers dd >> nth=0") == "63"
    assert page.evaluate("window.hacked") is None
    page.fill("#pasted", "Why is the sky blue?\nWhat is rain?")
    page.click("text=Preview")
    page.wait_for_selector(".preview:visible")
    page.click("[data-act=import]")
    page.wait_for_selector(".said:has-text('Imported pasted.jsonl: 2 prompts.')")
    with page.expect_download() as download:
        page.click("text=Download")
    with zipfile.ZipFile(download.value.path()) as files:
        assert json.loads(files.read("manifest.json"))["rankings"] == 1
    page.click("text=Back up now")
    page.wait_for_selector(".said:has-text('Saved backups/labels-')")
    with Store(app.db) as store:
        assert store.counts()["prompts"] == 65


@AT_A_DESK
def test_a_pasted_array_is_an_export_and_not_prompts(lead):
    _, page = lead

    def paste(text: str) -> str:
        page.fill("#pasted", text)
        page.click("text=Preview")
        page.wait_for_selector(".preview:visible, .problem:not(:empty)")
        shown = page.inner_text(".preview h3") if page.is_visible(".preview") else ""
        return shown or page.inner_text(".problem")

    exported = [{**ARGILLA, "fields": {**ARGILLA["fields"], "prompt": f"Q{n}"}} for n in range(2)]
    assert paste(json.dumps(exported, indent=2)) == "pasted.json: 2 lines, 0 bad"
    rows = page.locator(".preview tbody tr")
    assert [row.split("\t")[1] for row in rows.all_inner_texts()] == ["Q0", "Q1"]
    assert "train, pasted" in rows.first.inner_text()
    page.click("[data-act=import]")
    page.wait_for_selector(".said:has-text('Imported pasted.json: 2 prompts')")
    assert paste('["One?", "Two?"]') == "pasted.jsonl: 2 lines, 0 bad"
    assert paste('{\n "prompt": "Over\\nlines?"\n}') == "pasted.jsonl: 1 line, 0 bad"
    assert paste("[INST] Why? [/INST]\nAnd?") == "pasted.jsonl: 2 lines, 0 bad"
    assert paste('prompt,chosen,rejected\n"Why, then?",So,No') == "pasted.csv: 1 line, 0 bad"
    assert page.locator(".preview tbody td").nth(3).inner_text() == "A > B"
    assert paste("Question;A;B;Best\nWhy?;So;No;b") == "pasted.csv: 1 line, 0 bad"
    assert page.locator(".preview tbody td").nth(3).inner_text() == "B > A"
    assert paste("\nprompt\ta\tb\tbest\nWhy?\tSo\tNo\ta") == "pasted.csv: 1 line, 0 bad"
    assert paste("Is it dry, or wet?\nWhy?") == "pasted.jsonl: 2 lines, 0 bad"
    assert paste("Question, what is 2+2?\nWhy?") == "pasted.jsonl: 2 lines, 0 bad"
    assert paste("Fix:\tfoo()\nWhy?") == "pasted.jsonl: 2 lines, 0 bad"
    assert paste(f"{json.dumps(exported)[:-1]} 3]").startswith("pasted.json: item 3: a comma is")


@pytest.mark.slow  # a preview reads for three seconds
@AT_A_DESK
def test_a_bad_line_beyond_the_preview_can_be_left_out(lead, tmp_path):
    _, page = lead
    file = tmp_path / "long.jsonl"
    file.write_text("\n".join([json.dumps({"prompt": "x" * 20})] * 400_000 + ['{"prompt": 3}']))
    page.set_input_files("#file", file)
    page.click("text=Preview")
    page.wait_for_selector(".preview:visible")
    assert "the first" in page.inner_text(".preview h3")
    page.check("#leave-out")
    page.click("[data-act=import]")
    page.wait_for_selector(".left-out li:has-text('long.jsonl:400001: ')", timeout=300_000)
    require_accessible(page, "lines left out")
    page.screenshot(path=tmp_path / "left-out.png", full_page=True)


@AT_A_DESK
def test_an_import_is_followed_after_a_reload_and_a_lost_piece_is_sent_again(lead, tmp_path):
    app, page = lead
    file = tmp_path / "many.jsonl"
    rows = [{"prompt": f"{n}? {'x' * 300}", "responses": ["one", "two"]} for n in range(4_000)]
    file.write_text("\n".join(map(json.dumps, rows)))
    lost = []

    def lose_once(route: Route) -> None:
        lost.append(route.request.url)
        route.abort() if len(lost) == 1 else route.continue_()

    page.route(re.compile("/lead/data/upload/.*/1000000$"), lose_once)
    page.set_input_files("#file", file)
    page.check("[name=replace]")
    page.select_option("#kind", "signal")
    page.click("text=Preview")
    page.wait_for_selector(".preview:visible")
    assert len(lost) == 2
    page.click("[data-act=import]")
    page.wait_for_selector(".progress:has-text('% read')")
    page.reload()
    page.wait_for_selector(".progress:has-text('Importing many.jsonl: ')")
    expect(page.locator(".progress")).to_contain_text(re.compile(r": [1-9]\d? % read, [1-9]"))
    page.screenshot(path=tmp_path / "importing.png", full_page=True)
    require_accessible(page, "importing")
    page.wait_for_selector(".said:has-text('Imported many.jsonl: 4,000 prompts, 8,000 responses.')")
    page.wait_for_selector(".numbers dd:has-text('4,003')")
    with Store(app.db) as store:
        assert store.counts()["prompts"] == 4_003


def test_an_invited_person_sets_a_password_and_ranks(lead, open_page):
    app, page = lead
    page.click("nav a:has-text('People')")
    page.wait_for_selector("h1:has-text('People')")
    page.fill("#invite-name", f"ann {RUNS[:30]}")
    page.keyboard.press("Enter")
    page.wait_for_selector(".secret:visible")
    require_good_looks(page, "people")
    link = page.input_value(".secret input")
    assert link.startswith(app.url + "invitation#")
    warning = page.locator(".secret .local")  # the address begins with http://127.0.0.1
    expect(warning).to_contain_text("This link works on this machine only.")
    expect(warning).to_contain_text("start rlhf label with --host 0.0.0.0")
    assert page.locator("#invite-role option").all_inner_texts() == ["annotator"]
    ann = open_page(app.url)
    ann.goto(link)
    ann.wait_for_selector("form:visible")
    expected = f"ann {RUNS[:30]}, you are invited as annotator. Choose a password."
    assert ann.inner_text(".said") == expected
    require_accessible(ann, "invitation")
    ann.keyboard.type("my own password")  # the field has the focus
    ann.keyboard.press("Enter")
    ann.wait_for_selector(".said:has-text('Your password is set.')")
    used = open_page(app.url)
    used.goto(link)
    used.wait_for_selector(".problem:has-text('it was used, replaced or is older than seven days')")
    assert used.locator("form").is_hidden()
    assert used.locator("a:has-text('Sign in')").is_visible()
    require_accessible(used, "a used link")
    ann.keyboard.press("Enter")  # the link to the sign-in has the focus
    ann.wait_for_url("**/sign-in")
    ann.fill("#name", f"ann {RUNS[:30]}")
    ann.fill("#password", "my own password")
    ann.keyboard.press("Enter")
    ann.wait_for_selector(".rb-list .rb-card")
    assert ann.locator(".rb-lead").is_hidden()
    assert ann.goto(app.url + "lead/people").status == 403
    page.reload()
    page.click("[aria-label^='Disable ann']")
    page.wait_for_selector(".said:has-text('can no longer sign in')")
    ann.goto(app.url)
    ann.wait_for_url("**/sign-in")


@AT_A_DESK
def test_a_link_stays_until_it_is_copied_or_another_takes_its_place(lead):
    app, page = lead
    page.goto(app.url + "lead/people")
    links: list[str] = []

    def shown_after(link_of: str, *names: str) -> None:
        """Make a link, and see of whom there are links, the newest first."""
        page.fill("#invite-name", link_of)
        page.keyboard.press("Enter")
        expect(page.locator(".secret p:first-child")).to_have_text(
            [re.compile(f"^{name} can set a password with this link") for name in names]
        )
        expect(page.locator(".secret input").first).not_to_have_value(links[-1] if links else "")
        links.append(page.input_value(".secret input"))

    shown_after("ann", "ann")
    shown_after("bob", "bob", "ann")
    assert page.locator(".secret input").nth(1).input_value() == links[0]
    require_good_looks(page, "two links")
    page.fill("#add-name", "lea")  # is there: what is refused takes no link away
    page.keyboard.press("Enter")
    page.wait_for_selector(".problem:not(:empty)")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # no https
    page.locator(".secret button").nth(1).click()
    expect(page.locator(".secret button")).to_have_text(["Copy", "Copied"])
    shown_after("cem", "cem", "bob")
    shown_after("bob", "bob", "cem")
    assert page.locator(".secret input").nth(1).input_value() == links[2]
    page.click("[aria-label='Withdraw cem']")
    page.wait_for_selector(".said:has-text('The link for cem no longer works.')")
    expect(page.locator(".secret")).to_have_count(1)
    assert page.input_value(".secret input") == links[3]
    assert len(set(links)) == 4


def test_a_lead_puts_people_in_a_team_and_gives_it_a_source(lead):
    app, page = lead
    page.click("nav a:has-text('People')")
    page.fill("[aria-label='Team of lea']", "night shift")
    page.keyboard.press("Enter")
    page.wait_for_selector(".said:has-text('lea is in team night shift.')")
    page.click("summary:has-text('in: everybody')")
    page.check("[name=teams][value='night shift']")
    require_good_looks(page, "people with a team")
    page.click("[aria-label='Save who gets in']")
    page.wait_for_selector(".said:has-text('Tasks of in go to team night shift (lea) alone.')")
    page.wait_for_selector("summary:has-text('in: team night shift (lea) alone')")
    page.goto(app.url + "lead/people?source=nothing")
    page.fill("#find-source", "I")
    page.keyboard.press("Enter")
    page.wait_for_selector("summary:has-text('in: team night shift (lea) alone')")
    assert page.input_value("#find-source") == "I"
    require_good_looks(page, "people, one source found")


SENT_AT_ONCE = """
new MutationObserver((_, observer) => {
  const field = document.querySelector("[aria-label='Team of lea']");
  if (!field) return;
  observer.disconnect();
  field.value = "night shift";
  field.form.requestSubmit();
}).observe(document, { childList: true, subtree: true });
"""


def test_a_form_sent_before_the_page_has_loaded_is_kept(lead):
    app, page = lead
    page.add_init_script(SENT_AT_ONCE)
    page.goto(app.url + "lead/people")
    page.wait_for_selector(".said:has-text('lea is in team night shift.')", timeout=20_000)
    assert page.url == app.url + "lead/people"


def test_a_lead_edits_the_rubric_and_the_board_shows_it(lead):
    app, page = lead
    page.click("nav a:has-text('Rubric')")
    page.wait_for_selector("h1:has-text('Rubric')")
    page.fill("#text", f"Prefer **true** answers. {RUNS}")
    page.wait_for_selector(".shown strong:has-text('true')")
    page.click("text=Save")
    page.wait_for_selector(".said:has-text('Saved')")
    page.wait_for_selector(".version summary:has-text('shown now')")
    require_good_looks(page, "rubric")
    page.fill("#text", "Something else")
    page.click(".version summary")
    page.click("text=Edit this one")
    assert page.input_value("#text").startswith("Prefer **true**")
    page.goto(app.url)
    page.wait_for_selector(".rb-rubric strong:has-text('true')")
    assert page.evaluate("window.hacked") is None


def rank_and_judge(store: Store) -> None:
    """Two people disagree, mostly on twelve responses; users judge policies that are served."""
    for number in range(4):
        chat = (Message(role="user", content=f"{number} {'y' * 200}"),)
        prompt = Prompt.create(chat, "train", "in")
        store.add_prompts([prompt])
        store.add_responses(
            Response(id=f"{number}-{n}", prompt_id=prompt.id, text=f"{n:02} {RUNS}", model="m")
            for n in range(12)
        )
    set_overlap(store.connections, 2)
    queue = TaskQueue(store)
    for name, falls in ((f"ann {RUNS}", False), ("b" * 90, True)):
        Users(store).add(name, "annotator", "long enough")
        while task := queue.next_task(name):
            places = sorted(range(len(task.texts)), key=task.texts.__getitem__, reverse=falls)
            tiers = tuple((place,) for place in places)
            queue.submit(name, Submission(id=f"{name[0]}{task.id}", task_id=task.id, tiers=tiers))
    serve_and_judge(store, f"{RUNS}{'x' * 90}", policy=(30, 70), against=(60, 40))
    serve_and_judge(store, "base", policy=(1, 0), against=(0, 0))


def test_what_people_like_better_is_readable_and_the_page_fits_a_phone(lead, tmp_path):
    app, page = lead
    with Store(app.db) as store:
        rank_and_judge(store)
    page.click("nav a:has-text('Quality')")
    expect(page.get_by_role("heading", name=TITLE)).to_be_visible()
    expect(page.get_by_text(f"People like {RUNS}")).to_be_visible()
    expect(page.locator(".bars li")).to_have_count(12)
    require_good_looks(page, "quality with served policies")
    page.screenshot(path=tmp_path / "quality.png", full_page=True)
    assert page.evaluate("window.hacked") is None
