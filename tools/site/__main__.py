"""The command ``python -m tools.site``: builds site/ and prints what is wrong with it."""

import sys
from pathlib import Path

from tools.site import build, problems


def main() -> int:
    """Build and check the site, and return the exit status."""
    root = Path(__file__).parents[2]
    failed = build(root)
    if failed:
        print(failed, file=sys.stderr)
        return 1
    lines = problems(root / "site")
    print("\n".join(lines) or f"{sum(1 for _ in (root / 'site').rglob('*.html'))} pages: site/index.html")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
