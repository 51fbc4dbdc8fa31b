"""The step of the schema by which a later import can replace the rankings of an earlier one."""

IMPORT_NAMES = (
    # The source that an import was given; of earlier imports, that of a prompt they were about.
    "ALTER TABLE imports ADD COLUMN name TEXT NOT NULL DEFAULT ''",
    """UPDATE imports SET name = COALESCE(
        (SELECT p.source FROM prompts p WHERE p.import_id > 0 AND p.import_id = imports.id LIMIT 1),
        (SELECT p.source FROM rankings r JOIN prompts p ON p.id = r.prompt_id
            WHERE r.import_id > 0 AND r.import_id = imports.id LIMIT 1),
        '')""",
    # The import in whose file a ranking was missing that an earlier file had.
    "ALTER TABLE rankings ADD COLUMN replaced_by INTEGER",
    "CREATE INDEX rankings_replaced ON rankings (prompt_id) WHERE replaced_by IS NOT NULL",
)
