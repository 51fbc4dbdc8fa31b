"""Which requests come from the app's own pages."""

import pytest

from labeling_app.web.access.origins import is_own_origin


@pytest.mark.parametrize(
    ("method", "origin", "site", "own"),
    [
        ("GET", "https://evil.example", "cross-site", True),
        ("POST", "http://label:7860", "same-origin", True),
        ("POST", "https://labels.example", "same-origin", True),  # a proxy with its own Host
        ("POST", "http://label:7860", "", True),
        ("POST", "", "", True),  # curl
        ("POST", "https://evil.example", "", False),
        ("POST", "null", "", False),  # a sandboxed frame
        ("POST", "", "cross-site", False),
        ("POST", "http://label:7860", "cross-site", False),
        ("POST", "http://label:9999", "same-site", False),
        ("POST", "http://label:7860", "nonsense", False),
        ("DELETE", "https://evil.example", "", False),
    ],
)
def test_origins(method, origin, site, own):
    assert is_own_origin(method, "label:7860", origin, site) is own
