"""`rlhf benchmark`."""

from typing import Any

from policies.deployment.settings import BenchmarkSettings as Settings

EXAMPLE = """rlhf benchmark runs/first/ppo runs/first/int8 runs/first/reward \\
    --price-per-hour 2.50 --out runs/first/benchmark"""


def run(settings: Settings) -> dict[str, Any]:
    """Measure latency, speed and memory of policies and reward models on this machine."""
    from policies.deployment.benchmark import benchmark

    return benchmark(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """A line for each model and size, the fastest of each kind, and where the report is."""
    from rlhf.run.rundir import RunDir
    from rlhf.run.status import align

    blocks = []
    for kind, speed in (("policy", "tokens_per_second"), ("reward model", "scores_per_second")):
        rows = [row for row in result["rows"] if row["kind"] == kind]
        if rows:
            head = ["run", "batch", "prompt", "response", "first s", "p50 s", "p99 s"]
            head += [f"{speed.split('_')[0]}/s", "MB", *_price_heads(result, kind)]
            best = max(rows, key=lambda row: row[speed])
            blocks.append(align([head, *(_cells(row, speed) for row in rows)]))
            blocks.append(
                f"Most {speed.split('_')[0]} per second: {best[speed]:,.1f} by {best['run']} in "
                f"batches of {best['batch_size']}."
            )
    return "\n".join([*blocks, f"Report: {RunDir(settings.out).report_html}"])


def _price_heads(result: dict[str, Any], kind: str) -> list[str]:
    if result["price_per_hour"] is None:
        return []
    return ["price of a million tokens" if kind == "policy" else "price of a thousand scores"]


def _cells(row: dict[str, Any], speed: str) -> list[str]:
    first, memory = row.get("first_token_seconds"), row["peak_memory_bytes"]
    sizes = (row[name] for name in ("batch_size", "prompt_tokens", "answer_tokens"))
    price = row.get("price_per_million_tokens", row.get("price_per_thousand_scores"))
    return [
        row["run"],
        *map(str, sizes),
        "-" if first is None else f"{first:.3f}",
        f"{row['latency']['p50']:.3f}",
        f"{row['latency']['p99']:.3f}",
        f"{row[speed]:,.1f}",
        "-" if memory is None else f"{memory / 1e6:,.0f}",
        *([] if price is None else [f"{price:,.4f}"]),
    ]
