"""``python -m headrace``: run the program ``headrace`` where its script is not on the ``PATH``."""

from headrace.run.cli import main

if __name__ == "__main__":
    main()
