"""Compile the claimed device, and print the environment variables of a process that has it, as one JSON object:
``python -m headrace.testing.claimed DIRECTORY``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headrace.base.errors import EnvError
from headrace.testing.claimed import device_environment

if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(device_environment(Path(sys.argv[1]))) + "\n")
    except EnvError as error:
        sys.exit(f"{error.problem}; {error.remedy}")
