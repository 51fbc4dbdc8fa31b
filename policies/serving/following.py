"""`rlhf serve --policy LOOP` changes to the policy that is promoted, while apps are answered.

The server of the promoted policy is started beside the one that answers, so the device must hold
both for a while. Requests go to it once it is ready; the earlier server ends with its last answer,
so no stream breaks. If it does not start, the earlier policy answers on.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policies.serving.proxy import Proxy, ServedPolicy
from policies.serving.servers.engine import EngineProcess
from rlhf.records.served import Variant
from rlhf.run.loops.promotion import promoted_policy

LOOK_SECONDS = 1.0
READY_SECONDS = 0.2
RETRY_SECONDS = 60.0  # after a policy could not be served

Start = Callable[[], tuple[ServedPolicy, EngineProcess]]


@dataclass(kw_only=True)
class PromotionFollower:
    """Serves whichever policy of a loop is promoted.

    Args:
        out: folder of the loop.
        variant: in whose place its policy answers.
        name: the model folder that is served now.
        engine: its server.
        engines: the servers that are watched, and ended with the proxy; kept up to date.
        prepare: reads a model folder, and returns what starts its server.
        start_comparison: the number of the comparison of these policies; None without one.
    """

    out: Path
    variant: Variant
    name: str
    engine: EngineProcess
    engines: list[EngineProcess]
    prepare: Callable[[str], Start]
    start_comparison: Callable[[Mapping[Variant, ServedPolicy]], int | None]
    _retiring: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def follow(self, proxy: Proxy) -> None:
        """Change the policy after every promotion, until this is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                name = await asyncio.to_thread(promoted_policy, self.out)
                if name != self.name:
                    await self._change_to(name, proxy)
            except Exception as error:  # whatever it is, the earlier policy answers on
                sys.stderr.write(
                    f"The promoted policy of {self.out} cannot be served: {error}\n"
                    f"{self.name} answers until it can; it is tried again in a minute.\n"
                )
                await asyncio.sleep(RETRY_SECONDS)

    async def _change_to(self, name: str, proxy: Proxy) -> None:
        start = await asyncio.to_thread(self.prepare, name)  # hashing weights takes a while
        policy, engine = start()  # here: the system ends it with the thread that has started it
        try:
            while not await asyncio.to_thread(engine.is_ready):
                if not await self._is_promoted(name):
                    break
                await asyncio.sleep(READY_SECONDS)
            if not await self._is_promoted(name):  # rolled back meanwhile
                await asyncio.to_thread(engine.stop)
                return
            async with proxy.changing:
                before = proxy.policies.by_variant[self.variant]
                policies = {**proxy.policies.by_variant, self.variant: policy}
                comparison = await asyncio.to_thread(self.start_comparison, policies)
                proxy.change(self.variant, policy, comparison)
        except Exception:
            await asyncio.to_thread(engine.stop)
            raise
        except asyncio.CancelledError:
            engine.stop()
            raise
        self.engines.append(engine)
        retiring = asyncio.create_task(self._retire(before, self.engine))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
        self.name, self.engine = name, engine
        sys.stderr.write(f"Promoted: {name} answers from now on.\n")

    async def _is_promoted(self, name: str) -> bool:
        return await asyncio.to_thread(promoted_policy, self.out) == name

    async def _retire(self, policy: ServedPolicy, engine: EngineProcess) -> None:
        """End a server with its last answer."""
        while policy.running:
            await asyncio.sleep(READY_SECONDS)
        self.engines.remove(engine)
        await asyncio.to_thread(engine.stop)
