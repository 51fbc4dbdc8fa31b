"""`rlhf generate`."""

from typing import Any

from policies.sampling.settings import GenerateSettings as Settings
from rlhf.commands.wording import next_command
from rlhf.errors import InputError
from rlhf.records.wording import counted

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
    """How many responses were added, or why there was nothing to do."""
    if not result["responses"]:
        return (
            f"Nothing to do: all prompts in {settings.db} have {settings.k} responses of "
            f"{settings.model} already. A larger -k samples more."
        )
    return (
        f"Sampled {counted(result['responses'], 'response')} to "
        f"{counted(result['prompts'], 'prompt')}.\n{next_command('label', db=settings.db)}"
    )
