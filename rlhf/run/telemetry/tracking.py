"""`--track`: also sends the rows of metrics.jsonl to a tracker, through accelerate.

The loops call `accelerator.log`, which writes to the trackers that are opened here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import filter_trackers
from accelerate.utils import patch_environment

from rlhf.config import flatten, to_plain, without_secrets
from rlhf.errors import ConfigError
from rlhf.parallel.settings import Tracker


@contextmanager
def tracking(accelerator: Accelerator, track: Tracker, out: Path, settings: Any) -> Iterator[None]:
    """Open a tracker for the block, with the settings as the parameters of the run.

    The run is named after the last two parts of `out`; trackers that write files use OUT/tracking.

    Raises:
        ConfigError: the tracker's package is not installed.
    """
    if track == "none":
        yield
        return
    folder = out / "tracking"
    accelerator.log_with = filter_trackers([track], str(folder))
    if not accelerator.log_with:
        raise ConfigError(
            f"--track {track} needs the package {track}, which is not installed",
            f"pip install {track}, or leave --track out: metrics.jsonl has the same numbers.",
        )
    environment = {}
    if (
        track == "mlflow" and "MLFLOW_TRACKING_URI" not in os.environ
    ):  # without a server: files in the run folder
        environment["MLFLOW_TRACKING_URI"] = folder.resolve().as_uri()
        environment["MLFLOW_ALLOW_FILE_STORE"] = "true"
    accelerator.project_configuration.set_directories(str(folder))
    name = "-".join(out.resolve().parts[-2:])
    with patch_environment(**environment):  # each member of an ensemble has its own files
        accelerator.init_trackers(name, config=flat(to_plain(without_secrets(settings))))
        try:
            yield
        finally:
            for tracker in accelerator.trackers:
                tracker.finish()
            accelerator.trackers.clear()


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Nested settings as dotted names, with values that every tracker takes."""
    plain = bool | int | float | str
    flattened = flatten(values).items()
    return {name: value if isinstance(value, plain) else str(value) for name, value in flattened}
