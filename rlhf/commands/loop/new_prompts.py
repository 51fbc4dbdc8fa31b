"""Prompts without responses that are imported while a round waits: they get some at once."""

from collections.abc import Callable
from dataclasses import replace

from labeling_app.db.store import Store
from rlhf.commands.loop.children import StageFailedError, run_stage, say
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.loop.stages import stages_of_round
from rlhf.errors import InterruptedRunError
from rlhf.run.rundir import RunDir


class NewPrompts:
    """Runs `rlhf generate` of the first model for prompts that have no response.

    In a later round, too: sampling the newest policy would answer all prompts of the database.

    Args:
        run: of the loop.
        settings: of the loop.
        number: of the round that waits.
    """

    def __init__(self, run: RunDir, settings: LoopSettings, number: int) -> None:
        [generate] = [stage for stage in stages_of_round(settings, 0) if stage.name == "generate"]
        self._run, self._db = run, settings.database
        self._stage = replace(
            generate,
            number=number,
            folder=settings.round_folder(number),
            given={**generate.given, "only_unanswered": True},
        )
        self._known: int | None = None  # how many prompts there were at the last look

    def sample_responses(self, is_round_ready: Callable[[], bool]) -> None:
        """Sample responses if the number of prompts has changed and one has none.

        However the command ends, the round waits on: people rank what there is. It runs again when
        the number of prompts has changed, or after a pause that stopped it.

        Args:
            is_round_ready: whether the round can begin. It does not wait for responses that people
                would rank later: the command is ended, and the next wait, if any, goes on with it.
        """
        with Store(self._db, read_only=True) as store:
            num_prompts = store.counts()["prompts"]
            is_needed = num_prompts != self._known and store.has_unanswered_prompts()
        self._known = num_prompts
        if not is_needed:
            return
        try:
            if not run_stage(self._run, self._stage, is_over=is_round_ready):
                self._known = None
        except (StageFailedError, InterruptedRunError) as error:
            say(
                f"{error.problem}. The round waits on, but new prompts have no responses.\n"
                f"  Sample them by itself: {self._stage.command}"
            )
