"""`/metrics` in Prometheus' text format."""

from collections.abc import Iterator, Mapping
from typing import Any

from policies.serving.proxy import ProxyCounts

PREFIX = "rlhf_serve"
Value = tuple[dict[str, str], float]


def write_metrics(counts: ProxyCounts, comparison: Mapping[str, Any] | None) -> str:
    """All metrics as text.

    Args:
        counts: since the start.
        comparison: of `compare_thumbs`, where two policies are compared.
    """
    metrics = [*_of_counts(counts), *(_of_comparison(comparison) if comparison else ())]
    return "".join(f"{line}\n" for metric in metrics for line in metric)


def _of_counts(counts: ProxyCounts) -> Iterator[list[str]]:
    def by_policy(values: Mapping[str, int]) -> list[Value]:
        return [({"policy": name}, value) for name, value in values.items()]

    yield _metric(
        "requests_total", "counter", "Chat completions asked.", by_policy(counts.requests)
    )
    tokens = by_policy(counts.tokens)
    yield _metric("tokens_total", "counter", "Completion tokens that servers reported.", tokens)
    for name, kind, description, value in (
        ("failures_total", "counter", "Requests that failed.", counts.failures),
        ("kept_total", "counter", "Responses kept.", counts.kept),
        ("keep_failures_total", "counter", "Responses that could not be kept.", counts.not_kept),
        ("feedback_total", "counter", "Thumbs, picks and corrections stored.", counts.feedback),
        ("running", "gauge", "Requests being answered.", counts.running),
    ):
        yield _metric(name, kind, description, [({}, value)])


def _of_comparison(comparison: Mapping[str, Any]) -> Iterator[list[str]]:
    thumbs = [
        ({"policy": side, "thumb": thumb}, comparison[side][thumb])
        for side in ("policy", "against")
        for thumb in ("up", "down")
    ]
    yield _metric("thumbs_total", "counter", "First thumbs of conversations.", thumbs)
    bounds = [({"end": end}, comparison["difference"][end]) for end in ("low", "high")]
    description = "95 % interval of the difference of the rates of thumbs up, policy minus against."
    yield _metric("thumbs_difference", "gauge", description, bounds)
    description = "p-value of equal rates, valid at any time."
    yield _metric("thumbs_p_value", "gauge", description, [({}, comparison["p_value"])])


def _metric(name: str, kind: str, description: str, values: list[Value]) -> list[str]:
    name = f"{PREFIX}_{name}"
    lines = [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
    for labels, value in values:
        shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value}" if shown else f"{name} {value}")
    return lines
