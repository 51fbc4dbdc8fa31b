"""Where thinking ends and the answer begins."""

import pytest

from rlhf.modeling.thinking import has_thinking, split_thinking

CASES = {
    "plain": ("It is 4.", "", "It is 4."),
    "spaces of a plain answer stay": (" It is 4.\n", "", " It is 4.\n"),
    "thought first": ("<think>2 + 2</think>\n\nIt is 4.", "2 + 2", "It is 4."),
    "nothing thought": ("<think>\n\n</think>\n\nIt is 4.", "", "It is 4."),
    "cut while thinking": ("<think>2 + 2 is", "2 + 2 is", ""),
    "opened by the prompt": ("2 + 2</think>It is 4.", "2 + 2", "It is 4."),
    "thought twice": ("<think>a</think>One. <think>b</think>Two.", "a\n\nb", "One. Two."),
    "a tag as a word": ("Write <think> before it.", "", "Write <think> before it."),
    "a closing tag alone, later": ("<think>a</think>b</think>c", "a", "b</think>c"),
    "opened by the prompt, again": ("a</think>One.<think>b</think>", "a\n\nb", "One."),
}


@pytest.mark.parametrize("case", CASES)
def test_thinking_and_answer(case: str) -> None:
    text, thinking, answer = CASES[case]
    assert split_thinking(text) == (thinking, answer)
    assert has_thinking(text) is (text != answer)
