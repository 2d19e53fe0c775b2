// The frame: which page of which run, kept in the address; and the line on which the server tells of changes.

import { ask, follow, isFile, query } from "./api.js";
import { h, put } from "./dom.js";
import { count, plural } from "./format.js";
import * as compare from "./pages/compare.js";
import * as episodes from "./pages/episodes.js";
import * as flow from "./pages/flow.js";
import * as overview from "./pages/overview.js";
import * as steps from "./pages/steps.js";
import * as system from "./pages/system.js";
import * as timeline from "./pages/timeline.js";
import { trouble } from "./parts.js";

const PAGES = [
  ["overview", "Overview", overview], ["timeline", "Timeline", timeline], ["flow", "Flow", flow], ["episodes", "Episodes", episodes],
  ["steps", "Steps", steps], ["system", "System", system], ...(isFile ? [] : [["compare", "Compare", compare]]),
];
const MARK = document.querySelector("link[rel=icon]").href;
const THEME = "headrace-theme";
const EVERY_MS = 900; // a page is drawn again at most so often, however fast a run writes

const top = document.getElementById("top");
const side = document.getElementById("side");
const main = document.getElementById("main");
const state = { runs: [], page: null, route: null, opening: 0, linked: false, stale: false, drawing: false };

/** #/run/page/more?filters as an object. */
export function route() {
  const [path, filters = ""] = location.hash.slice(1).split("?");
  const [run = "0", page = "overview", ...more] = path.split("/").filter(Boolean);
  return { run: Number(run) || 0, page: PAGES.some(([name]) => name === page) ? page : "overview",
    more: more.map(decodeURIComponent), filters: Object.fromEntries(new URLSearchParams(filters)) };
}

/** The address of a page. */
export function to(run, page, more = [], filters = {}) {
  const tail = query(filters);
  return `#/${[run, page, ...more.map(encodeURIComponent)].join("/")}${tail ? `?${tail}` : ""}`;
}

async function open() {
  const mine = ++state.opening;
  const here = route();
  const before = state.route;
  const sameRun = before?.run === here.run && before?.page === here.page;
  state.page?.close?.();
  state.page = null;
  state.route = here;
  if (!sameRun) put(main, h("p", { class: "empty" }, "Reading …"));
  try {
    if (!state.runs.length || !sameRun) state.runs = await ask("runs");
    if (mine !== state.opening) return;
    if (here.run >= state.runs.length) here.run = 0;
    frame();
    const [, , { open: build }] = PAGES.find(([name]) => name === here.page);
    const root = h("div", {});
    const page = await build(root, context(here));
    if (mine !== state.opening) return page?.close?.();
    put(main, root);
    if (!sameRun || here.more.join() !== before?.more.join()) {
      scrollTo(0, 0);
      if (before) main.focus({ preventScroll: true });
    }
    state.page = page ?? {};
    document.title = `${PAGES.find(([name]) => name === here.page)[1]} · ${state.runs[here.run].name} · headrace`;
    state.page.shown?.();
  } catch (error) {
    if (mine === state.opening) put(main, trouble(error));
    if (!error.remedy) console.warn(error);
  }
}

function context(here) {
  return { run: here.run, runs: state.runs, more: here.more, filters: here.filters,
    ask: (path) => ask(`runs/${here.run}/${path}`),
    to: (page, more, filters) => to(here.run, page, more, filters),
    refilter: (filters) => { location.hash = to(here.run, here.page, here.more, filters); } };
}

function frame() {
  const { run, page } = state.route;
  const now = state.runs[run];
  const names = state.runs.length > 1
    ? h("select", { "aria-label": "run", onchange: (event) => { location.hash = to(event.target.value, page === "episodes" ? "episodes" : page); } },
      state.runs.map((each, at) => h("option", { value: at, selected: at === run }, each.name)))
    : h("span", { class: "mono" }, now.name);
  const done = now.steps_total ? `${count(now.steps_done)} of ${count(now.steps_total)} steps` : plural(now.steps_done, "step");
  const focused = top.contains(document.activeElement) ? document.activeElement.tagName : null;
  put(top,
    h("a", { class: "brand", href: to(run, "overview") }, h("img", { src: MARK, alt: "headrace" }), h("span", { "aria-hidden": "true" }, "headrace")), names,
    h("span", { class: "pill", data: { state: now.state } }, `${now.state} · ${done}`),
    h("span", { class: "gap" }),
    h("span", { class: "line", role: "status" }, state.linked ? "" : "not connected: figures stand still"),
    h("button", { class: "plain", type: "button", onclick: retheme, "aria-label": "dark or light" }, themed() === "dark" ? "Light" : "Dark"));
  if (focused) top.querySelector(focused)?.focus();
  put(side, h("ul", {}, PAGES.map(([name, words]) => h("li", {},
    h("a", { href: to(run, name), "aria-current": name === page ? "page" : null }, words)))));
  if (side.scrollWidth > side.clientWidth) side.scrollLeft = side.querySelector("[aria-current]").offsetLeft - 60;
}

function themed() {
  return document.documentElement.dataset.theme;
}

function theme(name) {
  document.documentElement.dataset.theme = name;
}

function retheme() {
  theme(themed() === "dark" ? "light" : "dark");
  try {
    localStorage.setItem(THEME, themed());
  } catch { /* a browser that keeps nothing for a file: the choice lasts as long as the page */ }
  frame();
  state.page?.refresh?.();
}

/** Something was written: the page asks again, soon, and never twice at once. */
async function changed(runs) {
  if (runs && !runs.includes(state.route?.run) && state.route?.page !== "compare") return;
  state.stale = true;
  if (state.drawing || document.hidden) return;
  state.drawing = true;
  while (state.stale && !document.hidden) {
    state.stale = false;
    try {
      state.runs = await ask("runs");
      frame();
      await state.page?.refresh?.();
    } catch (error) {
      if (error.status !== 0) console.warn(error);
    }
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
  state.drawing = false;
}

function chosen() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}

const dark = matchMedia("(prefers-color-scheme: dark)");
theme(chosen() ?? (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!chosen()) { theme(dark.matches ? "dark" : "light"); state.page?.refresh?.(); } });
addEventListener("hashchange", open);
document.addEventListener("visibilitychange", () => { if (!document.hidden && state.stale) changed(null); });
await open();
follow(changed, (linked) => { state.linked = linked; if (state.runs.length) frame(); });
