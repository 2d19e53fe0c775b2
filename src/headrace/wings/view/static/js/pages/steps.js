// Every number of every step, as small charts of one size.

import { LineChart } from "../charts/line.js";
import { h, oneLine, put } from "../dom.js";
import { count, figure, inUnit, number, plain } from "../format.js";
import { card, empty, table, trouble } from "../parts.js";

const GROUPS = [
  ["Reward", /^(reward|eval|zero_variance|truncated|repetition)/],
  ["Length", /^(length|turns)/],
  ["By environment and agent", /^(env|agent)\//],
  ["Flow", /^(trained_tok|generated_tok|tokens$|queue|age|version_|max_age|capacity|pivots|dropped|set_aside|wasted)/],
  ["Time", /^(wall_s|seconds|wait_s|straggler|held_back|exposed|commit_gap)|_s$|_busy_frac$|prefill_frac|_s_per_episode$/],
  ["Parts", /^(engine_|cache|preempted|memory|cpu|disk)/],
  ["Learning", /./], // what none of the others took
];
const SHOWN = ["Reward", "Learning"]; // first; the others as they stand above
const BATCH = 20;

export async function open(root, context) {
  const { ask, filters, refilter, runs, run } = context;
  const box = h("div", {});
  const odd = h("div", {});
  const charts = new Map();
  const seen = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const { name } = target.dataset;
      if (isIntersecting) seen.add(name);
      else seen.delete(name);
    }
    if (entries.some((entry) => entry.isIntersecting && !charts.get(entry.target.dataset.name)?.data)) draw();
  }, { rootMargin: "300px" });
  const search = h("input", { type: "search", placeholder: "clip, entropy, reward/…", value: filters.name ?? "", oninput: () => arrange() });
  put(root, h("h1", {}, "Steps"), h("p", { class: "sub" }, "Every number that a step reports. Arrow keys read single points of a chart that has the focus."),
    h("div", { class: "bar" }, h("label", { class: "field grow" }, "Show names that hold", search)), box, odd);
  search.addEventListener("change", () => refilter({ name: search.value }));
  let known = [];

  async function draw() {
    const names = [...seen].filter((name) => charts.has(name));
    for (let at = 0; at < names.length; at += BATCH) {
      const some = names.slice(at, at + BATCH);
      const series = await ask(`series?names=${some.map(encodeURIComponent).join(",")}`);
      for (const name of some) {
        charts.get(name)?.draw({ x: series.step, lives: series.lives, series: [{ name: plain(name), values: series.columns[name], color: "var(--blue)", bridge: true, dots: series.columns[name].filter(Number.isFinite).length < 12 }] });
      }
    }
  }

  function arrange() {
    const words = search.value.trim().toLowerCase();
    const wanted = known.filter(({ name, what }) => !words || name.toLowerCase().includes(words) || what.toLowerCase().includes(words));
    watch.disconnect();
    seen.clear();
    charts.clear();
    const left = new Set(wanted.map(({ name }) => name));
    const sections = GROUPS.map(([title, pattern]) => {
      const mine = wanted.filter(({ name }) => left.has(name) && pattern.test(name));
      mine.forEach(({ name }) => left.delete(name));
      return [title, mine];
    }).sort(([one], [two]) => place(one) - place(two)).map(([title, mine]) =>
      (mine.length ? [h("h2", { style: { margin: "20px 0 10px" } }, title), h("div", { class: "grid small" }, mine.map(one))] : null));
    put(box, known.length ? (wanted.length ? sections : empty("No number has such a name.")) : empty("No step has ended yet."));
    for (const chart of charts.values()) watch.observe(chart.element);
  }

  function one({ name, unit, what }) {
    const chart = new LineChart({ title: name, unit: unit === "frac" ? "fraction" : unit, what, level: 3, height: 130, format: (value) => inUnit(value, unit) });
    chart.element.dataset.name = name;
    chart.element.style.minHeight = "190px";
    charts.set(name, chart);
    return chart.element;
  }

  async function refresh() {
    const now = await ask("metrics");
    const same = now.length === known.length && now.every(({ name }, at) => name === known[at].name);
    known = now;
    if (same) return draw();
    return arrange();
  }
  await refresh();
  outliers(odd, context, Number(filters.outliers) || runs[run].steps_done);
  return { refresh, close: () => watch.disconnect() };
}

function place(title) {
  return SHOWN.includes(title) ? SHOWN.indexOf(title) : SHOWN.length;
}

/** The tokens of one step about which engine and learner differ most, or the least expected ones, with links. */
async function outliers(box, { ask, to }, step) {
  if (!step) return;
  const choose = h("input", { type: "number", min: 1, value: step, onchange: () => outliers(box, { ask, to }, Number(choose.value)) });
  const head = (...rest) => put(box, card("Outlying tokens", h("p", { class: "sub" },
    "The tokens of one step with the greatest |log π − log μ|, or, where the learner's side was not recorded, the least log μ: where ratios go astray, look here first."),
  h("div", { class: "bar" }, h("label", { class: "field" }, "Step", choose)), rest));
  try {
    const found = await ask(`outliers/${Math.max(0, step - 1)}`);
    if (!found.tokens.length) return head(empty("This step has trained no sampled token, or there is no such step."));
    const part = found.looked < found.episodes ? `, among the first ${count(found.looked)} of its ${count(found.episodes)} episodes` : "";
    head(table([["token", true], ["behind", true], ["episode", true], ["log μ", false], ["log π − log μ", false], ["age", false], ["reward", false]], found.tokens.map((each) => [
      h("code", {}, each.text === "" ? `⟨${each.id}⟩` : oneLine(each.text, 30)), h("span", { class: "around" }, oneLine(each.around.slice(-40), 60)),
      h("a", { href: to("episodes", [each.key], { by: found.by, turn: each.turn, at: each.place }) }, `${each.key}, token ${each.place}`),
      figure(each.logprob), figure(each.gap), each.age ?? "–", number(each.reward)]), `outlying tokens of step ${step}${part}`), part ? h("p", { class: "sub" }, part.slice(2)) : null);
  } catch (error) {
    head(trouble(error));
  }
}
