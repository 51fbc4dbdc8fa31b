"""trl's fused output layer, which gives log-probs in place of logits."""

from trl.trainer import utils


def project_labels_only() -> None:
    """Let that layer leave out positions without a label on CPUs, as it does on GPUs.

    Elsewhere than on GPUs trl projects every position, because shapes that change would be compiled
    anew; nothing is compiled here, and prompts may be most of a text. Loss and gradients are the
    same: positions without a label count 0. Lasts as long as the process.
    """
    utils._use_triton = lambda device: True  # type: ignore[attr-defined]
