"""DeepSpeed's files are read as data; the trainings are in tests/pipeline/processes."""

import subprocess
import sys

from tests.servers.commands import REPOSITORY

BY_NAME = """
import pickle
from deepspeed.runtime.zero.config import ZeroStageEnum
ZeroStageEnum.__reduce_ex__ = lambda stage, protocol: (getattr, (ZeroStageEnum, stage.name))
assert b"getattr" in pickle.dumps(ZeroStageEnum.weights)
import rlhf.parallel.zero
saved = pickle.dumps(ZeroStageEnum.weights)
assert b"getattr" not in saved
assert pickle.loads(saved) is ZeroStageEnum.weights
"""


def test_no_python_saves_its_stage_as_a_call_of_getattr() -> None:
    """As Python 3.11.0 to 3.11.3 would, Debian 12's for one."""
    done = subprocess.run(
        [sys.executable, "-c", BY_NAME], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
