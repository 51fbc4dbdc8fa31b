import subprocess
import sys

END = """
import atexit, sys
from rlhf.ranks import exit_process
atexit.register(lambda: print("registered"))
print("words, ", end="")
print("of an error", file=sys.stderr, end="")
exit_process(3)
"""


def test_a_process_of_a_group_ends_with_its_code_its_words_and_what_was_registered() -> None:
    done = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout == "words, registered\n"
    assert done.stderr == "of an error"
