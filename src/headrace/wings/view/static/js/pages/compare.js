// Several runs side by side: one number over steps, time or tokens, and the settings in which they differ.

import { ask as askServer } from "../api.js";
import { h, put, visible } from "../dom.js";
import { count, duration, figure, inUnit, number, percent, plural } from "../format.js";
import { LineChart } from "../charts/line.js";
import { rolling } from "../charts/scale.js";
import { card, empty, notice, segments, select, table } from "../parts.js";

const TINTS = ["var(--blue)", "var(--orange)", "var(--green)", "var(--purple)", "var(--red)", "var(--sky)", "var(--slate)"];
const DASHES = [null, "6 4", "2 3"];
const AXES = [["step", "steps"], ["time", "time"], ["tokens", "tokens"]];

export async function open(root, { runs, filters, refilter, ask }) {
  if (runs.length < 2) {
    put(root, h("h1", {}, "Compare"), empty("One run is open. Name several to see them side by side: headrace view RUN_A RUN_B, or a directory that holds them."));
    return {};
  }
  const metrics = await ask("metrics");
  const chosen = { name: filters.metric ?? "reward_mean", axis: filters.axis ?? "step" };
  const box = h("div", {});
  const below = h("div", {});
  const names = metrics.map(({ name }) => [name, name]);
  if (!metrics.some(({ name }) => name === chosen.name)) names.unshift([chosen.name, chosen.name]);
  put(root, h("h1", {}, "Compare"), h("p", { class: "sub" }, plural(runs.length, "run")),
    h("div", { class: "bar" },
      h("label", { class: "field" }, "Number", select("number", names, chosen.name, (metric) => refilter({ ...filters, metric }))),
      h("div", { class: "field" }, segments("over", AXES, chosen.axis, (axis) => refilter({ ...filters, axis })))), box, below);

  async function refresh() {
    const row = metrics.find(({ name }) => name === chosen.name) ?? { unit: "", what: "" };
    const [together, ...series] = await Promise.all([askServer("compare"),
      ...runs.map((_, at) => askServer(`runs/${at}/series?names=${encodeURIComponent(chosen.name)},generated_tokens`))]);
    const chart = new LineChart({ title: chosen.name, unit: row.unit, what: row.what, height: 300, xLabel: { step: "step", time: "time", tokens: "tokens" }[chosen.axis],
      xFormat: { step: count, time: duration, tokens: count }[chosen.axis], format: (value) => inUnit(value, row.unit) });
    put(box, chart.element);
    chart.draw(overlaid(runs, series, chosen));
    put(below, figures(together), settings(together));
  }
  await refresh();
  return { refresh };
}

/** All runs on one axis: every place where any of them has a point. */
function overlaid(runs, series, { name, axis }) {
  const places = series.map((each) => ({ step: each.step, time: each.wall_s, tokens: each.columns.generated_tokens })[axis]);
  const x = [...new Set(places.flat())].filter(Number.isFinite).sort((one, two) => one - two);
  const at = new Map(x.map((value, index) => [value, index]));
  return { x, series: series.map((each, run) => {
    const values = Array(x.length).fill(null);
    const smooth = rolling(each.columns[name], Math.max(1, Math.floor(each.step.length / 30)));
    places[run].forEach((place, index) => { if (at.has(place)) values[at.get(place)] = smooth[index]; });
    return { name: runs[run].name, values, color: TINTS[run % TINTS.length], dash: DASHES[Math.floor(run / TINTS.length) % 3], bridge: true };
  }) };
}

function figures({ runs }) {
  const rows = [
    ["state", (run) => run.state],
    ["steps", (run) => count(run.steps_done)],
    ["held-out reward", (run) => `${figure(run.figures.eval_before)} → ${figure(run.figures.eval_after)}`],
    ["training reward", (run) => `${figure(run.figures.reward_first)} → ${figure(run.figures.reward_last)}`],
    ["wall time", (run) => duration(run.figures.wall_s)],
    ["generated tok/s", (run) => number(run.figures.generated_tok_s)],
    ["trained tok/s", (run) => number(run.figures.trained_tok_s)],
    ["engine idle", (run) => percent(run.figures.engine_idle_frac)],
    ["learner idle", (run) => percent(run.figures.learner_idle_frac)],
    ["oldest trained token", (run) => plural(run.figures.max_token_age, "version")],
    ["mismatch KL", (run) => number(run.figures.mismatch_kl)],
  ];
  return card("Figures", table([["", true], ...runs.map((run) => [run.name, false])], rows.map(([words, of]) => [words, ...runs.map((run) => visible(of(run)))]), "figures of the runs"),
    ...runs.filter((run) => run.verdict).map((run) => notice(`${run.name}: ${run.verdict}`)));
}

function settings({ runs, settings: rows }) {
  if (!rows.length) return card("Settings", empty("All settings are the same."));
  return card("Settings that differ", table([["setting", true], ...runs.map((run) => [run.name, true])],
    rows.map(({ name, values }) => [h("code", {}, name), ...values.map((value) => visible(value === null || value === undefined ? "–" : JSON.stringify(value)))]), "settings that differ"));
}
