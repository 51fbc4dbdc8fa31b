"""Which setting of each method goes into `methods.py`: all are tried on validation prompts.

Labels, judge and settings are those of `methods.yaml`, where `tries` are the settings, as many for
each method. Of those within a limit of KL, the one is chosen that the judge prefers most. No report
on test prompts uses the validation prompts.
"""

from collections.abc import Sequence
from pathlib import Path

from examples.evidence.commands import Config
from examples.evidence.experiment import Table, resolved, run
from examples.evidence.ppo.methods import measures, plot, train_all


def measure(config: Config, out: Path) -> Config:
    """Train every method at each of its settings, with one seed."""
    of_methods = resolved(config)["of"]
    methods, seed = of_methods["methods"], of_methods["tuning_seed"]
    of_methods = of_methods | {"people": {**of_methods["people"], "judged_on": "validation"}}
    settings = [(name, n) for name, method in methods.items() for n in range(len(method["tries"]))]
    results = train_all(of_methods, out, [(*setting, seed) for setting in settings])
    trained = list(zip(settings, results.pop("runs"), strict=True))
    tried = {
        name: [run_result for (of, _), run_result in trained if of == name] for name in methods
    }
    limit = of_methods["max_nats_per_token"]
    chosen = {name: {"chosen": choose(of, limit), "runs": of} for name, of in tried.items()}
    return {**results, "methods": chosen}


def choose(tried: Sequence[Config], max_nats_per_token: float) -> int:
    """The index of the setting that wins most within the KL limit; if none is, of the lowest KL."""
    near = [
        n
        for n, run_result in enumerate(tried)
        if run_result["nats_per_token"] <= max_nats_per_token
    ]
    if not near:
        return min(range(len(tried)), key=lambda n: tried[n]["nats_per_token"])
    return max(near, key=lambda n: tried[n]["judge"]["value"])


def tabulate(result: Config) -> Table:
    """A row for each setting of each method."""
    header = ["method", "setting", "won, by the judge (95 %)", "at equal length"]
    header += ["gain by the judge", "reverse KL, nats", "responses that end"]
    rows = [[*header, "with the most frequent 4-gram", "nats per token", "chosen"]]
    methods = result["config"]["of"]["methods"]
    for name, of in result["methods"].items():
        for index, (settings, run_result) in enumerate(
            zip(methods[name]["tries"], of["runs"], strict=True)
        ):
            setting = ", ".join(f"{key} {value}" for key, value in settings.items())
            cells = [f"{run_result['nats_per_token']:.2f}", "yes" if index == of["chosen"] else ""]
            rows.append([name, setting or "as in people.yaml", *measures(run_result), *cells])
    return rows


if __name__ == "__main__":
    run("method_settings", measure, tabulate, plot)
