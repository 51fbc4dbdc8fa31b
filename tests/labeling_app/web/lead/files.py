"""Files that a lead uploads, and what the page Data answers."""

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

HOSTILE = "<script>window.hacked = 1</script>${window.hacked = 1}"
GOOD = {"prompt": HOSTILE, "responses": ["good", "bad"], "tiers": [[0], [1]]}


def jsonl(*lines: dict) -> bytes:
    return "\n".join(json.dumps(line) for line in lines).encode()


async def upload(client: httpx.AsyncClient, name: str, content: bytes) -> str:
    """Send a file in two pieces. Returns its id."""
    begun = await client.post("/lead/data/upload", json={"name": name, "size": len(content)})
    assert begun.status_code == 200, begun.text
    one, half = begun.json()["id"], len(content) // 2
    for at, piece in ((0, content[:half]), (half, content[half:])):
        sent = await client.post(f"/lead/data/upload/{one}/{at}", content=piece)
        assert sent.json() == {"received": at + len(piece)}
    return one


def importing(name: str, content: bytes, **fields: str) -> Callable:
    """Upload, preview, import, and wait for the end: the preview and the last state."""

    async def run(client: httpx.AsyncClient) -> list[dict]:
        chosen = {"id": await upload(client, name, content), **fields}
        shown = (await client.post("/lead/data/preview", json=chosen)).json()
        begun = await client.post("/lead/data/import", json=chosen)
        assert begun.json() == {"say": f"Importing {name} …"}
        for _ in range(600):
            state = (await client.get("/lead/data/import")).json()
            if state["over"]:
                return [shown, state]
            await asyncio.sleep(0.1)
        pytest.fail("the import did not end")

    return run
