"""Counts recent attempts, for the limits on sign-ins and tokens.

An attempt is counted before it is checked, and taken back if it was right. If it were counted
afterwards, any number of attempts sent at once would pass the limit.
"""

import ipaddress
from collections import OrderedDict, deque
from collections.abc import Hashable

MAX_KEYS = 30_000
MAX_COUNTED = 200


class Attempts:
    """Counts attempts by key: an address, a name, or both.

    Memory is bounded: at most 200 attempts per key and 30,000 keys; the key that was tried longest
    ago is forgotten first.

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
        """How many attempts count at `now`, in seconds of a monotonic clock."""
        times = self._times.get(key)
        if times is None:
            return 0
        while times and times[0] <= now - self.window_seconds:
            times.popleft()
        return len(times)

    def take_back(self, key: Hashable) -> None:
        """Remove the latest attempt: it was right."""
        if times := self._times.get(key):
            times.pop()

    def forget(self, key: Hashable) -> None:
        """Remove all attempts of a key."""
        self._times.pop(key, None)


def network_of(address: str) -> str:
    """The sender to count by: an IPv4 address, or the /64 network that one IPv6 customer gets."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address  # a unix socket, or a name from a trusted proxy
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
