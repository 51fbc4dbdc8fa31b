"""Imported by the fork server: what nearly every command would do again at its start."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed looks for devices

import deepspeed  # noqa: F401 # accelerate imports it before it saves or unwraps a model

from rlhf.cli import build_app

build_app()
