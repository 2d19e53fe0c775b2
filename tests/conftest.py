"""What every test runs under: one thread for each process, no network, hypothesis without deadlines."""

import os

# before anything imports numpy or torch: with tests side by side, threads only get into each other's way
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from hypothesis import HealthCheck, settings  # noqa: E402 - the environment above must stand first

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
# CI draws the same examples every time; at a desk each run draws new ones
settings.register_profile("ci", settings.get_profile("house"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "house")
