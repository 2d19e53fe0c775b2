// What the server is asked, and what it tells by itself.

export class Refused extends Error {
  constructor(problem, remedy, status) {
    super(problem);
    this.remedy = remedy;
    this.status = status;
  }
}

/** The answer of one path under /api, as an object. */
export async function ask(path, signal) {
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

/** Call `changed(runs)` whenever runs have written something, and `linked(yes)` when the line comes and goes. */
export function follow(changed, linked) {
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
