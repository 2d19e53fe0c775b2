// The processes of the run, and what they compute with.

import { LineChart } from "../charts/line.js";
import { h, put, visible } from "../dom.js";
import { bytes, count, duration, isNumber, moment, number, plain } from "../format.js";
import { card, cards, empty, table } from "../parts.js";

const TINTS = ["var(--slate)", "var(--blue)", "var(--orange)", "var(--green)", "var(--purple)", "var(--sky)", "var(--red)"];

export async function open(root, { ask }) {
  const before = new Map(); // pid -> [time, CPU seconds]
  const names = (await ask("metrics")).map(({ name }) => name).filter((name) => /^(memory|cpu)\//.test(name));
  const memory = new LineChart({ title: "Memory", unit: "resident, at the end of each step", height: 190, zero: true, format: bytes });
  const cores = new LineChart({ title: "Processors", unit: "cores in use over each step", height: 190, zero: true });
  const text = h("div", {});
  put(root, text, names.length ? h("div", { class: "grid" }, memory.element, cores.element) : null);
  const tail = h("div", {});
  root.append(tail);

  async function refresh() {
    const now = await ask("system");
    const living = Boolean(now.machine);
    await draw();
    put(text, h("h1", {}, "System"),
      h("p", { class: "sub" }, living ? "Its processes, as this machine sees them now." : "The run does not go on; this is what it left behind."),
      living ? cards([
        ["Cores", count(now.machine.cores)],
        ["Memory", bytes(now.machine.memory_bytes), `${bytes(now.machine.available_bytes)} available`],
        ["Memory of the run", bytes(sum(now.components.map((part) => part.memory_bytes))), "resident, of all its processes"],
        ["Last written", moment(now.written_s)],
      ]) : null,
      card("Processes", now.components.length ? table(
        [["part", true], ["state", true], ["process", false], ["version", false], ["device", true], ["restarts", false],
          ...(living ? [["memory", false], ["processor", false], ["threads", false]] : [])],
        now.components.map((part) => [visible(part.parent ? `${part.parent}: ${part.role}` : part.role), h("span", { class: "tag" }, visible(part.state)), String(part.pid),
          part.version ?? "–", visible(part.device || "–"), count(part.restarts ?? 0),
          ...(living ? [bytes(part.memory_bytes), load(part), count(part.threads)] : [])]), "processes")
        : empty("No process has reported yet.")));
    put(tail,
      now.waits.length && living ? card("Who waits for whom", h("pre", { tabindex: 0 }, visible(now.waits.join("\n")))) : null,
      h("div", { class: "grid" }, Object.entries(now.parts).filter(([, facts]) => facts && typeof facts === "object").map(([role, facts]) =>
        card(role, table([["", true], ["", true]], Object.entries(facts).map(([name, value]) => [plain(name), fact(name, value)]), role)))),
      Object.keys(now.summary).length ? h("details", { class: "card" }, h("summary", {}, "Every number of the summary"),
        table([["", true], ["", true]], Object.entries(now.summary).map(([name, value]) => [plain(name), visible(said(value))]), "summary")) : null,
      h("details", { class: "card" }, h("summary", {}, "Settings"), h("pre", { tabindex: 0 }, visible(JSON.stringify(now.config, null, 2)))));
  }

  async function draw() {
    if (!names.length) return;
    const { step, columns } = await ask(`series?names=${names.map(encodeURIComponent).join(",")}`);
    for (const [chart, kind] of [[memory, "memory/"], [cores, "cpu/"]]) {
      chart.draw({ x: step, series: names.filter((name) => name.startsWith(kind)).map((name, at) =>
        ({ name: name.slice(kind.length), values: columns[name], color: TINTS[at % TINTS.length], bridge: true })) });
    }
  }

  function load(part) {
    if (!isNumber(part.cpu_s)) return "–";
    const [then, used] = before.get(part.pid) ?? [];
    const time = performance.now() / 1e3;
    before.set(part.pid, [time, part.cpu_s]);
    return then && time > then ? `${number(((part.cpu_s - used) / (time - then)) * 100, 2)}%` : duration(part.cpu_s);
  }
  await refresh();
  return { refresh };
}

function said(value) {
  if (value === null || value === "") return "–";
  if (Array.isArray(value)) return value.map(said).join("; ") || "–";
  if (typeof value === "object") return Object.entries(value).map(([name, inner]) => `${name}: ${said(inner)}`).join(", ") || "–";
  return isNumber(value) ? number(value, 4) : String(value);
}

function fact(name, value) {
  if (isNumber(value)) return name.endsWith("_bytes") ? bytes(value) : count(value);
  return visible(value === null || value === "" ? "–" : String(value));
}

function sum(values) {
  return values.filter(isNumber).reduce((one, two) => one + two, 0);
}
