"""Runs the real launcher and agent with the fake controller: `launch_driver.py SPEC_JSON [CONTROLLER_MODULE]`."""

from __future__ import annotations

import sys

import msgspec

from rerail.config import JobSpec, Settings
from rerail.errors import RerailError
from rerail.runtime import launcher

launcher.MODULES[launcher.CONTROLLER] = sys.argv[2] if len(sys.argv) > 2 else "fake_controller"
try:
    sys.exit(launcher.run(msgspec.json.decode(sys.argv[1], type=JobSpec), Settings()))
except RerailError as error:
    sys.exit(f"rerail: {error}")
