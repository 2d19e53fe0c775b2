// What became of everything that was submitted, and how old it was when it was trained.

import { lyingBar, StackedBars } from "../charts/bars.js";
import { LineChart } from "../charts/line.js";
import { h, put, visible } from "../dom.js";
import { count, isNumber, number, percent, plain, plural } from "../format.js";
import { card, cards, empty, notice, table } from "../parts.js";

const AGES = ["var(--sky)", "var(--blue)", "var(--purple)", "var(--orange)", "var(--red)", "var(--slate)"];
const LOSSES = ["var(--red)", "var(--orange)", "var(--purple)", "var(--slate)", "var(--sky)"];

export async function open(root, { ask }) {
  const head = h("div", {});
  const ages = new StackedBars({ title: "Age of trained tokens", unit: "tokens, by versions between sampling and training" });
  const queue = new LineChart({ title: "Groups in flight", unit: "at the end of each step", height: 170, zero: true });
  const dropped = new StackedBars({ title: "Groups dropped", unit: "since the step before, by reason" });
  const tail = h("div", {});
  put(root, h("h1", {}, "Flow"), h("p", { class: "sub" }, "Submitted = trained + dropped for a counted reason + in flight."), head,
    h("div", { class: "grid" }, ages.element, queue.element, dropped.element), tail);

  async function refresh() {
    const now = await ask("flow");
    put(head, fates(now), now.ledger_problem ? notice(now.ledger_problem) : null);
    const steps = now.by_step;
    const x = steps.map((each) => each.step);
    ages.draw({ x, parts: keys(steps, "ages").map((age, at) => ({ name: `age ${age}`, color: AGES[Math.min(at, AGES.length - 1)],
      values: steps.map((each) => each.ages[age] ?? 0) })) });
    queue.draw({ x, series: [["running", "var(--green)"], ["ready", "var(--purple)"], ["submitted", "var(--slate)"]].map(([name, color]) =>
      ({ name, color, values: steps.map((each) => each.queue[name]) })) });
    const reasons = keys(steps, "dropped");
    dropped.element.hidden = !reasons.length;
    dropped.draw({ x, parts: reasons.map((reason, at) => ({ name: plain(reason), color: LOSSES[at % LOSSES.length],
      values: steps.map((each) => each.dropped[reason] ?? 0) })) });
    put(tail, lengths(now.survivors));
  }
  await refresh();
  return { refresh };
}

function keys(steps, field) {
  return [...new Set(steps.flatMap((each) => Object.keys(each[field])))].sort((one, two) => one.localeCompare(two, "en", { numeric: true }));
}

function fates(now) {
  const units = ["groups", "episodes", "tokens"].filter((unit) => now.fates[unit]);
  if (!units.length) return now.ledger_problem ? null : empty("Nothing has been submitted yet.");
  const reasons = [...new Set(units.flatMap((unit) => Object.keys(now.fates[unit].dropped ?? {})))].sort();
  const tints = Object.fromEntries(reasons.map((reason, at) => [reason, LOSSES[at % LOSSES.length]]));
  const parts = (unit) => [
    { name: "trained", value: now.fates[unit].trained, color: "var(--green)" },
    { name: "in flight", value: now.fates[unit].in_flight, color: "var(--sky)" },
    ...reasons.map((reason) => ({ name: `dropped: ${plain(reason)}`, value: now.fates[unit].dropped[reason] ?? 0, color: tints[reason] }))];
  const oldest = Math.max(...Object.keys(now.ages).map(Number), -1);
  const wasted = (unit) => Object.values(now.fates[unit].dropped ?? {}).reduce((sum, each) => sum + each, 0);
  const holds = units.every((unit) => !now.fates[unit].balance);
  return [
    cards([
      ["Groups trained", count(now.fates.groups?.trained), `of ${count(now.fates.groups?.submitted)} submitted`],
      ["Tokens wasted", percent(wasted(units.at(-1)) / (now.fates[units.at(-1)].submitted || 1)), `${count(wasted(units.at(-1)))} will not be trained`],
      ["Oldest trained token", oldest < 0 ? "–" : plural(oldest, "version"), isNumber(now.max_age) ? `the bound is ${now.max_age}` : ""],
      ["The books", holds ? "balance" : "DO NOT BALANCE", holds ? "every unit is accounted for" : "headrace ledger RUN says more"],
    ]),
    card("Fates", h("div", { class: "stack", style: { marginBottom: "14px" } }, units.flatMap((unit) =>
      [h("span", {}, unit), lyingBar(unit, parts(unit))])),
    table([["", true], ...units.map((unit) => [unit, false])], [
      ["submitted", ...units.map((unit) => count(now.fates[unit].submitted))],
      ...parts(units[0]).map((part, at) => [[h("span", { class: "key", style: { background: part.color, display: "inline-block", marginRight: "8px" } }), visible(part.name)],
        ...units.map((unit) => count(parts(unit)[at].value))]),
      ["unaccounted for", ...units.map((unit) => count(now.fates[unit].balance))]], "fates")),
  ];
}

function lengths(bias) {
  if (!bias) return null;
  const words = bias.biased ? "Some lengths survive until training more often than others: what is dropped differs in length from what is kept."
    : "No sign that some lengths survive until training more often than others.";
  return card("Do long answers survive?", h("p", {}, words), h("p", { class: "sub" },
    `two-sample Kolmogorov–Smirnov: distance ${number(bias.ks)}, p = ${number(bias.p_value)}${bias.num_withdrawn ? `; ${count(bias.num_withdrawn)} more were withdrawn before they ended` : ""}`),
  table([["tokens of an episode whose group was trained or dropped", true], ["submitted", false], ["trained", false]], [
    ["episodes", count(bias.num_submitted), count(bias.num_trained)],
    ["mean", number(bias.mean[0]), number(bias.mean[1])],
    ...Object.entries(bias.quantiles).map(([q, [one, two]]) => [`quantile ${q}`, number(one), number(two)])], "lengths"));
}
