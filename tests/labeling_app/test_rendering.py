"""What a model wrote can be looked at and can do nothing."""

import pytest

from labeling_app.rendering import to_html


def test_markdown_is_rendered():
    html = to_html(
        "**bold** `x<y`\n\n- one\n\n| a |\n|---|\n| b |\n\n~~no~~\n\n```python\nx = '<'\n```"
    )
    for piece in ("<strong>bold</strong>", "<code>x&lt;y</code>", "<li>one</li>", "<td>b</td>",
                  "<s>no</s>", "x = '&lt;'"):  # fmt: skip
        assert piece in html


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[click](javascript:alert(1))",
        "[click](data:text/html,<script>alert(1)</script>)",
        "![pixel](https://tracker.example/x.png)",
        "<svg/onload=alert(1)>",
        "<a href='x' onclick='alert(1)'>x</a>",
        "```\n</code></pre><script>alert(1)</script>\n```",
        "<style>*{display:none}</style>",
    ],
)
def test_nothing_of_it_is_a_live_tag_or_address(text):
    html = to_html(text)
    for danger in (
        "<script",
        "<img",
        "<svg",
        "<style",
        'href="javascript',
        'href="data',
        "<a href='x'",
    ):
        assert danger not in html.lower().replace("&lt;", "")


def test_tags_stay_text():
    assert to_html("<b>x</b>") == "<p>&lt;b&gt;x&lt;/b&gt;</p>\n"


def test_links_are_kept_and_give_nothing_away():
    html = to_html("[paper](https://example.org/a?b=1)")
    assert 'href="https://example.org/a?b=1"' in html
    assert 'rel="noopener noreferrer nofollow"' in html


def test_very_long_text_is_shown_unformatted():
    html = to_html("<b>" + "x" * 100_000)
    assert html.startswith("<pre>&lt;b&gt;")
    assert len(html) > 100_000
