"""The sentences with which commands end."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.cli import COMMANDS

IMPORTED = {
    "new_prompts": 2301,
    "new_responses": 4602,
    "new_rankings": 2303,
    "new_checks": 0,
    "checks_not_made": 0,
    "unnamed_before": 0,
    "first_not_made": [],
    "returned": 0,
    "replaced": 0,
    "unchanged": 0,
    "other_sources": [],
    "bad_lines": 0,
    "first_bad": [],
    "ignored_fields": {},
    "read_fields": {},
    "questions": {},
    "judgments_by": {},
    "unfinished": 0,
    "in_db": {"prompts": 2301, "responses": 4602, "rankings": 2303},
    "splits": {"train": 2000, "test": 301},
}
HOLDS = "labels.db holds 2,301 prompts (2,000 train, 301 test), 4,602 responses and 2,303 rankings."
NONE_NEW = {"new_prompts": 0, "new_responses": 0, "new_rankings": 0}
DISTANT = {"value": 0.7, "low": 0.6, "high": 0.8, "n": 50}


def sentences(command: str, settings: dict[str, Any], result: dict[str, Any]) -> list[str]:
    described = {"db": "labels.db", "out": "out", "replace": False, **settings}
    module = import_module(f"rlhf.commands.{COMMANDS[command]}")
    return module.describe(SimpleNamespace(**described), result).splitlines()


@pytest.mark.parametrize(
    ("result", "first"),
    [
        ({}, "Imported 2,303 rankings of 2,301 prompts."),
        (
            {"bad_lines": 1, "first_bad": ["a.jsonl:7: an empty response."]},
            "Imported 2,303 rankings of 2,301 prompts; 1 line left out: "
            "a.jsonl:7: an empty response.",
        ),
        ({"new_rankings": 0}, "Imported 2,301 prompts and 4,602 responses."),
        ({"new_rankings": 0, "new_responses": 0, "new_prompts": 1}, "Imported 1 prompt."),
        (NONE_NEW, "Nothing new: all of it was imported before."),
    ],
)
def test_an_import_says_what_is_new_and_what_was_left_out(
    result: dict[str, Any], first: str
) -> None:
    lines = sentences("import", {}, IMPORTED | result)
    assert lines == [first, HOLDS, "Next: rlhf export --db labels.db --out rankings"]


@pytest.mark.parametrize(("num_bad", "last"), [(2, "  a:2: bad."), (1_100, "  and 1,080 more")])
def test_an_import_lists_the_lines_that_it_left_out(num_bad: int, last: str) -> None:
    bad = {"bad_lines": num_bad, "first_bad": [f"a:{n}: bad." for n in range(1, num_bad + 1)][:100]}
    said = sentences("import", {}, IMPORTED | bad)
    listed = said[1 : said.index(HOLDS)]
    assert said[0] == f"Imported 2,303 rankings of 2,301 prompts; {num_bad:,} lines left out:"
    assert listed[:2] == ["  a:1: bad.", "  a:2: bad."]
    assert (listed[-1], len(listed)) == (last, min(num_bad, 21))


def test_an_import_says_what_became_of_gold_items_and_what_comes_next() -> None:
    checks = {"new_checks": 1, "checks_not_made": 2, "first_not_made": ["a:1: seen by ann"]}
    held = {"prompts": 3, "responses": 6, "rankings": 0}
    checks |= {"splits": {"train": 3, "test": 0}}
    assert sentences("import", {}, IMPORTED | checks | {"in_db": held})[1:] == [
        "1 gold or training task will be mixed in.",
        "2 gold or training tasks not made, the first: a:1: seen by ann",
        "labels.db holds 3 prompts (3 train, 0 test), 6 responses and 0 rankings.",
        "Next: rlhf label --db labels.db",
    ]
    held["responses"] = 0
    assert sentences("import", {}, IMPORTED | {"in_db": held})[-1] == (
        "Next: rlhf generate --db labels.db --model MODEL"
    )


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (
            {"replaced": 1, "unchanged": 1200},
            "1 earlier ranking of this source was replaced and no longer counted; 1,200 unchanged.",
        ),
        ({}, "0 earlier rankings of this source were replaced and no longer counted; 0 unchanged."),
        (
            {"other_sources": ["a.json", "b"]},
            "Nothing was replaced: no earlier import has this source. To name one, add --source: "
            "a.json and b.",
        ),
    ],
)
def test_an_import_that_replaces_says_what_it_replaced(
    result: dict[str, Any], sentence: str
) -> None:
    assert sentences("import", {"replace": True}, IMPORTED | result)[1] == sentence


def test_a_judge_says_how_far_people_agree_with_it() -> None:
    counts = {"ranked": 1, "ranked_before": 2, "too_few_responses": 0, "unclear_pairs": 3}
    result = {"annotator": "judge:m", **counts, "calibration": {"people": DISTANT}}
    assert sentences("annotate", {}, result) == [
        "judge:m ranked the responses of 1 prompt; 2 were ranked before.",
        "Its verdicts on 3 pairs were unreadable.",
        "It orders 70 % (95 % interval 60–80 %) of the pairs as people did, averaged over 50 "
        "prompts.",
        "Next: rlhf export --db labels.db --out rankings",
    ]


def test_an_export_says_who_ranked_and_which_command_reads_it() -> None:
    counts = {"rankings": 5, "rankings_by_kind": {"human": 4, "ai": 1}, "out": "out"}
    counts |= {"replaced_by_decisions": 0, "prompts_without_responses": 0}
    ranked = counts | {"prompts": {"train": 3, "test": 1}}
    assert sentences("export", {"format": "ranked"}, ranked) == [
        "Exported 5 rankings (4 human and 1 ai) to out: 3 train and 1 test prompts.",
        "Next: rlhf train-reward --rankings out --model MODEL --out runs/NAME/reward",
    ]
    ranked = counts | {"prompts": {"train": 4, "test": 0}}
    assert sentences("export", {"format": "ranked"}, ranked)[0] == (
        "Exported 5 rankings (4 human and 1 ai) to out: 4 train and 0 test prompts. There are no "
        "test prompts, with which accuracy is measured; to add some: rlhf import FILE "
        "--db labels.db --split test"
    )
    ranked = counts | {"prompts": {"train": 3, "test": 1}, "prompts_without_responses": 1_200}
    assert sentences("export", {"format": "ranked"}, ranked | {"replaced_by_decisions": 1})[
        0
    ].endswith(
        " Left out: 1 ranking of tasks that a lead has decided and 1,200 prompts without responses."
    )
    rows = counts | {"rows": {"train": 9, "test": 0}}
    assert sentences("export", {"format": "trl"}, rows) == [
        "Exported 5 rankings (4 human and 1 ai) to out: 9 train and 0 test rows."
    ]


@pytest.mark.parametrize(
    ("action", "result", "lines"),
    [
        (
            "add",
            {"user": "ann", "password": "pw"},
            [
                "ann may sign in as lead.",
                "The password, shown only now: pw",
                "Next: rlhf label --db labels.db",
            ],
        ),
        ("reset", {"user": "ann"}, ["ann has a new password and is signed out everywhere."]),
        (
            "token",
            {"program": "ann", "token": "t"},
            [
                "The program ann may send feedback; its earlier tokens no longer work.",
                "The token, shown only now: t",
            ],
        ),
        ("list", {"ann": "lead", "shop": "program"}, ["ann   lead", "shop  program"]),
        ("list", {}, ["labels.db has no users yet."]),
    ],
)
def test_users_and_what_they_can_do(action: str, result: dict[str, Any], lines: list[str]) -> None:
    assert sentences("users", {"action": action, "name": "ann", "role": "lead"}, result) == lines


def test_a_ranking_is_traced_in_sentences() -> None:
    result = {
        "ranking": "r1",
        "annotator": {"name": "ann", "kind": "human"},
        "rubric": {"version": "v2", "text": "Be kind."},
        "reason": "round 1: random",
        "live": True,
        "responses": [
            {"id": "a", "tier": 1, "model": "m", "fingerprint": "f0", "round": 1},
            {"id": "b", "tier": 2, "model": "", "fingerprint": None, "round": 0},
        ],
    }
    assert sentences("trace", {}, result) == [
        "r1 is by ann (human); it counts.",
        "The task was queued for: round 1: random.",
        "Rubric v2: Be kind.",
        "Place 1: a by m f0, round 1.",
        "Place 2: b by an unknown model, before any round.",
    ]


@pytest.mark.parametrize(
    ("command", "settings", "result", "first"),
    [
        (
            "backup",
            {},
            {"out": "b.db", "holds": {"prompts": 1, "responses": 2}},
            "Copied labels.db to b.db and checked the copy: 1 prompt, 2 responses and 0 rankings.",
        ),
        (
            "label",
            {},
            {"new_rankings": 1, "open_tasks": 7, "rankings": 1},
            "1 new ranking; 7 tasks left to rank.",
        ),
        ("chat", {}, {"new_rankings": 2, "open_tasks": 0}, "2 votes stored in labels.db."),
        (
            "prioritize",
            {},
            {"by": "fisher", "tasks": 10, "random": 2},
            "Ordered 10 open tasks by fisher; 2 of them are drawn at random.",
        ),
        (
            "round",
            {},
            {"round": 1, "queued": 3, "chosen": {"divergent": 2, "random": 1}},
            "Round 1: queued 3 new tasks (2 divergent and 1 random).",
        ),
        (
            "score",
            {},
            {"prompts": 1, "responses": 2, "mean": 0.5, "std": 0.25, "out": "o"},
            "Wrote the rewards of 2 responses to 1 prompt into o: mean 0.50, standard deviation "
            "0.25.",
        ),
        (
            "sft",
            {"model": "m"},
            {
                "steps": 4,
                "demonstrations": {"train": 8},
                "held_out_loss": {"before": 2.0, "after": 1.5},
            },
            "Trained 4 steps on 8 demonstrations; the held-out loss went from 2.000 to 1.500.",
        ),
        (
            "dpo",
            {"out": Path("runs/a/dpo")},
            {
                "steps": 4,
                "pairs": {"train": {"pairs": 1200, "prompts": 600}, "test": {"pairs": 90}},
                "held_out": {"accuracy": 0.711, "loss": 0.6},
            },
            "Trained 4 steps on 1,200 pairs of 600 prompts. It orders 71 % of 90 held-out pairs as "
            "the annotators did.",
        ),
        (
            "dpo",
            {"out": Path("runs/a/dpo")},
            {
                "steps": 1,
                "pairs": {"train": {"pairs": 1, "prompts": 1}},
                "held_out": None,
            },
            "Trained 1 step on 1 pair of 1 prompt.",
        ),
        ("doctor", {"canary": True}, {"Python": "3.11"}, "Python  3.11"),
    ],
)
def test_other_commands(
    command: str, settings: dict[str, Any], result: dict[str, Any], first: str
) -> None:
    assert sentences(command, settings, result)[0] == first


@pytest.mark.parametrize("left", [0, 7])
def test_a_stopped_board_says_how_to_go_on_where_tasks_are_left(left: int) -> None:
    result = {"new_rankings": 1, "open_tasks": left, "rankings": 1}
    found = sentences("label", {}, result)
    assert found[1:-1] == ["Give the same command again to go on ranking."] * bool(left)
    assert found[-1].startswith("Next: rlhf export ")
    nothing = {**result, "new_rankings": 0, "rankings": 0}
    assert sentences("label", {}, nothing)[1:] == found[1:-1]  # there is nothing to export


def test_best_of_n_fine_tuning_says_how_outputs_were_chosen() -> None:
    best = {
        **{"samples": 4, "prompts": 9, "chosen": 7, "no_choice": 2, "tied": 1, "unfinished": 0},
        "reward": {"all": 0.1, "chosen": 0.456},
    }
    result = {
        "steps": 4,
        "demonstrations": {"train": 7},
        "held_out_loss": {"before": 2.0, "after": 1.5},
        "best_of": best,
        "inputs": {"reference": {"path": "ref"}, "reward": {"path": "rm"}},
    }
    assert sentences("sft", {"out": Path("runs/a/sft")}, result) == [
        "Trained 4 steps on the best of 4 outputs of 7 prompts; the held-out loss went from 2.000 "
        "to 1.500.",
        "The mean reward of these outputs is 0.46, of all outputs of the same prompts 0.10.",
        "2 prompts left out: all outputs have the same text or the same reward.",
        "1 prompt with several best outputs: the first of them was taken.",
        "Next: rlhf evaluate --policy runs/a/sft --reference ref --reward rm --out "
        "runs/a/evaluate-sft",
    ]
