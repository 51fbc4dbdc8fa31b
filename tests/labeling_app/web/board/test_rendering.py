"""What a model wrote can be looked at and can do nothing."""

import pytest

from labeling_app.web.board.rendering import conversation_to_html, response_to_html, to_html


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


def test_thinking_is_folded_and_as_harmless_as_the_answer():
    html = response_to_html("<think>**2** + 2 <img src=x></think>\n\nIt is *4*.")
    assert html == (
        '<details class="thinking"><summary>Thinking</summary>'
        "<p><strong>2</strong> + 2 &lt;img src=x&gt;</p>\n</details><p>It is <em>4</em>.</p>\n"
    )
    assert response_to_html("It is <b>4</b>.") == to_html("It is <b>4</b>.")
    cut = response_to_html("<think></details><script>1</script>")
    assert cut.count("</details>") == 1
    assert "<script" not in cut


def test_thinking_is_folded_in_answers_not_in_questions():
    said = "<think>a</think>b"
    turns = conversation_to_html([{"role": r, "content": said} for r in ("user", "assistant")])
    assert [turn["html"].count("<details") for turn in turns] == [0, 1]
