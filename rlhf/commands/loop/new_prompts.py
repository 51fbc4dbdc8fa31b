"""Prompts without responses that are imported while a round waits: they get some at once."""

from dataclasses import replace

from labeling_app.db.store import Store
from rlhf.commands.loop.children import StageFailedError, run_stage, say
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.loop.stages import stages_of_round
from rlhf.run.rundir import RunDir


class NewPrompts:
    """Runs `rlhf generate` of the first model where a prompt has no response.

    In a later round, too: sampling the newest policy would answer all prompts of the database.

    Args:
        run: of the loop.
        settings: of the loop.
        number: of the round that waits.
    """

    def __init__(self, run: RunDir, settings: LoopSettings, number: int) -> None:
        [generate] = [one for one in stages_of_round(settings, 0) if one.name == "generate"]
        self._run, self._db = run, settings.database
        self._stage = replace(generate, number=number, folder=settings.round_folder(number))
        self._known: int | None = None  # how many prompts there were at the last look

    def answer(self) -> None:
        """Sample responses if the number of prompts has changed and one has no response.

        Where that fails, this is said, and the round waits on: people rank what there is.

        Raises:
            InterruptedRunError: the command was interrupted or killed.
        """
        with Store(self._db, read_only=True) as store:
            num_prompts = store.counts()["prompts"]
            is_needed = num_prompts != self._known and store.has_unanswered_prompts()
        self._known = num_prompts
        if not is_needed:
            return
        try:
            if not run_stage(self._run, self._stage):  # the loop is to pause
                self._known = None
        except StageFailedError as error:
            say(f"{error.problem}. The round waits on; new prompts have no responses.")
