// Lanes of spans on a canvas: the whole run in a strip, and below it a window that zooms and moves.

import { color, h, put } from "../dom.js";
import { duration, number, percent, plain } from "../format.js";
import { scale, ticks } from "./scale.js";
import { rows, Tip } from "./tip.js";

const NAMES = 130;
const ROW = 34;
const STRIP_ROW = 9;
const AXIS = 26;
const TINTS = { engine: "blue", learner: "orange", controller: "plum", environment: "brown", scoring: "green", sync: "sky", ledger: "olive", teachers: "teal", rollout: "slate" };
const OWN = { "learner snapshot": "purple", "learner save": "faint", "engine commit": "red", "sync commit": "red", "learner optim_step": "red", "engine prefill": "pale" };
const INNER = new Set(["pack", "forward", "backward"]); // inside forward_backward

export function tint(lane, part) {
  if (part.wait) return "wait";
  const base = lane.startsWith("engine") ? "engine" : lane.startsWith("reward") ? "scoring" : lane;
  return OWN[`${base} ${part.name}`] ?? TINTS[base] ?? "slate";
}

/** `wanted(from, to)` is called when another window is to be shown; `draw(data)` shows what came. */
export class Lanes {
  constructor({ wanted, opened }) {
    this.wanted = wanted;
    this.opened = opened;
    this.strip = h("canvas", { class: "strip", role: "img", "aria-label": "the whole run; the frame is the window below" });
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-roledescription": "timeline" });
    this.said = h("p", { class: "hidden", "aria-live": "polite" });
    this.element = h("div", { class: "lanes" }, this.strip, this.canvas, this.said);
    this.tip = new Tip(this.element);
    this.whole = null;
    this.data = null;
    this.window = null;
    new ResizeObserver(() => this.#paint()).observe(this.element);
    this.canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.#grab(event));
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event));
    this.canvas.addEventListener("pointerleave", () => this.tip.hide());
    this.canvas.addEventListener("dblclick", (event) => this.zoom(0.35, this.#moment(event)));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.strip.addEventListener("pointerdown", (event) => this.#jump(event));
  }

  draw(data, whole) {
    this.data = data;
    if (whole) this.whole = whole;
    this.window ??= data.window;
    this.canvas.setAttribute("aria-label", `${this.words()}. Arrow keys move, plus and minus zoom, 0 shows everything.`);
    this.#paint();
  }

  words() {
    const lanes = this.data.lanes.map((lane) => `${lane.lane} ${percent(lane.busy)} busy`);
    return `From ${duration(this.window[0])} to ${duration(this.window[1])}: ${lanes.join(", ") || "no trace"}`;
  }

  zoom(factor, around = (this.window[0] + this.window[1]) / 2) {
    const length = (this.window[1] - this.window[0]) * factor;
    const share = (around - this.window[0]) / (this.window[1] - this.window[0] || 1);
    this.show(around - share * length, around - share * length + length);
  }

  show(from, to) {
    const [first, last] = this.data?.extent ?? [0, 1];
    const length = Math.min(Math.max(to - from, 1e-4), last - first);
    const start = Math.min(Math.max(from, first), last - length);
    this.window = [start, start + length];
    this.#paint();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.wanted(...this.window), 90);
  }

  #toX(width) {
    return scale(this.window[0], this.window[1], NAMES, width);
  }

  #paint() {
    if (!this.data || !this.element.clientWidth) return;
    const width = this.element.clientWidth;
    const lanes = this.data.lanes;
    const context = sized(this.canvas, width, lanes.length * ROW + AXIS);
    const toX = this.#toX(width);
    const [from, to] = this.data.window;
    lanes.forEach((lane, row) => {
      const y = row * ROW;
      context.fillStyle = color("sunk");
      context.fillRect(NAMES, y + 4, width - NAMES, ROW - 8);
      context.save();
      context.beginPath();
      context.rect(NAMES, y, width - NAMES, ROW);
      context.clip();
      for (const part of inOrder(lane.parts)) this.#part(context, lane.lane, part, y, toX, from, to);
      context.restore();
      name(context, lane, y, ROW, lane.busy);
    });
    this.#axis(context, lanes.length * ROW, width, toX);
    this.#paintStrip(width);
  }

  #part(context, lane, part, y, toX, from, to) {
    context.fillStyle = color(tint(lane, part));
    const inner = INNER.has(part.name) ? 10 : 0;
    const [top, height] = [y + 4 + inner / 2, ROW - 8 - inner];
    if (part.spans) {
      const [starts, ends] = part.spans;
      context.globalAlpha = inner ? 0.55 : 1;
      if (inner) context.fillStyle = color("card");
      starts.forEach((start, at) => context.fillRect(toX(start), top, Math.max(0.8, toX(ends[at]) - toX(start) - 0.4), height));
    } else {
      const each = (to - from) / part.bins.length;
      part.bins.forEach((share, at) => {
        if (share <= 0) return;
        context.globalAlpha = Math.min(1, 0.12 + 0.88 * share) * (inner ? 0.3 : 1);
        const left = toX(from + at * each);
        context.fillRect(left, top, Math.max(0.5, toX(from + (at + 1) * each) - left + 0.3), height);
      });
    }
    context.globalAlpha = 1;
  }

  #axis(context, y, width, toX) {
    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (const step of this.data.steps) {
      const x = toX(step.at);
      if (x < NAMES || x > width) continue;
      context.fillStyle = color("line");
      context.fillRect(x, 0, 1, y);
    }
    for (const life of this.data.lives) {
      const x = toX(life.at);
      if (x < NAMES || x > width) continue;
      context.fillStyle = color("ink");
      context.fillRect(x - 1, 0, 2, y);
      context.textAlign = x > width - 70 ? "right" : "left";
      context.fillText("resumed", x + (x > width - 70 ? -5 : 5), y + 14);
      context.textAlign = "center";
    }
    context.fillStyle = color("faint");
    for (const at of ticks(this.window[0], this.window[1], Math.max(2, width / 150))) {
      const x = toX(at);
      if (x < NAMES || x > width - 20) continue;
      context.fillRect(x, y, 1, 4);
      context.fillText(clock(at, this.window[1] - this.window[0]), x, y + 14);
    }
  }

  #paintStrip(width) {
    if (!this.whole) return;
    const { lanes, extent } = this.whole;
    const height = lanes.length * STRIP_ROW + 4;
    const context = sized(this.strip, width, height);
    const toX = scale(extent[0], extent[1], NAMES, width);
    lanes.forEach((lane, row) => {
      for (const part of inOrder(lane.parts).filter((each) => !each.wait && !INNER.has(each.name))) {
        context.save();
        context.translate(0, row * STRIP_ROW + 2);
        context.scale(1, (STRIP_ROW - 2) / (ROW - 8));
        context.translate(0, -4);
        this.#part(context, lane.lane, part, 0, toX, this.whole.window[0], this.whole.window[1]);
        context.restore();
      }
    });
    context.fillStyle = color("ink");
    for (const life of this.whole.lives) context.fillRect(toX(life.at) - 0.75, 0, 1.5, height);
    context.fillStyle = color("faint");
    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillText("whole run", 0, height / 2);
    context.strokeStyle = color("ink");
    context.lineWidth = 1.5;
    const [left, right] = [toX(this.window[0]), toX(this.window[1])];
    context.strokeRect(left + 0.75, 0.75, Math.max(3, right - left - 1.5), height - 1.5);
  }

  #moment(event) {
    const place = event.clientX - this.canvas.getBoundingClientRect().left;
    const width = this.element.clientWidth;
    return scale(NAMES, width, this.window[0], this.window[1])(Math.max(NAMES, place));
  }

  #wheel(event) {
    if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY) && !event.altKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = ((event.deltaX || event.deltaY) / this.element.clientWidth) * (this.window[1] - this.window[0]);
      this.show(this.window[0] + by, this.window[1] + by);
    } else {
      this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), this.#moment(event));
    }
  }

  #grab(event) {
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    const [start, window] = [event.clientX, [...this.window]];
    let moved = false;
    const move = (now) => {
      moved ||= Math.abs(now.clientX - start) > 3;
      const by = ((now.clientX - start) / (this.element.clientWidth - NAMES)) * (window[1] - window[0]);
      if (moved) this.show(window[0] - by, window[1] - by);
    };
    const drop = (now) => {
      this.canvas.removeEventListener("pointermove", move);
      this.canvas.removeEventListener("pointerup", drop);
      const found = moved ? null : this.#find(now);
      if (found?.of) this.opened(found.of);
    };
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", drop);
  }

  #jump(event) {
    const { extent } = this.whole ?? this.data;
    const place = event.clientX - this.strip.getBoundingClientRect().left;
    const at = scale(NAMES, this.element.clientWidth, extent[0], extent[1])(place);
    const half = (this.window[1] - this.window[0]) / 2;
    this.show(at - half, at + half);
  }

  #key(event) {
    const length = this.window[1] - this.window[0];
    const moves = {
      ArrowLeft: () => this.show(this.window[0] - 0.2 * length, this.window[1] - 0.2 * length),
      ArrowRight: () => this.show(this.window[0] + 0.2 * length, this.window[1] + 0.2 * length),
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6),
      0: () => this.show(...this.data.extent),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
    this.said.textContent = `${duration(this.window[0])} to ${duration(this.window[1])}`;
  }

  #find(event) {
    const box = this.canvas.getBoundingClientRect();
    const lane = this.data?.lanes[Math.floor((event.clientY - box.top) / ROW)];
    if (!lane || event.clientX - box.left < NAMES) return null;
    const at = this.#moment(event);
    const slack = ((this.window[1] - this.window[0]) / this.element.clientWidth) * 2;
    let best = { lane: lane.lane };
    for (const part of inOrder(lane.parts)) {
      if (part.bins) {
        const share = part.bins[Math.floor(((at - this.data.window[0]) / (this.data.window[1] - this.data.window[0])) * part.bins.length)];
        if (share > 0) best = { lane: lane.lane, part, share };
        continue;
      }
      const [starts, ends] = part.spans;
      for (let each = 0; each < starts.length; each += 1) {
        if (starts[each] - slack <= at && at <= ends[each] + slack) {
          best = { lane: lane.lane, part, start: starts[each], end: ends[each], step: part.steps[each], of: part.of[each] };
        }
      }
    }
    return best;
  }

  #hover(event) {
    if (!this.data || event.buttons) return this.tip.hide();
    const found = this.#find(event);
    if (!found) return this.tip.hide();
    const box = this.element.getBoundingClientRect();
    const told = [["", "at", clock(this.#moment(event), this.window[1] - this.window[0])]];
    if (found.share !== undefined) told.push(["", "of this moment", percent(found.share)], ["", "in this window", `${number(found.part.count)} spans`]);
    if (found.end !== undefined) told.push(["", "took", duration(found.end - found.start)]);
    if (found.step >= 0) told.push(["", found.lane === "sync" ? "version" : "step", String(found.lane === "sync" ? found.step : found.step + 1)]);
    if (found.of) told.push(["", "episode", `${found.of}: click to open`]);
    this.tip.show(event.clientX - box.left, event.clientY - box.top,
      h("b", {}, `${found.lane}: ${found.part ? plain(found.part.name) : "idle"}`), rows(told));
  }
}

/** Waits below, work over them, commits on top. */
function inOrder(parts) {
  const place = (part) => (part.wait ? 0 : part.name === "commit" ? 3 : INNER.has(part.name) ? 2 : 1);
  return [...parts].sort((one, two) => place(one) - place(two));
}

function name(context, lane, y, height, busy) {
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillStyle = color("ink");
  context.font = "600 13px system-ui, sans-serif";
  context.fillText(lane.lane.slice(0, 12), 0, y + height / 2, 84);
  context.fillStyle = color("faint");
  context.font = "12px system-ui, sans-serif";
  context.fillText(percent(busy), 88, y + height / 2);
}

function clock(seconds, length) {
  if (length < 0.01) return `${seconds.toFixed(4)} s`;
  if (length < 1) return `${seconds.toFixed(2)} s`;
  if (length < 20) return `${seconds.toFixed(1)} s`;
  return duration(seconds);
}

function sized(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** What the colours mean: one entry for each, with the names of what has it. */
export function legend(lanes) {
  const names = new Map();
  const shades = new Map(); // of each name: two kinds of lanes may call different work the same
  const all = lanes.flatMap((lane) => lane.parts.filter((each) => !INNER.has(each.name)).map((part) =>
    ({ kind: lane.lane.replace(/-\d+$/, ""), shade: tint(lane.lane, part), word: part.wait ? "waiting" : plain(part.name) })));
  for (const { shade, word } of all) shades.set(word, (shades.get(word) ?? new Set()).add(shade));
  for (const { kind, shade, word } of all) {
    if (!names.has(shade)) names.set(shade, new Set());
    names.get(shade).add(shades.get(word).size > 1 ? `${word} (${kind})` : word);
  }
  return put(h("ul", { class: "legend", style: { margin: "10px 0 0" } }), [...names].map(([shade, words]) =>
    h("li", {}, h("span", { class: "key", style: { background: `var(--${shade})` } }), [...words].join(", "))));
}
