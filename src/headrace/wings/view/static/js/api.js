// What the server is asked, and what it tells by itself.

export class Refused extends Error {
  constructor(problem, remedy, status) {
    super(problem);
    this.remedy = remedy;
    this.status = status;
  }
}

const kept = document.getElementById("answers");
const answers = kept ? JSON.parse(kept.textContent) : null;

/** Whether this page is a file that holds its answers: no server is behind it. */
export const isFile = answers !== null;

/** The answer of one path under /api, as an object. */
export async function ask(path, signal) {
  if (isFile) return fromFile(path);
  let answer;
  try {
    answer = await fetch(`/api/${path}`, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("the server of this view does not answer", "start headrace view again, then reload this page", 0);
  }
  let tree;
  try {
    tree = await answer.json();
  } catch {
    throw new Refused(`the server answered ${answer.status}`, "reload this page; the address with its token may be needed again", answer.status);
  }
  if (!answer.ok) throw new Refused(tree.problem ?? `the server answered ${answer.status}`, tree.remedy ?? "", answer.status);
  return tree;
}

function fromFile(path) {
  const [name, asked = ""] = path.split("?");
  const found = answers[path] ?? answers[name];
  if (found === undefined) throw new Refused("this file does not hold that", `headrace view ${answers["runs/0/overview"].directory} shows it`, 404);
  const wanted = new URLSearchParams(asked);
  if (name.endsWith("/series")) {
    const none = found.step.map(() => null);
    return { ...found, columns: Object.fromEntries(wanted.get("names").split(",").map((each) => [each, found.columns[each] ?? none])) };
  }
  return name.endsWith("/timeline") ? closest(found, wanted) : found;
}

/** Of the windows of a timeline that the file holds, the shortest that shows all that is wanted, cut to that. */
function closest(windows, wanted) {
  if (!wanted.has("from")) return windows[0];
  const [from, to] = [Number(wanted.get("from")), Number(wanted.get("to"))];
  const length = ({ window: [first, last] }) => last - first;
  const found = windows.filter(({ window: [first, last] }) => first <= from + 1e-3 && to - 1e-3 <= last).sort((one, two) => length(one) - length(two))[0] ?? windows[0];
  const lanes = found.lanes.map((lane) => {
    const parts = lane.parts.map((part) => cut(part, found.window, from, to)).filter((part) => part.count);
    return { ...lane, parts, busy: busy(parts, from, to) };
  });
  return { ...found, lanes, window: [from, to], steps: found.steps.filter(({ at }) => from <= at && at <= to) };
}

function cut(part, [first, last], from, to) {
  if (part.bins) {
    const each = (last - first) / part.bins.length;
    const bins = part.bins.map((_, at) => part.bins[Math.min(part.bins.length - 1, Math.floor((from - first + ((at + 0.5) / part.bins.length) * (to - from)) / each))]);
    return { ...part, bins, count: bins.some(Boolean) ? Math.max(1, Math.round((part.count * (to - from)) / (last - first))) : 0 };
  }
  const inside = part.spans[0].map((_, at) => at).filter((at) => part.spans[0][at] < to && part.spans[1][at] > from);
  const pick = (column) => inside.map((at) => column[at]);
  return { ...part, spans: part.spans.map(pick), steps: pick(part.steps), of: pick(part.of), count: inside.length };
}

/** The share of a window in which a lane worked: what its parts that are no waits cover together. */
function busy(parts, from, to) {
  const working = parts.filter((part) => !part.wait);
  if (working.some((part) => part.bins)) {
    const sums = working[0].bins.map((_, at) => Math.min(1, Math.max(...working.map((part) => part.bins[at]))));
    return sums.reduce((sum, share) => sum + share, 0) / sums.length;
  }
  let [covered, reached] = [0, from];
  const spans = working.flatMap((part) => part.spans[0].map((start, at) => [start, Math.min(to, part.spans[1][at])])).sort(([one], [two]) => one - two);
  for (const [start, end] of spans) {
    covered += Math.max(0, end - Math.max(start, reached));
    reached = Math.max(reached, end);
  }
  return covered / (to - from || 1);
}

/** Call `changed(runs)` whenever runs have written something, and `linked(yes)` when the line comes and goes. */
export function follow(changed, linked) {
  if (isFile) return linked(true);
  const line = new EventSource("/api/changes");
  line.addEventListener("hello", () => {
    linked(true);
    changed(null);
  });
  line.addEventListener("change", (event) => changed(JSON.parse(event.data).runs));
  line.addEventListener("error", () => linked(false));
  return line;
}

/** Filters and the like as the part of an address behind "?". */
export function query(values) {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return new URLSearchParams(given).toString();
}
