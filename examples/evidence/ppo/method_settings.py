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
    places = [(name, n) for name, method in methods.items() for n in range(len(method["tries"]))]
    found = train_all(of_methods, out, [(*one, seed) for one in places])
    trained = list(zip(places, found.pop("runs"), strict=True))
    tried = {name: [one for (of, _), one in trained if of == name] for name in methods}
    limit = of_methods["max_nats_per_token"]
    chosen = {name: {"chosen": choose(of, limit), "runs": of} for name, of in tried.items()}
    return {**found, "methods": chosen}


def choose(tried: Sequence[Config], max_nats_per_token: float) -> int:
    """The place of the setting that wins most within the KL limit; if none is, of the lowest KL."""
    near = [n for n, one in enumerate(tried) if one["nats_per_token"] <= max_nats_per_token]
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
        for place, (how, one) in enumerate(zip(methods[name]["tries"], of["runs"], strict=True)):
            setting = ", ".join(f"{key} {value}" for key, value in how.items())
            cells = [f"{one['nats_per_token']:.2f}", "yes" if place == of["chosen"] else ""]
            rows.append([name, setting or "as in people.yaml", *measures(one), *cells])
    return rows


if __name__ == "__main__":
    run("method_settings", measure, tabulate, plot)
