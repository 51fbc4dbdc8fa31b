"""Imported by the fork server: what nearly every command would do again at its start."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed looks for devices

import deepspeed  # noqa: F401 # accelerate imports it before it saves or unwraps a model
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from rlhf.cli import build_app
from rlhf.run.provenance import all_packages

build_app()
all_packages()  # which every stage writes down
get_checkpoint_conversion_mapping("llama")  # builds those of all models, as from_pretrained does
