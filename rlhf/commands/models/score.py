"""`rlhf score`: the rewards of responses, or how often they agree with people."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward.settings import ScoreSettings as Settings
from rlhf.commands.wording import accuracy_of_longer, doubt
from rlhf.records.wording import counted
from rlhf.run.intervals import in_words

if TYPE_CHECKING:
    from rlhf.records.schema import RankedPrompt

EXAMPLE = """rlhf score --rankings rankings --reward runs/first/reward \\
    --out runs/first/agreement"""
LONG = ("worst", "held_out_counts", "health")


def run(settings: Settings) -> dict[str, Any]:
    """Score the responses in a file, or report how well a reward agrees with judged responses."""
    if settings.rankings is None:
        from reward.scoring.files import score_file

        return score_file(settings)
    from reward.scoring.rankings import score_rankings

    file = settings.rankings / "test.jsonl" if settings.rankings.is_dir() else settings.rankings
    records, left_out = read_judgments(file)
    report = score_rankings(settings, records, str(file))
    return {name: value for name, value in report.items() if name not in LONG} | {
        "longer_wins": report["health"]["longer_wins"],
        "calibration_error": report["health"]["calibration"]["ece"],
        "left_out": left_out,
    }


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """Where the rewards are, their mean and their spread; or how far to trust them."""
    if "judged" in result:
        from rlhf.run.rundir import RunDir

        return describe_agreement(result, RunDir(settings.out).report_html)
    return (
        f"Wrote the rewards of {counted(result['responses'], 'response')} to "
        f"{counted(result['prompts'], 'prompt')} into {result['out']}: mean {result['mean']:z.2f}, "
        f"standard deviation {result['std']:.2f}."
    )


def describe_agreement(report: Mapping[str, Any], page: Path) -> str:
    """How often a reward agrees with judgments, from the report of `rlhf score --rankings`.

    Args:
        report: with `longer_wins` and `calibration_error` of its health.
        page: report.html.
    """
    accuracy, longer = report["accuracy"], report["longer_wins"]
    if accuracy is None:
        return f"Every judgment is a tie: there is no accuracy to report.\nReport: {page}"
    lines = [
        f"Accuracy of {report['reward']}: {in_words(accuracy)}, on {accuracy['pairs']} pairs of "
        f"{accuracy['prompts']} prompts.{doubt(accuracy)}",
        *accuracy_of_longer(accuracy, longer),
        f"Expected calibration error {report['calibration_error']:.3f}, with the difference of two "
        "rewards read as log-odds.",
    ]
    if left_out := report["left_out"]:
        lines.append(f"Lines left out because they hold nothing to judge: {left_out:,}.")
    return "\n".join([*lines, f"Report: {page}"])


def read_judgments(file: Path) -> tuple[list["RankedPrompt"], int]:
    """Judged prompts of a file in any format that `rlhf import` reads, and how many lines lack one.

    Raises:
        InputError: there is no such file.
        BadLineError: a line cannot be read.
    """
    from labeling_app.data_io.formats import Defaults, read_entry
    from labeling_app.data_io.lines.other_tools import require_one_question
    from labeling_app.data_io.reading import Part, read_rows
    from labeling_app.data_io.repeats import Repeats
    from rlhf.errors import InputError, UnusableContentError
    from rlhf.records.jsonl import BadLineError, parse_line
    from rlhf.records.schema import RankedPrompt

    if not file.is_file():
        raise InputError(
            f"No such file: {file}",
            "Give the folder of `rlhf export`, or a file of preferences, such as DIR/train.jsonl.",
        )
    prompts: dict[str, RankedPrompt] = {}
    left_out, repeats, questions = 0, Repeats(), set[str]()
    for location, row, _ in read_rows(file, Part()):
        if isinstance(row, BadLineError):
            raise row
        try:
            value = parse_line(row, location) if isinstance(row, str) else row
            entry = repeats.numbered(read_entry(value, Defaults()))
            if entry.exported is not None and entry.exported.judgments:
                questions.add(entry.exported.question)
                require_one_question(questions)
        except UnusableContentError:
            left_out += 1
            continue
        except BadLineError:
            raise
        except InputError as error:
            raise BadLineError(f"{location}: {error.problem}", error.remedy) from None
        new = RankedPrompt(prompt=entry.prompt, responses=entry.responses, rankings=entry.rankings)
        prompts[entry.prompt.id] = (
            _joined(prompts[entry.prompt.id], new) if entry.prompt.id in prompts else new
        )
    return list(prompts.values()), left_out


def _joined(earlier: "RankedPrompt", later: "RankedPrompt") -> "RankedPrompt":
    """Two lines of one prompt as one record, each response and ranking once."""
    from dataclasses import replace

    responses = {response.id: response for response in (*earlier.responses, *later.responses)}
    rankings = {ranking.id: ranking for ranking in (*earlier.rankings, *later.rankings)}
    return replace(earlier, responses=tuple(responses.values()), rankings=tuple(rankings.values()))
