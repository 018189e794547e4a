"""Reads what drives say of their own health (SMART), by `nvme` or `smartctl` where they are installed.

Run by `detect.monitor`. Asking a drive takes a while and may wake it, so it is done seldom and with a deadline.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rerail.detect.detector import Detector, Reading
from rerail.detect.host_memory import names, to_int
from rerail.detect.host_services import run_tool


def smart_values(text: str) -> dict[str, float]:
    """What `nvme smart-log -o json` or `smartctl -j` say, under our names; empty if it is neither."""
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(body, dict):
        return {}
    log = body.get("nvme_smart_health_information_log", body)
    log = log if isinstance(log, dict) else {}
    warning = log.get("critical_warning")
    given: dict[str, Any] = {
        "critical_warning": warning.get("value") if isinstance(warning, dict) else warning,
        "media_errors": log.get("media_errors"),
        "percentage_used": log.get("percent_used", log.get("percentage_used")),
    }
    spare = log.get("avail_spare", log.get("available_spare"))
    threshold = log.get("spare_thresh", log.get("available_spare_threshold"))
    if isinstance(spare, int) and isinstance(threshold, int):
        given["spare_margin"] = spare - threshold
    status, attributes = body.get("smart_status"), body.get("ata_smart_attributes")
    if isinstance(status, dict) and isinstance(status.get("passed"), bool):
        given["failing"] = int(not status["passed"])
    rows = attributes.get("table") if isinstance(attributes, dict) else None
    wanted = {5: "reallocated_sectors", 197: "pending_sectors", 198: "uncorrectable_sectors"}
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("id") in wanted and isinstance(row.get("raw"), dict):
            given[wanted[row["id"]]] = row["raw"].get("value")
    values = {name: to_int(str(value)) for name, value in given.items() if value is not None}
    return {name: value for name, value in values.items() if value is not None}


class Smart:
    """What the drives say of their own health: one drive a look, each seldom, as every question is a command to the drive."""

    name = "host.smart"

    def __init__(
        self,
        root: Path = Path("/"),
        every_s: float = 60.0,
        each_s: float = 1800.0,
        run: Callable[[Sequence[str], float], str | None] = run_tool,
        which: Callable[[str], str | None] = shutil.which,
    ) -> None:
        self.every_s = every_s
        self._each_s, self._run = each_s, run
        self._limit_s = 10.0
        self._base = root / "sys"
        self._nvme, self._smartctl = which("nvme"), which("smartctl")
        self._asked: dict[str, float] = {}

    def supported(self) -> str:
        if not (self._nvme or self._smartctl):
            return "neither nvme (nvme-cli) nor smartctl (smartmontools) is installed"
        return "" if self._drives() else "no drive that nvme or smartctl could ask"

    def check(self) -> list[Reading]:
        now = time.monotonic()
        due = [drive for drive in self._drives() if now - self._asked.get(drive, -self._each_s) >= self._each_s]
        if not due:
            return []
        drive = due[0]
        self._asked[drive] = now
        output = self._run(self._command(drive), self._limit_s)
        silent = Reading("storage.smart.unresponsive", drive, int(output is None))
        return [
            silent,
            *(Reading(f"storage.smart.{name}", drive, value) for name, value in smart_values(output or "").items()),
        ]

    def blind_spots(self) -> list[str]:
        return ["health of the drives: only root may ask them"] if os.geteuid() else []

    def _drives(self) -> list[str]:
        nvme = [name for name in names(self._base / "class/nvme") if re.fullmatch(r"nvme\d+", name)]
        disks = [name for name in names(self._base / "block") if re.fullmatch(r"sd[a-z]+", name)]
        return [*nvme, *(disks if self._smartctl else ())]

    def _command(self, drive: str) -> list[str]:
        if self._nvme and drive.startswith("nvme"):
            return [self._nvme, "smart-log", "-o", "json", f"/dev/{drive}"]
        return [self._smartctl or "smartctl", "-j", "-H", "-A", f"/dev/{drive}"]


def detectors(root: Path = Path("/")) -> list[Detector]:
    """All detectors of this module."""
    return [Smart(root)]
