// Stacked bars over steps, and one stacked bar lying down.

import { h, put, s } from "../dom.js";
import { number, percent, short } from "../format.js";
import { scale, ticks } from "./scale.js";
import { rows, Tip } from "./tip.js";

const LEFT = 46;
const BOTTOM = 22;
const TOP = 8;

/** Columns of stacked parts: `draw({ x, parts: [{ name, values, color }] })`. */
export class StackedBars {
  constructor({ title, unit, what, height = 170, xLabel = "step" }) {
    this.height = height;
    this.title = title;
    this.xLabel = xLabel;
    this.legend = h("ul", { class: "legend" });
    this.plot = h("div", { class: "plot", tabindex: 0, role: "group" });
    this.said = h("p", { class: "hidden", "aria-live": "polite" });
    this.element = h("figure", { class: "chart" },
      h("figcaption", {}, h("h2", {}, title), unit ? h("span", { class: "unit" }, unit) : null, this.legend,
        what ? h("span", { class: "what" }, what) : null), this.plot, this.said);
    this.tip = new Tip(this.plot);
    this.at = -1;
    new ResizeObserver(() => this.data && this.#render()).observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.#show(this.#nearest(event), event.offsetY, false));
    this.plot.addEventListener("pointerleave", () => this.tip.hide());
    this.plot.addEventListener("blur", () => this.tip.hide());
    this.plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move === undefined || !this.data) return;
      event.preventDefault();
      this.#show(Math.max(0, Math.min(this.data.x.length - 1, this.at + move)), TOP + 20, true);
    });
  }

  draw(data) {
    this.data = data;
    put(this.legend, data.parts.map((part) => h("li", {}, h("span", { class: "key", style: { background: part.color } }), part.name)));
    const total = (part) => part.values.reduce((sum, value) => sum + value, 0);
    const all = data.parts.reduce((sum, part) => sum + total(part), 0);
    const shares = data.parts.map((part) => `${part.name} ${percent(all ? total(part) / all : 0)}`);
    this.plot.setAttribute("aria-label", `${this.title}. In all: ${shares.join(", ")}. Arrow keys read single bars.`);
    this.#render();
  }

  #render() {
    const { x, parts } = this.data;
    const width = Math.max(160, this.plot.clientWidth || 600);
    const sums = x.map((_, at) => parts.reduce((sum, part) => sum + part.values[at], 0));
    const most = Math.max(...sums, 0) || 1;
    const toY = scale(0, most * 1.05, this.height - BOTTOM, TOP);
    this.each = (width - LEFT - 8) / Math.max(1, x.length);
    const bar = Math.max(0.6, Math.min(this.each * 0.82, 46));
    const drawing = s("svg", { height: this.height, viewBox: `0 0 ${width} ${this.height}`, "aria-hidden": "true" });
    for (const value of ticks(0, most, 3)) {
      drawing.append(s("line", { class: "gridline", x1: LEFT, x2: width - 8, y1: toY(value), y2: toY(value) }),
        s("text", { x: LEFT - 7, y: toY(value) + 4, "text-anchor": "end" }, short(value)));
    }
    const stacked = x.map(() => 0);
    for (const part of parts) {
      let path = "";
      part.values.forEach((value, at) => {
        if (!value) return;
        const left = LEFT + (at + 0.5) * this.each - bar / 2;
        const [top, bottom] = [toY(stacked[at] + value), toY(stacked[at])];
        path += `M${left.toFixed(2)} ${bottom.toFixed(2)}V${top.toFixed(2)}h${bar.toFixed(2)}V${bottom.toFixed(2)}Z`;
        stacked[at] += value;
      });
      drawing.append(s("path", { d: path, fill: part.color }));
    }
    const stride = Math.max(1, Math.ceil(x.length / Math.max(2, width / 90)));
    x.forEach((value, at) => {
      if (at % stride) return;
      drawing.append(s("text", { x: LEFT + (at + 0.5) * this.each, y: this.height - 5, "text-anchor": "middle" }, number(value)));
    });
    if (!x.length) drawing.append(s("text", { x: width / 2, y: this.height / 2, "text-anchor": "middle" }, "nothing yet"));
    this.plot.querySelector("svg")?.remove();
    this.plot.prepend(drawing);
  }

  #nearest(event) {
    const place = event.clientX - this.plot.getBoundingClientRect().left - LEFT;
    return Math.max(0, Math.min((this.data?.x.length ?? 1) - 1, Math.floor(place / this.each)));
  }

  #show(at, y, aloud) {
    if (!this.data?.x.length) return;
    this.at = at;
    const told = this.data.parts.filter((part) => part.values[at]);
    this.tip.show(LEFT + (at + 0.5) * this.each, y, h("b", {}, `${this.xLabel} ${this.data.x[at]}`),
      rows(told.map((part) => [part.color, part.name, number(part.values[at])])));
    if (aloud) this.said.textContent = `${this.xLabel} ${this.data.x[at]}: ${told.map((part) => `${part.name} ${number(part.values[at])}`).join(", ")}`;
  }
}

/** One bar, lying: parts [{ name, value, color }]; narrow parts stay visible. */
export function lyingBar(label, parts) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  const drawing = s("svg", { viewBox: "0 0 1000 30", preserveAspectRatio: "none", role: "img",
    "aria-label": `${label}: ${parts.map((part) => `${part.name} ${number(part.value)}`).join(", ")}` });
  let at = 0;
  for (const part of parts.filter((each) => each.value > 0)) {
    const width = Math.max(3, (part.value / total) * 1000);
    drawing.append(s("rect", { x: at, y: 0, width, height: 30, fill: part.color }, s("title", {}, `${part.name}: ${number(part.value)}`)));
    at += width;
  }
  if (!at) drawing.append(s("rect", { x: 0, y: 0, width: 1000, height: 30, fill: "var(--sunk)" }));
  return drawing;
}
