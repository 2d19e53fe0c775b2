"""Every formula once more, written from the papers in plain Python over float64: nothing of the library is used.

A row is a dictionary of the numbers of one token; a sequence is a list of rows that carry loss.
"""

import math
from collections.abc import Callable

Row = dict[str, float]
Sequence = list[Row]


def e(x: float) -> float:
    return math.exp(max(-20.0, min(20.0, x)))


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def log_r(t: Row, anchor: str = "old") -> float:
    return clamp(t["pi"] - t[anchor], -20, 20)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def ppo(r: float, a: float, low: float, high: float, cap: float = math.inf) -> float:
    return -min(min(r, cap) * a, clamp(r, 1 - low, 1 + high) * a)


def each(formula: Callable[..., float]) -> Callable[..., list[float]]:
    return lambda sequence, **o: [formula(t, **o) for t in sequence]


def grpo(
    t: Row, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, ratio_cap: float = math.inf
) -> float:
    value = ppo(e(log_r(t)), t["a"], clip_low, clip_high, ratio_cap)
    return min(value, -dual_clip * t["a"]) if dual_clip is not None and t["a"] < 0 else value


def dapo(t: Row, clip_low: float = 0.2, clip_high: float = 0.28) -> float:
    return ppo(e(log_r(t)), t["a"], clip_low, clip_high)


def gspo(sequence: Sequence, clip_low: float = 3e-4, clip_high: float = 4e-4) -> list[float]:
    s = e(mean([log_r(t) for t in sequence]))
    return [ppo(s, t["a"], clip_low, clip_high) for t in sequence]


def luspo(sequence: Sequence, clip_low: float = 2e-3, clip_high: float = 2.5e-3) -> list[float]:
    return gspo(sequence, clip_low, clip_high)


def gmpo(sequence: Sequence, clip_low: float = 0.4, clip_high: float = 0.4) -> list[float]:
    a = mean([t["a"] for t in sequence])
    bounded = [min(log_r(t), clip_high) if a > 0 else max(log_r(t), -clip_low) for t in sequence]
    return [-a * math.exp(mean(bounded))] * len(sequence)


def cispo(t: Row, clip_high: float = 4.0, anchor: str = "old", two_sided: bool = False, clip_low: float = 0.2) -> float:
    r = min(e(log_r(t, anchor)), 1 + clip_high)
    return -(max(r, 1 - clip_low) if two_sided else r) * t["a"] * t["pi"]


def sapo(t: Row, tau_pos: float = 1.0, tau_neg: float = 1.05) -> float:
    tau = tau_pos if t["a"] > 0 else tau_neg
    return -4 / tau / (1 + math.exp(-tau * (e(log_r(t)) - 1))) * t["a"]


def vespo(sequence: Sequence, anchor: str = "mu") -> list[float]:
    w = e(sum(log_r(t, anchor) for t in sequence))
    phi = {True: w**2 * math.exp(3 * (1 - w)), False: w**3 * math.exp(2 * (1 - w))}
    return [-phi[t["a"] >= 0] * t["a"] * t["pi"] for t in sequence]


def reinforce(t: Row, ratio_cap: float = 2.0, anchor: str = "mu") -> float:
    return -min(e(log_r(t, anchor)), ratio_cap) * t["a"] * t["pi"]


def topr(sequence: Sequence, anchor: str = "mu") -> list[float]:
    taper = min(1.0, e(sum(log_r(t, anchor) for t in sequence)))
    return [-(1.0 if t["a"] > 0 else taper) * t["a"] * t["pi"] for t in sequence]


def kimi(t: Row, tau: float = 0.1) -> float:
    return -t["a"] * t["pi"] + tau / 2 * log_r(t) ** 2


def dro(t: Row, beta: float = 0.05) -> float:
    return -(t["a"] * t["pi"] - beta / 2 * log_r(t) ** 2)


def dppo(
    t: Row, delta: float = 0.2, ratio_cap: float = 20.0, anchor: str = "old", kl_tau: float = 0.0
) -> float:  # fmt: skip
    moved = math.exp(t["pi"]) - math.exp(t["mu"])
    dropped = (t["a"] > 0 and moved > delta) or (t["a"] < 0 and moved < -delta)
    gain = 0.0 if dropped else t["a"] * min(e(log_r(t, anchor)), ratio_cap) * t["pi"]
    return kl_tau * log_r(t, "mu") ** 2 - gain


def ipo(t: Row, delta: float = 0.1, tau: float = 1e-3) -> float:
    keep = abs(math.exp(t["pi"]) - math.exp(t["mu"])) <= delta
    return -keep * t["a"] * e(log_r(t, "mu")) + tau * log_r(t, "mu") ** 2


def aspo(t: Row, clip_low: float = 0.2, dual_clip: float = 3.0) -> float:
    r = e(log_r(t))
    return -min(1 / r, dual_clip) * t["a"] if t["a"] > 0 else -clamp(r, 1 - clip_low, dual_clip) * t["a"]


def ce(t: Row) -> float:
    return -t["pi"]


def ref_kl(t: Row, kl: str = "k3", unbiased_kl: bool = False) -> float:
    x = clamp(t["ref"] - t["pi"], -20, 20)
    value = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kl]
    return value * e(log_r(t)) if unbiased_kl else value


TOKENS: dict[str, Callable[..., list[float]]] = {
    "grpo": each(grpo), "dr_grpo": each(grpo), "dapo": each(dapo), "gspo": gspo, "gspo_token": gspo, "luspo": luspo,
    "gmpo": gmpo, "cispo": each(cispo), "sapo": each(sapo), "vespo": vespo, "reinforce": each(reinforce),
    "topr": topr, "kimi": each(kimi), "dro": each(dro), "dppo": each(dppo), "ipo": each(ipo), "aspo": each(aspo),
    "ce": each(ce), "ref_kl": each(ref_kl),
}  # fmt: skip
"""Values of a sequence's tokens."""


def m2po(batch: list[Sequence], threshold: float = 0.04, anchor: str = "mu") -> list[list[float]]:
    squares = sorted(log_r(t, anchor) ** 2 for sequence in batch for t in sequence)
    while squares and mean(squares) > threshold:
        squares.pop()
    bound = squares[-1] if squares else -1.0
    kept = [[log_r(t, anchor) ** 2 <= bound for t in sequence] for sequence in batch]
    return [
        [-e(log_r(t, anchor)) * t["a"] if keep else 0.0 for t, keep in zip(sequence, keeps, strict=True)]
        for sequence, keeps in zip(batch, kept, strict=True)
    ]


def _covariant(batch: list[Sequence], fraction: float) -> set[int]:
    """Those above a bound, not the first of a ranking: equal values are chosen together."""
    rows = [t for sequence in batch for t in sequence]
    a, p = mean([t["a"] for t in rows]), mean([t["pi"] for t in rows])
    by = {id(t): (t["a"] - a) * (t["pi"] - p) for t in rows}
    bound = sorted(by.values(), reverse=True)[max(1, int(fraction * len(rows))) - 1]
    return {key for key, value in by.items() if value >= bound - 1e-12 and value > 1e-9}


def clip_cov(batch: list[Sequence], fraction: float = 2e-4) -> list[list[float]]:
    chosen = _covariant(batch, fraction)
    return [[0.0 if id(t) in chosen else grpo(t) for t in sequence] for sequence in batch]


def kl_cov(batch: list[Sequence], fraction: float = 2e-4, beta: float = 1.0) -> list[list[float]]:
    chosen = _covariant(batch, fraction)
    return [
        [-e(log_r(t)) * t["a"] + (beta * abs(log_r(t)) if id(t) in chosen else 0.0) for t in sequence]
        for sequence in batch
    ]


def dpo(batch: list[Sequence], beta: float = 0.1) -> list[list[float]]:
    out: list[list[float]] = []
    for first, second in zip(batch[::2], batch[1::2], strict=True):
        gap = sum(log_r(t, "ref") for t in first) - sum(log_r(t, "ref") for t in second)
        value = math.log(1 + math.exp(-beta * gap * (1 if first[0]["a"] > 0 else -1)))
        out += [[value] * len(first), [value] * len(second)]
    return out


BATCHES: dict[str, Callable[..., list[list[float]]]] = {
    "m2po": m2po,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dpo": dpo,
}
"""Values of a batch's tokens, where a formula looks at more than a sequence."""


def log_rho(t: Row) -> float:
    return clamp(t["old"] - t["mu"], -20, 20)


def _level(sequence: Sequence, level: str) -> list[float]:
    values = [log_rho(t) for t in sequence]
    joint = {"sequence": sum(values), "geometric": mean(values)}
    return [e(x) for x in values] if level == "token" else [e(joint[level])] * len(values)


def _all(sequence: Sequence, keep: bool) -> list[float]:
    return [float(keep)] * len(sequence)


def icepop(sequence: Sequence, low: float = 0.5, high: float = 5.0, level: str = "token") -> list[float]:
    return [rho if low <= rho <= high else 0.0 for rho in _level(sequence, level)]


def k3_rejection(sequence: Sequence, high: float = 0.01, level: str = "sequence") -> list[float]:
    k3 = [math.exp(log_rho(t)) - 1 - log_rho(t) for t in sequence]
    return [float(x <= high) for x in k3] if level == "token" else _all(sequence, mean(k3) <= high)


def opsm(sequence: Sequence, delta: float = 1e-4) -> list[float]:
    drift = mean([t["mu"] - t["pi"] for t in sequence])
    return _all(sequence, not (mean([t["a"] for t in sequence]) < 0 and drift > delta))


def loglinear(sequence: Sequence, cap: float = 5.0) -> list[float]:
    return [min(e(alpha(t) * log_r(t, "mu")), cap) for t in sequence]


def alpha(t: Row) -> float:
    return (t["now"] - 1 - t["version"]) / (t["now"] - t["version"]) if t["now"] > t["version"] else 0.0


def trust_region(t: Row, delta: float = 1.0, decay: float = 0.9) -> float:
    return e(log_rho(t)) if abs(log_rho(t)) <= delta * decay ** (t["now"] - t["version"]) else 0.0


def age(t: Row, decay: float = 1.0, max_age: int | None = None) -> float:
    years = t["now"] - t["version"]
    return 0.0 if max_age is not None and years > max_age else decay**years


FACTORS: dict[str, Callable[..., list[float]]] = {
    "tis": each(lambda t, cap=2.0: min(e(log_rho(t)), cap)),
    "decoupled": each(lambda t, cap=5.0: min(e(log_rho(t)), cap)),
    "sequence_tis": lambda s, level="sequence", cap=2.0: [min(w, cap) for w in _level(s, level)],
    "icepop": icepop,
    "geometric_rejection": lambda s, low=0.999, high=1.001: _all(s, low <= _level(s, "geometric")[0] <= high),
    "k3_rejection": k3_rejection,
    "opsm": opsm,
    "outlier": lambda s, low=1e-4, high=100.0: _all(s, all(low <= e(log_rho(t)) <= high for t in s)),
    "loglinear": loglinear,
    "trust_region": each(trust_region),
    "age": each(age),
}  # fmt: skip
"""Factors of a sequence's tokens."""


def top_entropy(batch: list[Sequence], fraction: float = 0.2) -> list[list[float]]:
    rows = sorted((t["entropy"] for s in batch for t in s), reverse=True)
    least = rows[max(1, int(fraction * len(rows))) - 1]
    return [[float(t["entropy"] >= least) for t in s] for s in batch]
