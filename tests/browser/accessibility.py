"""Whether everybody can use a page, as far as axe can tell."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page


def require_accessible(page: Page, where: str) -> None:
    """No rule of axe is broken, the minor ones and contrast (WCAG AA) included."""
    page.wait_for_timeout(250)  # what moves has come to rest
    violations = Axe().run(page).response["violations"]
    bad = [
        (where, rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in violations
    ]
    assert bad == []


def require_accessible_in_both(page: Page, where: str) -> None:
    """No rule is broken in the light or in the dark."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        assert is_dark == (scheme == "dark")
        require_accessible(page, f"{where}, {scheme}")
