"""`rlhf generate`."""

from typing import Any

from policies.settings import GenerateSettings as Settings

__all__ = ["Settings", "run"]


def run(settings: Settings) -> dict[str, Any]:
    """Sample responses for the prompts that lack them."""
    from labeling_app.store import Store
    from policies.generate import generate_responses

    with Store(settings.db, must_exist=True) as store:
        return generate_responses(
            settings,
            lambda fingerprint: store.prompts_lacking_responses(settings.k, fingerprint),
            store.add_responses,
        )
