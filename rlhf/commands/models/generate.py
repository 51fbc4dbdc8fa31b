"""`rlhf generate`."""

from typing import Any

from policies.sampling.settings import GenerateSettings as Settings
from rlhf.errors import InputError

EXAMPLE = "rlhf generate --db labels.db --model models/SmolLM2-135M-Instruct -k 4"


def run(settings: Settings) -> dict[str, Any]:
    """Sample responses until every prompt has as many as asked for."""
    from labeling_app.db.store import Store
    from policies.sampling.responses import generate_responses

    with Store(settings.db, must_exist=True) as store:
        if not store.counts()["prompts"]:
            raise InputError(
                f"{settings.db} is empty",
                f"Begin with: rlhf import prompts.jsonl --db {settings.db}",
            )
        return generate_responses(
            settings,
            lambda fingerprint: store.prompts_lacking_responses(
                settings.k, fingerprint, only_unanswered=settings.only_unanswered
            ),
            store.add_responses,
        )


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How many responses are new, and why when none is."""
    from policies.evaluate.summaries import describe_generated

    return describe_generated(settings, result)
