"""The templates of the lead's pages."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf.records.wording import counted

PAGES = Path(__file__).parents[1] / "pages"


def load_templates() -> Environment:
    """Those of `pages/`: every value is escaped, and a missing one is an error."""
    found = Environment(loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined)
    found.filters["counted"] = counted
    return found
