"""The templates of the lead's pages."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf.records.wording import counted

PAGES = Path(__file__).parents[1] / "pages"


def load_templates() -> Environment:
    """Those of `pages/`: every value is escaped, and a missing one is an error."""
    templates = Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined
    )
    templates.filters["counted"] = counted
    return templates
