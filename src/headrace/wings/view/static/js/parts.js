// Pieces that several pages are made of.

import { h, oneLine, put, visible } from "./dom.js";
import { plain } from "./format.js";

/** A row of figures: [label, value, note]. */
export function cards(rows) {
  return h("dl", { class: "cards" }, rows.map(([label, value, note]) =>
    h("div", {}, h("dt", {}, label), h("dd", {}, value), note ? h("dd", { class: "note" }, note) : null)));
}

/** A box with a heading. */
export function card(title, ...children) {
  return h("section", { class: "card" }, title ? h("h2", {}, title) : null, children);
}

export function notice(text, kind = "") {
  return h("p", { class: `notice ${kind}`, role: "note" }, visible(text));
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}

/** What went wrong, and what to do about it. */
export function trouble(error) {
  return h("div", { class: "notice bad", role: "alert" },
    h("p", {}, visible(error.message)), error.remedy ? h("p", {}, visible(error.remedy)) : null);
}

/** A table: heads are [words, isText], rows are lists of cells (text or elements). */
export function table(heads, rows, caption = "") {
  const kind = heads.map(([, text]) => (text ? "text" : null));
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": caption || "table" }, h("table", {},
    caption ? h("caption", { class: "hidden" }, caption) : null,
    heads.every(([words]) => !words) ? null : h("thead", {}, h("tr", {}, heads.map(([words], at) => h("th", { scope: "col", class: kind[at] }, words)))),
    h("tbody", {}, rows.map((cells) => h("tr", { class: "row" }, cells.map((cell, at) =>
      at === 0 ? h("th", { scope: "row", class: "text" }, cell) : h("td", { class: kind[at] }, cell)))))));
}

/** A choice among a few: [value, words, title]. */
export function segments(label, choices, chosen, choose) {
  const box = h("div", { class: "segments", role: "group", "aria-label": label });
  const draw = (current) => put(box, choices.map(([value, words, title, disabled]) =>
    h("button", { type: "button", title, disabled, "aria-pressed": String(value === current),
      onclick: () => { draw(value); choose(value); } }, words)));
  draw(chosen);
  return box;
}

export function select(label, choices, chosen, choose, attributes = {}) {
  const box = h("select", { "aria-label": label, onchange: () => choose(box.value), ...attributes },
    choices.map(([value, words]) => h("option", { value }, words)));
  box.value = chosen;
  return box;
}

/** "trained", "dropped: too old" and so on. */
export function fate(row) {
  if (row.status !== "scored") return h("span", { class: "tag bad", title: visible(row.cause) }, plain(oneLine(row.cause.split(":")[0] || row.status, 40)));
  if (row.state === "dropped") return h("span", { class: "tag bad" }, `dropped: ${plain(oneLine(row.reason, 40))}`);
  if (row.state === "trained" || row.state === "released") return h("span", { class: "tag good" }, "trained");
  return h("span", { class: "tag" }, plain(row.state));
}

/** Items of a log: [when, words, level]. */
export function log(items) {
  return h("ul", { class: "log", tabindex: 0, "aria-label": "events, the latest first" }, items.map(([when, words, level]) =>
    h("li", { class: level }, h("time", {}, when), h("span", {}, visible(words)))));
}
