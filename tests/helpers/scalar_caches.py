"""The caches element by element in exact rational numbers: slow, and independent of the golden model's tensors."""

from fractions import Fraction

import numpy as np

LINEAR = 255
FP16_MAX = Fraction(65504)


def nearest_even(x: Fraction) -> int:
    """Nearest integer, ties to even."""
    low = x.numerator // x.denominator
    rest = x - low
    return low + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1))


def fp16(x: Fraction) -> Fraction:
    """Nearest binary16 value, ties to even, saturating."""
    exponent = -14
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 10)
    return max(-FP16_MAX, min(FP16_MAX, nearest_even(x / unit) * unit))


def port(x) -> Fraction:
    """An fp16 number behind the port rule."""
    if np.isnan(x):
        return Fraction(0)
    return FP16_MAX * (1 if x > 0 else -1) if np.isinf(x) else Fraction(float(x))


def levels(a: int) -> list[int]:
    """Level magnitudes."""
    return list(range(8)) if a == LINEAR else [a * i + 2**i for i in range(8)]


def int8_group(x: list[Fraction]) -> tuple[list[int], Fraction]:
    """INT8 elements and scale of a group."""
    absmax = max(map(abs, x))
    scale = fp16(absmax / 127)
    return ([nearest_even(127 * v / absmax) for v in x] if scale else [0] * len(x)), scale


class Table:
    """A table of coefficients and its thresholds."""

    def __init__(self, coefficients, thresholds, statistic="variance"):
        self.coefficients = [int(a) for a in coefficients]
        self.thresholds = [int(t) for t in thresholds]
        self.statistic = statistic

    def passed(self, q: list[int], offset: int = 0) -> int:
        """Thresholds that a group passes."""
        n, centre = len(q), [v - offset for v in q]
        about = Fraction(sum(q), n) if self.statistic == "variance" else offset
        second = n * sum((v - about) ** 2 for v in q)
        peak = max(map(abs, centre))
        return sum(second * 65536 >= t * n * n * peak * peak for t in self.thresholds)


def requantize(q: list[int], scale: Fraction, a: int) -> tuple[list[int], Fraction]:
    """4-bit codes and stored scale of an INT8 group (its offset taken out)."""
    grid, peak = levels(a), max(map(abs, q))
    stored = fp16(scale * peak / grid[-1])
    if not stored:
        return [0] * len(q), stored
    codes = []
    for v in q:
        target = Fraction(abs(v) * grid[-1], peak)
        magnitude = min(range(8), key=lambda i: (abs(grid[i] - target), i))
        negative = v < 0 and not (a == LINEAR and magnitude == 0)
        codes.append(magnitude + 8 * negative)
    return codes, stored


def spatial(k, group, table, mean=None, sinks=0):
    """codes, scale, coeff, sink, sink_scale of a cache along the head, as lists of rows."""
    codes, scales, coefficients, sink, sink_scale = [], [], [], [], []
    for position, row in enumerate(k):
        x = [port(v) for v in row]
        if mean is not None:
            x = [fp16(v - Fraction(float(m))) for v, m in zip(x, mean, strict=True)]
        row_q, row_s8, row_codes, row_scales, row_a = [], [], [], [], []
        for start in range(0, len(x), group):
            q, s8 = int8_group(x[start : start + group])
            a = table.coefficients[table.passed(q)]
            code, scale = requantize(q, s8, a)
            row_q, row_s8 = row_q + q, [*row_s8, s8]
            row_codes, row_scales, row_a = row_codes + code, [*row_scales, scale], [*row_a, a]
        if position < sinks:
            sink.append(row_q)
            sink_scale.append(row_s8)
            row_codes, row_scales, row_a = [0] * len(x), [Fraction(0)] * len(row_a), [0] * len(row_a)
        codes.append(row_codes)
        scales.append(row_scales)
        coefficients.append(row_a)
    return {"codes": codes, "scale": scales, "coeff": coefficients, "sink": sink, "sink_scale": sink_scale}


def temporal(v, prefill, group, table, mean=None, floor=None, sinks=0, offset=False, shared=False):
    """All outputs of a cache along time, as lists; rows of windows, channels within."""
    x = [[port(value) for value in row] for row in v]
    if mean is not None:
        x = [[fp16(value - Fraction(float(m))) for value, m in zip(row, mean, strict=True)] for row in x]
    channels = range(len(x[0]))
    least = [Fraction(0)] * len(channels) if floor is None else [Fraction(float(f)) for f in floor]
    s8 = [fp16(max([least[c], *(abs(row[c]) for row in x[sinks:prefill])]) / 127) for c in channels]
    saturated, staged = 0, []
    for position, row in enumerate(x):
        staged.append([])
        for c in channels:
            if position < sinks:
                q = 0
            elif s8[c] == 0:
                q, saturated = 0, saturated + (row[c] != 0)
            else:
                exact = nearest_even(row[c] / s8[c])
                q = max(-127, min(127, exact))
                saturated += q != exact
            staged[-1].append(q)
    result = {"codes": [], "scale": [], "coeff": [], "offset": [], "staged_scale": s8, "saturated": saturated}
    windows = len(x) // group
    for window in range(windows):
        rows = staged[window * group : (window + 1) * group]
        groups = [[row[c] for row in rows] for c in channels]
        offsets = [nearest_even(Fraction(sum(q), group)) if offset else 0 for q in groups]
        centre = [[value - o for value in q] for q, o in zip(groups, offsets, strict=True)]
        passed = [table.passed(q, o) for q, o in zip(groups, offsets, strict=True)]
        if shared:
            alive = [n for n, q in zip(passed, centre, strict=True) if any(q)]
            limits = range(len(table.thresholds))
            entry = sum(2 * sum(n > k for n in alive) >= len(alive) for k in limits)
            chosen = [table.coefficients[entry]]
        else:
            chosen = [table.coefficients[n] for n in passed]
        columns = [requantize(q, s8[c], chosen[c if len(chosen) > 1 else 0]) for c, q in enumerate(centre)]
        for token in range(group):
            sink = window * group + token < sinks
            result["codes"].append([0 if sink else codes[token] for codes, _ in columns])
        result["scale"].append([scale for _, scale in columns])
        result["coeff"].append(chosen)
        result["offset"].append(offsets)
    result["staged"] = staged[windows * group :]
    groups = [[row[start : start + group] for start in range(0, len(channels), group)] for row in x[:sinks]]
    quantized = [[int8_group(part) for part in row] for row in groups]
    result["sink"] = [[q for part, _ in row for q in part] for row in quantized]
    result["sink_scale"] = [[scale for _, scale in row] for row in quantized]
    return result
