"""Task directories for tests."""

from __future__ import annotations

from pathlib import Path

HARBOR = {
    "task.toml": (
        'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[agent]\ntimeout_sec = 60.0\n[verifier]\n'
        'timeout_sec = 30.0\nenv = { EXPECTED = "42" }\n[environment]\nbuild_timeout_sec = 30.0\nmemory_mb = 512\n'
        'storage = "64M"\n'
        'env = { WORD = "set" }\n'
    ),
    "instruction.md": "Make answer.sh print 42.\n",
    "environment/Dockerfile": (
        "# a comment\nFROM python:3.12-slim\nLABEL a=b\nENV PLACE=/app/data MORE=1\nWORKDIR /app\nCOPY . /app/\n"
        'RUN mkdir -p $PLACE && \\\n    echo built > $PLACE/made && rm Dockerfile\nCMD ["bash"]\n'
    ),
    "environment/answer.sh": "#!/bin/bash\necho 41\n",
    "environment/lib/note.txt": "hello",
    "tests/test.sh": (
        "#!/bin/bash\ntest -e /app/data/made || exit 1\n"
        '[ "$(bash /app/answer.sh)" = "$EXPECTED" ] && echo 1 > /logs/verifier/reward.txt '
        "|| echo 0.25 > /logs/verifier/reward.txt\n"
    ),
    "solution/solve.sh": "sed -i s/41/42/ /app/answer.sh\n",
}
TERMINAL_BENCH = {
    "task.yaml": (
        "instruction: |-\n  Write hello into\n  the file greeting.\nauthor_name: x\nparser_name: pytest\n"
        "max_agent_timeout_sec: 60.0\nmax_test_timeout_sec: 30.0\n"
    ),
    "Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "docker-compose.yaml": "services:\n  client:\n    build: .\n",
    "run-tests.sh": "#!/bin/bash\npython -m pytest -p no:cacheprovider -rA $TEST_DIR/test_outputs.py\n",
    "tests/test_outputs.py": (
        'from pathlib import Path\n\n\ndef test_greeting():\n    assert Path("greeting").read_text() == "hello\\n"\n'
    ),
}


def write_task(directory: Path, files: dict[str, str], **changes: str | None) -> Path:
    """Write a task with these files, of which ``changes`` replaces some, or leaves them out where it is ``None``."""
    for name, text in {**files, **{key.replace("__", "/"): text for key, text in changes.items()}}.items():
        if text is not None:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return directory
