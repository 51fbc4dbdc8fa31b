"""How often somebody has tried lately: what limits of sign-ins and of tokens count by.

An attempt is counted before it is checked and taken back when it was right. Counted after, any
number of attempts sent at once would pass whatever the limit is.
"""

import ipaddress
from collections import OrderedDict, deque
from collections.abc import Hashable

MAX_KEYS = 30_000
MAX_COUNTED = 200


class Attempts:
    """Counts attempts by key: an address, a name, or both.

    Memory is bounded: of one key at most 200 attempts count, and of more than 30,000 keys those
    that were tried longest ago are forgotten.

    Args:
        window_seconds: how long an attempt counts.
    """

    def __init__(self, window_seconds: float) -> None:
        self.window_seconds = window_seconds
        self._times: OrderedDict[Hashable, deque[float]] = OrderedDict()

    def add(self, key: Hashable, now: float) -> int:
        """Count one more attempt. Returns how many there were before it."""
        before = self.count(key, now)
        self._times.setdefault(key, deque(maxlen=MAX_COUNTED)).append(now)
        self._times.move_to_end(key)
        if len(self._times) > MAX_KEYS:
            self._times.popitem(last=False)
        return before

    def count(self, key: Hashable, now: float) -> int:
        """How many attempts count at `now`, in seconds of a clock that only goes forward."""
        times = self._times.get(key)
        if times is None:
            return 0
        while times and times[0] <= now - self.window_seconds:
            times.popleft()
        return len(times)

    def take_back(self, key: Hashable) -> None:
        """The latest attempt was a right one: it does not count."""
        if times := self._times.get(key):
            times.pop()

    def forget(self, key: Hashable) -> None:
        """No attempt so far counts any more."""
        self._times.pop(key, None)


def network_of(address: str) -> str:
    """What counts as one sender: an IPv4 address, or the /64 that one IPv6 customer is given."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address  # no address: a unix socket, or what a trusted proxy says
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
