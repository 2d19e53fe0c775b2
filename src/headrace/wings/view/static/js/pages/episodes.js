// The list of episodes: filters, order, search; or one of them.

import { isFile, query } from "../api.js";
import { h, oneLine, put, visible } from "../dom.js";
import { count, isNumber, moment, number, plural } from "../format.js";
import { empty, fate, notice, select, table } from "../parts.js";
import { openEpisode } from "./episode.js";

const STATUS = [["", "any fate"], ["trained", "trained"], ["waiting", "waiting to be trained"], ["dropped", "group dropped"], ["failed", "failed"],
  ["left_out", "left out"], ["masked", "masked"], ["scored", "scored"]];
const ORDER = [["newest", "newest first"], ["oldest", "oldest first"], ["reward", "best reward first"], ["least_reward", "worst reward first"], ["tokens", "longest first"], ["age", "oldest tokens first"]];
const NUMBERS = [["step", "Step", 1], ["group", "Group"], ["reward_from", "Reward from"], ["reward_to", "to"], ["tokens_from", "Tokens from"], ["tokens_to", "to"], ["age_from", "Age from"]];
const PAGE = 50;

export async function open(root, context) {
  if (context.more.length) return openEpisode(root, context);
  const { ask, filters, refilter } = context;
  const { words = "", offset = "0", ...wanted } = filters;
  const at = Number(offset) || 0;
  const change = (name, value) => refilter({ ...filters, offset: "", [name]: value });
  const list = h("div", {});
  put(root, h("h1", { style: { marginBottom: "10px" } }, "Episodes"), isFile ? null : bar(wanted, words, change, refilter), list);

  async function refresh() {
    if (words) return;
    const asked = { ...wanted, step: wanted.step ? Number(wanted.step) - 1 : "", offset: String(at), limit: String(PAGE) };
    const page = await ask(`episodes?${query(asked)}`);
    if (page.problem) return put(list, notice(page.problem));
    if (isFile) return put(list, notice(`This file holds the latest ${count(page.rows.length)} of ${plural(page.total, "episode")}. headrace view shows all of them, with filters and search.`),
      page.rows.length ? rows(page.rows, context, {}) : null);
    put(list, h("p", { class: "sub" }, `${plural(page.total, "episode")}${page.running ? `, and ${count(page.running)} that are still running` : ""}`),
      page.rows.length ? rows(page.rows, context, { filters: wanted }) : empty(page.total ? "This page is empty." : "No episode matches, or none has ended yet."), pager(page, at, (next) => refilter({ ...filters, offset: String(next) })));
  }
  if (words) await search(list, words, context);
  else await refresh();
  return { refresh };
}

function bar(wanted, words, change, refilter) {
  const find = h("input", { type: "search", value: words, placeholder: "text of a prompt or an answer", maxlength: 200 });
  return h("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); refilter(find.value.trim() ? { words: find.value.trim() } : {}); } },
    h("label", { class: "field grow" }, "Search every token's text", find),
    h("label", { class: "field" }, "Fate", select("fate", STATUS, wanted.status ?? "", (value) => change("status", value))),
    h("label", { class: "field" }, "Order", select("order", ORDER, wanted.order ?? "newest", (value) => change("order", value))),
    h("button", { type: "submit" }, "Search"), h("button", { type: "button", onclick: () => refilter({}) }, "Clear"),
    h("details", { class: "more", open: [...NUMBERS.map(([name]) => name), "cause"].some((name) => wanted[name]) }, h("summary", {}, "More filters"), h("div", {},
    NUMBERS.map(([name, label]) => h("label", { class: "field" }, label, h("input", { type: "number", step: "any", value: wanted[name] ?? "",
      "aria-label": name.replaceAll("_", " "), onchange: (event) => change(name, event.target.value) }))),
    h("label", { class: "field" }, "Cause", h("input", { type: "text", size: 10, value: wanted.cause ?? "", onchange: (event) => change("cause", event.target.value) })))));
}

function rows(list, { to }, from) {
  const most = Math.max(...list.map((row) => row.reward ?? 0), 1e-9);
  return table([["episode", true], ["prompt and answer", true], ["step", false], ["reward", false], ["tokens", false], ["versions", false], ["age", false], ["fate", true], ["ended", false]],
    list.map((row) => [
      h("a", { href: to("episodes", [row.key], from.filters) }, row.key),
      said(row),
      row.step === null ? "–" : count(row.step + 1),
      [isNumber(row.reward) && row.reward >= 0 ? h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: { width: `${100 * Math.min(1, row.reward / most)}%` } })) : null, number(row.reward)],
      count(row.tokens), versions(row), row.age ?? "–", fate(row), moment(row.ended_s)]), "episodes");
}

/** The end of its prompt and the beginning of its last answer. */
function said({ prompt, answer }) {
  if (!prompt && !answer) return "–";
  return h("span", { class: "said" }, h("span", { class: "given" }, oneLine(prompt)), h("span", {}, oneLine(answer) || "(empty)"));
}

export function versions({ oldest, newest }) {
  if (oldest === null) return "–";
  return oldest === newest ? String(oldest) : `${oldest} to ${newest}`;
}

function pager({ total, rows: here }, at, go) {
  if (total <= PAGE && !at) return null;
  return h("div", { class: "bar", style: { marginTop: "12px" }, role: "navigation", "aria-label": "pages of the list" },
    h("button", { type: "button", disabled: at === 0, onclick: () => go(0) }, "First"),
    h("button", { type: "button", disabled: at === 0, onclick: () => go(Math.max(0, at - PAGE)) }, "← Back"),
    h("span", { class: "sub", style: { margin: "0" } }, `${count(Math.min(total, at + 1))} to ${count(at + here.length)} of ${count(total)}`),
    h("button", { type: "button", disabled: at + PAGE >= total, onclick: () => go(at + PAGE) }, "Next →"),
    h("button", { type: "button", disabled: at + PAGE >= total, onclick: () => go(Math.floor((total - 1) / PAGE) * PAGE) }, "Last"));
}

async function search(list, words, { ask, to }) {
  const found = [];
  let read = 0;
  let before = "";
  const go = async () => {
    const answer = await ask(`search?${query({ words, before })}`);
    found.push(...answer.found);
    [read, before] = [read + answer.read, answer.next];
    put(list, h("p", { class: "sub", role: "status" }, `${plural(found.length, "episode")} with “${oneLine(words, 60)}” among the latest ${count(read)} looked through${before ? "" : ": that is all of them"}`),
      found.length ? table([["episode", true], ["by", true], ["around it", true], ["reward", false]], found.map((each) => [
        h("a", { href: `${to("episodes", [each.key])}` }, each.key), visible(each.author), around(each.around, words), number(each.reward)]), "found") : empty(before ? "Nothing yet." : "Nothing was found."),
      before ? h("button", { type: "button", onclick: go }, "Search further back") : null);
  };
  await go();
}

function around(text, words) {
  const at = text.toLowerCase().indexOf(words.toLowerCase());
  if (at < 0) return h("span", { class: "around" }, oneLine(text));
  return h("span", { class: "around" }, oneLine(text.slice(0, at)), h("mark", {}, oneLine(text.slice(at, at + words.length))), oneLine(text.slice(at + words.length)));
}
