"""The demo's reward function: 1 for the correct sum, 0 for anything else."""


def reward(completion: str, answer: int) -> float:
    """Return 1.0 if ``completion`` is ``answer`` as three digits, the least significant first; otherwise 0.0."""
    written = completion[::-1]
    return float(len(written) == 3 and written.isascii() and written.isdigit() and int(written) == answer)
