"""report.json for programs and report.html for people, both from one dictionary.

The page shows a number only by naming its place in that dictionary, so what people read cannot
differ from what programs read. It is one file that opens offline: pictures are data URIs, the only
script is the search over the samples, and a content security policy forbids everything else. Texts
of models are escaped and isolated; they can neither run nor reorder what stands around them.

What `write_report` reads of the dictionary (the rest is kept in report.json, not shown); MODEL is
policy, reference, or rival where another model was compared too:

    win_rate.JUDGE          value low high n; level wins ties losses p_value as `judge_wins` gives;
                            optional: length_controlled, with value low high
    judges.JUDGE            optional: kind (signal, reward model, AI judge, people) and name;
                            is_objective where the policy was trained against it
    rival                   optional: name, win_rate.JUDGE of the policy against it, and votes
    student                 of a distilled policy against its teacher: gain.JUDGE.kept (the share of
                            the teacher's gain), gain.JUDGE.teacher (that gain), parameters
    win_rate_by_source.JUDGE.SOURCE    optional: as win_rate
    win_rate_by_length.JUDGE.LENGTH    optional: the same by the length of the prompt
    kl.forward, kl.reverse  nats sqrt_nats per_token estimator standard_error; reverse is optional,
                            and so are clamped_fraction and abandoned_fraction, the
                            fractions of tokens with a log-ratio above 10 (clamped) and below −10
    log_likelihood.MODEL    optional: value low high in nats per token under the original model
    retained                optional: before, after: negative log-likelihood of neutral text, nats
                            per token; tokens; difference: value low high
    reward.MODEL            mean std; gold.MODEL the same, where there is one
    best_of_n               optional: n nats reward gold of choosing among n stored responses
    length.MODEL            mean tokens of a response
    eos_rate.MODEL          share of responses with an end token
    distinct.MODEL          distinct_1 distinct_2
    self_bleu.MODEL         optional: how much the responses repeat each other
    template.MODEL          optional: words and share: the commonest four words in a row that an
                            response does not quote from its question, and the fraction of first
                            responses that have them
    repeats.MODEL           optional: fraction of first responses with four words in a row twice
    scores.JUDGE.MODEL      optional: every score, for the picture of their distribution
    verdicts                optional: asked of the AI judge, and how many are unclear
    votes                   optional: given, people (who have voted), prompts, same_answers and
                            still_needed of a blind vote; the last counts votes on other prompts, as
                            many on each as there are now, same_answers prompts not asked about
    cost                    optional: device_hours, price, price_per_hour, annotator_hours and
                            price_per_point, null where unknown or where there is no gain
    seed, inputs            inputs: name → path and hash
    split                   optional: test (default) or train
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from policies.evaluate import plots
from rlhf.planning.price import JUDGES, amount
from rlhf.records.jsonl import write_json, write_text_atomically
from rlhf.records.wording import OWN_JUDGE, judge_in_words
from rlhf.run.intervals import FEW_PROMPTS, outcome

TITLES = {"reference": "Original", "policy": "New", "rival": "Other"}
DEFAULT_KINDS = {"people": "people", "ai": "AI judge", "gold": "signal", "reward": "reward model"}
BRIEF = (
    "verdict",
    "win_rate",
    "rival",
    "student",
    "votes",
    "verdicts",
    "kl",
    "log_likelihood",
    "retained",
    "reward",
    "gold",
    "length",
    "eos_rate",
)
CURVES = {
    "reward/mean": "Reward",
    "kl/forward_k3_per_token": "Forward KL, nats per token",
    "kl/reverse_k1_per_token": "Reverse KL, nats per token",
    "kl_audit/reverse_k1_per_token": "Audited KL, nats per token",
    "length": "Length, tokens",
    "entropy": "Entropy, nats per token",
}
NUM_OPEN = 10


@dataclass(frozen=True, kw_only=True)
class ReportSample:
    """One prompt with a response of every model, and what the judges say of them.

    Args:
        turns: the conversation, role and content of each turn; the last one is the user's.
        answers: response text by model.
        scores: by judge and model; judges that compare give the winner 1, a tie ½.
    """

    turns: Sequence[Mapping[str, str]]
    answers: Mapping[str, str]
    scores: Mapping[str, Mapping[str, float]]


def write_report(
    report: Mapping[str, Any],
    samples: Sequence[ReportSample],
    metrics: Sequence[Mapping[str, Any]],
    json_path: Path,
    html_path: Path,
) -> dict[str, Any]:
    """Write both files, atomically, and return the content of report.json.

    Args:
        report: the numbers, as described at the top of this file.
        samples: prompts with both responses; the page opens the first ten.
        metrics: one object per training step, for the curves of `CURVES`; may be empty.
        json_path: where report.json goes.
        html_path: where report.html goes.
    """
    return write_content(build_content(report, samples, metrics), json_path, html_path)


def write_content(
    content: Mapping[str, Any],
    json_path: Path,
    html_path: Path,
) -> dict[str, Any]:
    """Write both files of a `build_content`; what is not finite becomes null."""
    stored: dict[str, Any] = _storable(content)
    page = render(stored)
    write_json(json_path, stored)
    write_text_atomically(html_path, lambda stream: stream.write(page))
    return stored


def headline(content: Mapping[str, Any]) -> dict[str, Any]:
    """The main numbers of report.json, for the terminal."""
    return {name: content[name] for name in (*BRIEF, "seconds", "cost") if name in content}


def is_hacking(rates: Mapping[str, Mapping[str, Any]], judge: str) -> bool:
    """Whether the reward model sees an improvement where a more trustworthy judge does not.

    Too few votes are no sign: that judge must see harm, or provably less of an improvement.

    Args:
        rates: win rates by judge.
        judge: of the verdict.
    """
    if judge == "reward" or "reward" not in rates or outcome(rates["reward"]) != "better":
        return False
    seen, high = outcome(rates[judge]), rates[judge]["high"]
    less = high is not None and high < rates["reward"]["low"]
    return seen == "worse" or (seen == "unproven" and bool(less))


def build_content(
    report: Mapping[str, Any],
    samples: Sequence[ReportSample],
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of report.json: the numbers, the verdict, the drawn curves and the samples."""
    content: dict[str, Any] = _storable(
        {
            **report,
            "split": report.get("split", "test"),
            "training": {
                name: [[row["step"], row[name]] for row in metrics if name in row]
                for name in CURVES
                if any(name in row for row in metrics)
            },
            "samples": [asdict(sample) for sample in samples],
        }
    )
    return with_verdict(content)


def with_verdict(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with its judges named and the verdict of the most trustworthy of them."""
    rates = {name: {"level": 0.95, **rate} for name, rate in content["win_rate"].items()}
    judge = next(name for name in (*JUDGES, *rates) if name in rates)
    named = content.get("judges", {})
    judges = {
        name: {"kind": DEFAULT_KINDS.get(name, name), "name": "", **named.get(name, {})}
        for name in {**rates, **content.get("rival", {}).get("win_rate", {})}
    }
    verdict = {"judge": judge, "outcome": outcome(rates[judge])}
    return {**content, "win_rate": rates, "judges": judges, "verdict": verdict}


def render(content: Mapping[str, Any]) -> str:
    """The page of a `build_content`."""
    judge = content["verdict"]["judge"]
    page = _template().render(
        report=content,
        judge=judge,
        subject=_subject(content["judges"][judge]),
        judges=_judges(content),
        grouped=_grouped(content),
        models=_models(content),
        rate=content["win_rate"][judge],
        outcomes={name: outcome(rate) for name, rate in content["win_rate"].items()},
        is_hacking=is_hacking(content["win_rate"], judge),
        pictures=_pictures(content),
        show=lambda *path, form="number": _show(content, path, form),
        winner=_winner,
        num_open=NUM_OPEN,
        few_prompts=FEW_PROMPTS,
    )
    return page + "\n"


@cache
def _template() -> Template:
    """The page's template; compiling it takes longer than filling it in."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_hash"] = _script_hash
    return environment.get_template("report.html")


def _judges(content: Mapping[str, Any]) -> list[str]:
    """All judges, the one of the verdict first."""
    first = content["verdict"]["judge"]
    return [first, *(name for name in content["win_rate"] if name != first)]


def _grouped(content: Mapping[str, Any]) -> str:
    """The judge whose win rates within groups of prompts are shown: people vote on too few."""
    grouped = content.get("win_rate_by_source", {})
    return next((name for name in (*JUDGES, *grouped) if grouped.get(name)), "")


def _models(content: Mapping[str, Any]) -> dict[str, str]:
    """The page's title of each model."""
    return {name: title for name, title in TITLES.items() if name in content["length"]}


def _pictures(content: Mapping[str, Any]) -> dict[str, str]:
    figures = {"win_rates": plots.win_rates(_rates(content))}
    panels = [p for p in (_scores(content, name) for name in ("gold", "reward")) if p]
    if panels:
        figures["scores"] = plots.score_distributions(panels)
    for name, key in (("sources", "win_rate_by_source"), ("lengths", "win_rate_by_length")):
        groups = content.get(key, {}).get(_grouped(content))
        if groups:
            figures[name] = plots.win_rate_by_group(
                list(groups.items()), sort_by_value=name == "sources"
            )
    if content["kl"].get("reverse", {}).get("sqrt_nats") is not None:
        figures["kl"] = plots.reward_against_kl(_kl_panels(content))
    training = {CURVES[name]: points for name, points in content["training"].items()}
    if training:
        figures["training"] = plots.training_curves(training)
    return {name: plots.to_data_uri(figure) for name, figure in figures.items()}


def _kl_panels(content: Mapping[str, Any]) -> list[plots.KLPanel]:
    """For every judge of scores: best-of-n of the original, and where the new model stands."""
    curve = content.get("best_of_n", [])
    return [
        plots.KLPanel(
            title=f"Mean score by the {_judge_title(content, judge).lower()}",
            best_of_n=[(point["nats"] ** 0.5, point[judge], point["n"]) for point in curve],
            original=content[judge]["reference"]["mean"],
            new=(content["kl"]["reverse"]["sqrt_nats"], content[judge]["policy"]["mean"]),
        )
        for judge in ("gold", "reward")
        if judge in content
    ]


def _rates(content: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Judges with their win rates, the one of the verdict first."""
    return [(_judge_title(content, name), content["win_rate"][name]) for name in _judges(content)]


def _judge_title(content: Mapping[str, Any], judge: str) -> str:
    described = content["judges"].get(judge, {"kind": judge, "name": ""})
    kind = str(described["kind"])
    short = str(described["name"]).rpartition(".")[2] if kind == "signal" else ""
    return f"{kind[:1].upper()}{kind[1:]}{f': {short}' if short else ''}"


def _subject(judge: Mapping[str, Any]) -> str:
    own = f", {OWN_JUDGE}" if judge.get("is_objective") else ""
    return judge_in_words(f"{judge['kind']} {judge['name']}".strip() + own)


def _scores(content: Mapping[str, Any], judge: str) -> tuple[str, list[float], list[float]] | None:
    """Title and scores of a judge: all that the report has, else those of the samples."""
    title = f"Scores by the {_judge_title(content, judge).lower()}"
    every = content.get("scores", {}).get(judge)
    if every:
        return title, every["policy"], every["reference"]
    pairs = [sample["scores"].get(judge) for sample in content["samples"]]
    scored = [pair for pair in pairs if pair]
    if not scored:
        return None
    return title, [pair["policy"] for pair in scored], [pair["reference"] for pair in scored]


def _winner(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Who wins by the most trustworthy judge that has an opinion on a sample."""
    for name in (*JUDGES, *scores):
        ours, theirs = (scores.get(name, {}).get(model) for model in ("policy", "reference"))
        if ours is not None and theirs is not None:
            return "tie" if ours == theirs else "new" if ours > theirs else "original"
    return "tie"


def _show(content: Mapping[str, Any], path: Sequence[str | int], form: str) -> Markup:
    """The number at `path` of the report, in an element that names its place (a JSON pointer)."""
    value: Any = content
    for key in path:
        value = value[key]
    if value is None:
        return Markup('<span class="none">–</span>')
    pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)
    return Markup('<data value="{}" data-path="{}">{}</data>').format(
        json.dumps(value), pointer, _format(value, form)
    )


def _format(value: float, form: str) -> str:
    if form == "percent":
        return plots.percent(value)
    if form == "amount":
        return amount(value)
    if form == "bare_percent":
        return f"{100 * value:.0f}"
    if form == "p_value" and value < 0.001:
        return "< 0.001"
    if form == "number":
        return f"{value:z.{3 if abs(value) < 1 else 2 if abs(value) < 10 else 1}f}"
    return {
        "fixed": "{:z.2f}",
        "signed": "{:+z.2f}",
        "signed_fine": "{:+z.3f}",
        "p_value": "{:z.3f}",
        "count": "{}",
    }[form].format(value)


def _script_hash(script: str) -> str:
    digest = hashlib.sha256(str(script).encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _storable(value: Any) -> Any:
    """`value` as JSON can hold it: not-finite numbers become null, lone surrogates a `?`."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {str(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    return value
