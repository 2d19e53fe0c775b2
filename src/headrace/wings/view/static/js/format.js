// Numbers as people read them: the same everywhere.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const NONE = "–";

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** Three significant digits; whole numbers from a hundred on; powers of ten where it is very small or very large. */
export function number(value, digits = 3) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(digits - 1).replace("e+", "e");
  if (Number.isInteger(value) || size >= 10 ** (digits - 1)) return WHOLE.format(value);
  return String(Number(value.toPrecision(digits)));
}

/** As `number`, with the zeros at its end: for figures that stand side by side. */
export function figure(value) {
  if (!isNumber(value) || Number.isInteger(value) || Math.abs(value) >= 100 || Math.abs(value) < 1e-3) return number(value);
  return value.toPrecision(3);
}

export function count(value) {
  return isNumber(value) ? WHOLE.format(value) : NONE;
}

/** An amount with its unit in the right number: "1 turn", "2 turns". */
export function plural(amount, one, many = `${one}s`) {
  return isNumber(amount) ? `${Number.isInteger(amount) ? count(amount) : number(amount)} ${amount === 1 ? one : many}` : NONE;
}

/** 12,345 as 12.3k, where there is little room. */
export function short(value) {
  if (!isNumber(value)) return NONE;
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  }
  return number(value);
}

export function percent(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value) * 100;
  return `${size > 0 && size < 1 ? Number((value * 100).toPrecision(2)) : Math.round(value * 100)}%`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 1e-3) return `${number(seconds * 1e6)} µs`;
  if (seconds < 0.0995) return `${number(seconds * 1e3)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${number(value / size)} ${unit}`;
  }
  return `${count(value)} B`;
}

export function moment(unixSeconds) {
  if (!isNumber(unixSeconds)) return NONE;
  const at = new Date(unixSeconds * 1000);
  const day = at.toDateString() === new Date().toDateString() ? "" : `${at.toISOString().slice(0, 10)} `;
  return day + at.toLocaleTimeString("en-GB");
}

/** `value` in the unit that a metric is registered with. */
export function inUnit(value, unit) {
  if (!isNumber(value)) return NONE;
  if (unit === "s") return duration(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "frac") return percent(value);
  return number(value);
}

/** A reason or setting's name as words. */
export function plain(name) {
  return String(name).replaceAll("_", " ");
}
