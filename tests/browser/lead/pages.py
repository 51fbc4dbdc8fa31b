"""What a lead does on the pages Data, People and Quality, in the tests of whole rounds."""

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from labeling_app.annotators.users import Users
from labeling_app.db.store import Store
from labeling_app.web.access.cookies import make_cookie
from labeling_app.web.access.sign_in import COOKIE
from tests.browser.accessibility import require_accessible
from tests.browser.conftest import App

PASSWORD = "long enough"
SECONDS = 300.0  # for a stage on a busy machine


def sign_in(page: Page, app: App, name: str) -> None:
    """Give a browser the cookie of somebody's session; test_sign_in.py is about the form."""
    with Store(app.db) as store:
        session = make_cookie(store.secret, name, Users(store).get(name).epoch)
    page.context.add_cookies([{"name": COOKIE, "value": session, "url": app.url}])


def wait_longer(page: Page) -> None:
    page.set_default_timeout(1000 * SECONDS)


def upload(lead: Page, file: Path) -> None:
    lead.set_input_files("#file", file)
    lead.click("text=Preview")
    lead.wait_for_selector(".preview:visible")
    require_accessible(lead, "data")
    lead.click("[data-act=import]")
    lead.wait_for_selector(".said:has-text('60 prompts')")


def invite(lead: Page, app: App, open_page: Callable[..., Page], name: str) -> Page:
    """A browser in which somebody has used the link that a lead has made for them."""
    lead.goto(app.url + "lead/people")
    lead.fill("#invite-name", name)
    lead.keyboard.press("Enter")
    lead.wait_for_selector(".secret:visible")
    require_accessible(lead, "people")
    page = open_page(app.url, wait_longer)
    page.goto(lead.input_value(".secret input"))
    page.wait_for_selector(f".said:has-text('{name}, you are invited')")
    page.fill("#password", PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_selector(".said:has-text('Your password is set.')")
    page.goto(app.url)
    page.fill("#name", name)
    page.fill("#password", PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url(app.url)
    return page


def agreement(lead: Page, app: App, num_rankings: int) -> str:
    """What the page Quality says of pairs, once it has measured that many rankings."""
    wanted = lead.get_by_text(f"Measured on the latest {num_rankings} rankings.")
    for _ in range(100):
        lead.goto(app.url + "lead/quality")
        if wanted.count():
            break
        lead.wait_for_timeout(200)
    expect(wanted).to_be_visible()
    require_accessible(lead, "quality")
    return lead.locator("dt:has-text('agreement on pairs') + dd").inner_text()
