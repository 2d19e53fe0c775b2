// From numbers to places, with ticks that people would choose.

/** Round ticks inside [low, high], about `wanted` of them. */
export function ticks(low, high, wanted = 4) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

/** The least and greatest finite number of some columns, with a margin; [0, 1] where there is none. */
export function extent(columns, { zero = false, margin = 0.06 } = {}) {
  let low = Infinity;
  let high = -Infinity;
  for (const column of columns) {
    for (const value of column) {
      if (!Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return [0, 1];
  if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (low === high) {
    if (low === 0) return [0, 1];
    const pad = Math.abs(low) * 0.1;
    return [low - pad, high + pad];
  }
  const pad = (high - low) * margin;
  return [zero && low === 0 ? 0 : low - pad, zero && high === 0 ? 0 : high + pad];
}

export function scale(low, high, from, to) {
  return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

/** The mean of the last `window` values at each place; gaps stay out. */
export function rolling(values, window) {
  let sum = 0;
  let known = 0;
  return values.map((value, at) => {
    if (Number.isFinite(value)) [sum, known] = [sum + value, known + 1];
    const gone = values[at - window];
    if (at >= window && Number.isFinite(gone)) [sum, known] = [sum - gone, known - 1];
    return known ? sum / known : null;
  });
}
