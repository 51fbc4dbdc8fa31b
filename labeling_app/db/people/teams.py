"""Teams: a user is in one or in none. What is given to a team, all who are in it get."""

from labeling_app.db.connection import Connections


def put_in_team(connections: Connections, name: str, team: str) -> bool:
    """Put a user in a team, in place of the one they are in; False where there is no user.

    Args:
        connections: the database.
        name: of the user, whose sessions go on.
        team: "" for none.
    """
    with connections.write() as db:
        query = "UPDATE users SET team = ? WHERE name = ?"
        return bool(db.execute(query, [team, name]).rowcount)


def all_teams(connections: Connections) -> dict[str, list[str]]:
    """Who may work in each team, by name; nobody in one that was given a source and left by all."""
    query = """SELECT team, CASE WHEN disabled THEN NULL ELSE name END FROM users WHERE team <> ''
               UNION ALL SELECT team, NULL FROM source_teams ORDER BY 1, 2"""
    teams: dict[str, list[str]] = {}
    for team, name in connections.db.execute(query):
        teams.setdefault(team, []).extend([name] if name else [])
    return teams
