"""PPO on two SageMaker instances of 8 GPUs, with an FSx for Lustre filesystem as /opt/ml/input.

python sagemaker_ppo.py --role ARN --image URI --filesystem fs-… --mount NAME --subnet … --group …

The image has rlhf and DeepSpeed. SageMaker starts one container on each instance and torchrun
in it; its SIGTERM before the end of a spot instance saves a checkpoint, and the next attempt goes
on with --resume.
"""

import argparse
from pathlib import Path
from typing import Any

RUNS = "/opt/ml/input/data/runs"
SETTINGS = {
    "config": f"{RUNS}/ppo.yaml",
    "model": f"{RUNS}/model",
    "reward": f"{RUNS}/reward",
    "reference": f"{RUNS}/reference",
    "out": f"{RUNS}/ppo",
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The role, image and network of an account."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("role", "image", "filesystem", "mount", "subnet", "group"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--instance", default="ml.p5.48xlarge")
    parser.add_argument("--instances", type=int, default=2)
    return parser.parse_args(argv)


def estimator_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of sagemaker.pytorch.PyTorch."""
    return {
        "entry_point": "sagemaker_entry.sh",
        "source_dir": str(Path(__file__).parent),
        "image_uri": arguments.image,
        "role": arguments.role,
        "instance_type": arguments.instance,
        "instance_count": arguments.instances,
        "hyperparameters": SETTINGS,
        "environment": {
            "FI_PROVIDER": "efa",
            "NCCL_DEBUG": "WARN",
            "RLHF_IMAGE": arguments.image,  # which stage.json keeps
        },
        "subnets": [arguments.subnet],
        "security_group_ids": [arguments.group],
        "max_run": 5 * 24 * 3600,
    }


def main() -> None:
    """Start the training job and show its log."""
    from sagemaker.inputs import FileSystemInput
    from sagemaker.pytorch import PyTorch

    arguments = parse_arguments()
    runs = FileSystemInput(
        file_system_id=arguments.filesystem,
        file_system_type="FSxLustre",
        directory_path=f"/{arguments.mount}/rlhf",
        file_system_access_mode="rw",
    )
    PyTorch(**estimator_settings(arguments)).fit({"runs": runs})


if __name__ == "__main__":
    main()
