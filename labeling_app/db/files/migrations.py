"""Brings a database to the newest schema; a step and the record that it ran are one transaction."""

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from labeling_app.db.files.schema import STEPS

MIGRATION_SET = "labeling_app"

migrations = Migrations(MIGRATION_SET)


def _register(name: str) -> None:
    @migrations(name=name)
    def run(db: Database) -> None:
        for statement in STEPS[name]:
            db.execute(statement)


for _name in STEPS:
    _register(_name)
