"""The demo's reward: 1 for the right sum, 0 for anything else."""


def reward(completion: str, answer: int) -> float:
    """Three digits, the least significant first, that make ``answer``."""
    written = completion[::-1]
    return float(len(written) == 3 and written.isascii() and written.isdigit() and int(written) == answer)
