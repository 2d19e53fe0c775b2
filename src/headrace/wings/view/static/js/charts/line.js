// Lines over steps or time: drawn as SVG, read with the pointer or the arrow keys.

import { h, put, s } from "../dom.js";
import { number } from "../format.js";
import { extent, scale, ticks } from "./scale.js";
import { rows, Tip } from "./tip.js";

const LEFT = 46;
const BOTTOM = 22;
const TOP = 8;
const RIGHT = 8;

/**
 * A figure. `options`: title, unit, what, level (of the heading), height, named (whether a single line has a legend too), zero (whether the axis begins there), low,
 * high, xLabel, format (of a value), xFormat. `draw({ x, series, band, lives })`, with series [{ name, values, color, width,
 * dash, dots, loose, quiet }] band { low, high, color } and lives (where the run was resumed), draws or redraws it. `loose` values are points that no line joins.
 */
export class LineChart {
  constructor(options) {
    this.options = { height: 190, format: number, xFormat: number, xLabel: "step", level: 2, ...options };
    this.legend = h("ul", { class: "legend", "aria-hidden": "true" });
    this.plot = h("div", { class: "plot", tabindex: 0, role: "group" });
    this.said = h("p", { class: "hidden", "aria-live": "polite" });
    const { title, unit, what, level } = this.options;
    this.element = h("figure", { class: "chart" },
      h("figcaption", {}, h(`h${level}`, {}, title), unit ? h("span", { class: "unit" }, unit) : null, this.legend,
        what ? h("span", { class: "what" }, what) : null), this.plot, this.said);
    this.tip = new Tip(this.plot);
    this.at = null;
    this.data = null;
    new ResizeObserver(() => this.data && this.#render()).observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => this.#leave());
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    this.plot.addEventListener("blur", () => this.#leave());
  }

  draw(data) {
    this.data = data;
    const loud = data.series.filter((each) => !each.quiet);
    put(this.legend, loud.length < (this.options.named ? 1 : 2) ? null : loud.map((each) =>
      h("li", {}, h("span", { class: "key line", style: { background: each.color } }), each.name)));
    this.plot.setAttribute("aria-label", this.#words());
    this.#render();
  }

  #words() {
    const { title } = this.options;
    const told = this.data.series.filter((each) => !each.quiet).map((each) => {
      const known = each.values.filter(Number.isFinite);
      if (!known.length) return `${each.name}: nothing measured`;
      return `${each.name}: from ${this.options.format(known[0])} to ${this.options.format(known.at(-1))}`;
    });
    return `${title}. ${told.join("; ")}. Arrow keys read single points.`;
  }

  #render() {
    const { x, series, band } = this.data;
    const width = Math.max(160, this.plot.clientWidth || 600);
    const { height, low, high, zero } = this.options;
    const known = [...series.map((each) => each.values), ...(band ? [band.low, band.high] : [])];
    let [least, most] = extent(known, { zero });
    if (low !== undefined) least = Math.min(least, low);
    if (high !== undefined) most = Math.max(most, high);
    this.toX = scale(x[0] ?? 0, x.at(-1) ?? 1, LEFT, width - RIGHT);
    if (x.length === 1) this.toX = () => (LEFT + width - RIGHT) / 2;
    this.toY = scale(least, most, height - BOTTOM, TOP);
    const drawing = s("svg", { height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    drawing.append(...this.#grid(least, most, width, height));
    if (!x.length || known.every((column) => !column.some(Number.isFinite))) {
      drawing.append(s("text", { x: (LEFT + width) / 2, y: height / 2, "text-anchor": "middle" }, "nothing measured yet"));
    }
    if (band) drawing.append(this.#band(x, band));
    for (const life of this.data.lives ?? []) drawing.append(...this.#life(life, height));
    for (const each of series) drawing.append(...this.#line(x, each));
    this.cursor = s("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
    drawing.append(this.cursor);
    this.plot.querySelector("svg")?.remove();
    this.plot.prepend(drawing);
    if (this.at !== null) this.#show(Math.min(this.at, x.length - 1), false);
  }

  #grid(least, most, width, height) {
    const { x } = this.data;
    const { format, xFormat, xLabel } = this.options;
    const per = this.options.format(2048) === "2 KiB" ? 1024 ** Math.max(0, Math.floor(Math.log(most) / Math.log(1024))) : 1;
    const made = ticks(least / per, most / per, height < 150 ? 3 : 4).map((value) => value * per).flatMap((value) => {
      const y = this.toY(value);
      return [s("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        s("text", { x: LEFT - 7, y: y + 4, "text-anchor": "end" }, format(value))];
    });
    const marks = x.length > 1 ? ticks(x[0], x.at(-1), Math.max(3, Math.floor(width / 110))) : x;
    for (const value of marks) {
      made.push(s("text", { x: this.toX(value), y: height - 5, "text-anchor": "middle" }, xFormat(value)));
    }
    if (width > 300 && x.length > 1) {
      made.push(s("text", { x: LEFT - 7, y: height - 5, "text-anchor": "end" }, xLabel));
    }
    return made;
  }

  #line(x, each) {
    let path = "";
    let pen = false;
    const dots = [];
    each.values.forEach((value, at) => {
      if (!Number.isFinite(value)) {
        if (!each.bridge) pen = false;
        return;
      }
      if (!each.loose) path += `${pen ? "L" : "M"}${this.toX(x[at]).toFixed(1)} ${this.toY(value).toFixed(1)}`;
      pen = true;
      if (each.dots || each.loose || x.length === 1) dots.push(s("circle", { cx: this.toX(x[at]), cy: this.toY(value), r: 3.6, fill: each.color }));
    });
    return [s("path", { class: "series", d: path, stroke: each.color, "stroke-width": each.width,
      "stroke-dasharray": each.dash, opacity: each.opacity }), ...dots];
  }

  #life(at, height) {
    const x = this.toX(at);
    return [s("line", { class: "life", x1: x, x2: x, y1: TOP, y2: height - BOTTOM }, s("title", {}, "the run was resumed")),
      this.options.height < 200 ? null : s("text", { class: "life", x: x + 4, y: TOP + 9 }, "resumed")].filter(Boolean);
  }

  #band(x, { low, high, color }) {
    const there = x.map((_, at) => at).filter((at) => Number.isFinite(low[at]) && Number.isFinite(high[at]));
    const up = there.map((at) => `${this.toX(x[at]).toFixed(1)} ${this.toY(high[at]).toFixed(1)}`);
    const back = there.reverse().map((at) => `${this.toX(x[at]).toFixed(1)} ${this.toY(low[at]).toFixed(1)}`);
    return s("path", { d: up.length ? `M${[...up, ...back].join("L")}Z` : "", fill: color, opacity: 0.13 });
  }

  #point(event) {
    const { x } = this.data ?? {};
    if (!x?.length) return;
    const place = event.clientX - this.plot.getBoundingClientRect().left;
    let best = 0;
    for (let at = 1; at < x.length; at += 1) {
      if (Math.abs(this.toX(x[at]) - place) < Math.abs(this.toX(x[best]) - place)) best = at;
    }
    this.#show(best, false);
  }

  #key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
    const last = (this.data?.x.length ?? 0) - 1;
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    const from = this.at ?? (moves[event.key] > 0 ? -1 : last + 1);
    this.#show(Math.max(0, Math.min(last, from + moves[event.key])), true);
  }

  #show(at, aloud) {
    const { x, series } = this.data;
    const { format, xFormat, xLabel } = this.options;
    this.at = at;
    const place = this.toX(x[at]);
    this.cursor.setAttribute("x1", place);
    this.cursor.setAttribute("x2", place);
    this.cursor.setAttribute("visibility", "visible");
    const told = series.filter((each) => Number.isFinite(each.values[at]));
    this.tip.show(place, this.toY(told[0]?.values[at] ?? 0), h("b", {}, `${xLabel} ${xFormat(x[at])}`),
      rows(told.map((each) => [each.color, each.name, format(each.values[at])])));
    if (aloud) this.said.textContent = `${xLabel} ${xFormat(x[at])}: ${told.map((each) => `${each.name} ${format(each.values[at])}`).join(", ")}`;
  }

  #leave() {
    this.at = null;
    this.tip.hide();
    this.cursor?.setAttribute("visibility", "hidden");
  }
}
