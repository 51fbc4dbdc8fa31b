"""`rlhf ppo` on the work of ppo.py, in a process of its own; ppo.py starts it.

Its one argument is a JSON object, as that of ppo_trl.py. The last line of stdout is what each step
took, and what its samples earned from the gold signal.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

Job = dict[str, Any]
PHASES = ("sample", "score", "update")


def train(job: Job) -> list[dict[str, float]]:
    """Run the stage, listening to what each step samples."""
    import policies.ppo.train as stage
    from policies.ppo.rollout import Experience
    from policies.ppo.setting_groups import KLSettings
    from policies.ppo.settings import PPOSettings
    from rlhf.config.paths import with_changes
    from rlhf.endpoints.signals import load_signal
    from rlhf.modeling.tokens import load_tokenizer
    from rlhf.run.metrics import read_metrics

    tokenizer, build = load_tokenizer(job["model"]), stage.build_experience
    gold = load_signal("examples.quickstart.sentiment:score")
    steps: list[dict[str, float]] = []

    def build_experience(*given: Any) -> Experience:
        experience = build(*given)
        answers = experience.sequences.responses
        ids = [row[mask].tolist() for row, mask in zip(answers.ids, answers.mask, strict=True)]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        earned = statistics.fmean(gold("", text.strip()) for text in texts)
        # the same samples as trl's are counted when the step's update is over
        steps.append({"gold": earned, "sampled": time.time() - job["began"]})
        return experience

    stage.build_experience = build_experience
    settings = PPOSettings(
        model=job["model"],
        reward=(job["reward"],),
        reference=Path(job["reference"]),
        out=Path(job["out"]),
        kl=KLSettings(**job["kl_settings"]),
        precision="bf16" if job["bf16"] else "fp32",
    )
    given = {**job["settings"], "checkpoint.every": job["settings"]["steps"]}
    settings = with_changes(settings, given)
    stage.train_policy(settings)
    for step, row in zip(steps, read_metrics(settings.out / "metrics.jsonl"), strict=True):
        step |= {phase: row[f"seconds/{phase}"] for phase in PHASES}
        step["seconds"] = sum(step[phase] for phase in PHASES)
        step["wall"] = step.pop("sampled") + step["update"]
        step |= {"length": row["length"], "reward": row["reward/mean"]}
        step["kl"] = row.get("kl/reverse_k1", 0.0)
    return steps


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[3])  # beside this file are names of packages
    print(json.dumps(train(json.loads(sys.argv[1]))))
