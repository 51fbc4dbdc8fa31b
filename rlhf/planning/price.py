"""What a stage cost: hours of devices and of annotators, and their price."""

from collections.abc import Mapping
from typing import Any


def advice_on_speed(report: Mapping[str, Any]) -> list[str]:
    """The sentence of a report that says why little of the device was used, if it has one."""
    advice = (report.get("use") or {}).get("advice")
    return [advice[0].upper() + advice[1:]] if advice else []
