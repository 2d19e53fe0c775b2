// How the run stands, on one page: verdict, figures, reward and what is learned from it, throughput.

import { LineChart } from "../charts/line.js";
import { rolling } from "../charts/scale.js";
import { h, put, visible } from "../dom.js";
import { count, duration, figure, isNumber, moment, number, percent, plain, plural } from "../format.js";
import { card, cards, log, notice } from "../parts.js";

const LEARNING = [ // beside the reward: [title, unit, colour, { metric: words }]
  ["Loss", "what was minimised", "var(--blue)", { loss: "loss" }],
  ["Gradient norm", "before clipping", "var(--purple)", { grad_norm: "gradient norm" }],
  ["KL", "nats", "", { kl_ref: "to the reference", kl_teacher: "to the teacher", kl_mu_k3: "sampler to policy" }],
  ["Entropy", "nats per token", "var(--green)", { entropy: "entropy" }],
  ["Learning rate", "", "var(--slate)", { lr: "learning rate" }],
];
const TINTS = ["var(--orange)", "var(--purple)", "var(--blue)"];
const NAMES = ["reward_mean", "reward_std", "generated_tokens", "trained_tokens", "wait_s", "seconds", "exposed_sync_s", "length_mean",
  ...LEARNING.flatMap(([, , , metrics]) => Object.keys(metrics))];
const JOINED = 3; // fewer held-out points than these are points, and no line

export async function open(root, { ask }) {
  const head = h("div", {});
  const reward = new LineChart({ title: "Reward", unit: "mean over each step's batch", height: 380 });
  const speed = new LineChart({ title: "Throughput", unit: "tokens per second", height: 170, zero: true });
  const learner = new LineChart({ title: "Learner's time", unit: "of each step", height: 170, zero: true, format: (value) => duration(value) });
  const length = new LineChart({ title: "Length", unit: "sampled tokens per episode", height: 170, zero: true });
  const learning = LEARNING.map(([title, unit]) => new LineChart({ title, unit, height: 150, zero: title === "KL", named: title === "KL" }));
  const tail = h("div", {});
  reward.element.classList.add("lead");
  put(root, head, h("div", { class: "board" }, [reward, ...learning, speed, learner, length].map(({ element }) => element)), tail);

  async function refresh() {
    const [now, series] = await Promise.all([ask("overview"), ask(`series?names=${NAMES.join(",")}`)]);
    put(head, header(now));
    put(tail, below(now));
    const { lives } = series;
    drawReward(reward, series, now.evaluations);
    learning.forEach((chart, at) => drawLearning(chart, series, LEARNING[at]));
    drawSpeed(speed, series);
    const { columns } = series;
    learner.draw({ x: series.step, lives, series: [
      { name: "waiting for a batch", values: columns.wait_s, color: "var(--slate)" },
      { name: "training", values: columns.seconds, color: "var(--orange)" },
      { name: "stopped for the sync", values: columns.exposed_sync_s, color: "var(--red)" }] });
    length.draw({ x: series.step, lives, series: [{ name: "mean length", values: columns.length_mean, color: "var(--purple)" }] });
  }
  await refresh();
  return { refresh };
}

function header(now) {
  const { figures } = now;
  const living = now.state === "running" || now.state === "starting";
  const done = now.steps_total ? now.steps_done / now.steps_total : 0;
  const [bound, ...rest] = now.verdict.split(": ");
  return [
    h("h1", {}, now.name),
    h("p", { class: "sub" }, [now.about, now.directory, living && now.phase ? now.phase : null].filter(Boolean).map(visible).join(" · ")),
    living && now.steps_total ? h("div", { class: "progress", role: "progressbar", "aria-label": "steps", "aria-valuemin": 0,
      "aria-valuemax": now.steps_total, "aria-valuenow": now.steps_done }, h("div", { style: { width: `${100 * done}%` } })) : null,
    h("section", { class: "card verdict", "aria-label": "verdict" }, h("p", {}, now.verdict
      ? [h("b", {}, bound), rest.length ? `: ${visible(rest.join(": "))}` : ""]
      : "No verdict yet: it needs a few steps, and their trace.")),
    now.cause ? notice(`The run ${now.state}: ${now.cause}`, "bad") : null,
    ...now.warnings.map((words) => notice(words, "warn")),
    ...now.notes.map((words) => notice(words)),
    cards([
      ["Held-out reward", change(figures.eval_before, figures.eval_after), "before → after"],
      ["Training reward", change(figures.reward_first, figures.reward_last), "first step → last tenth"],
      ["Steps", now.steps_total ? `${count(now.steps_done)} / ${count(now.steps_total)}` : count(now.steps_done), time(now, living)],
      ["Generated", `${number(figures.generated_tok_s)} tok/s`, `engine idle ${percent(figures.engine_idle_frac)}`],
      ["Trained", `${number(figures.trained_tok_s)} tok/s`, `learner idle ${percent(figures.learner_idle_frac)}`],
      ["Oldest trained token", plural(figures.max_token_age, "version"), isNumber(now.max_age) ? `the bound is ${now.max_age}` : ""],
      ["Commit gap", isNumber(figures.commit_gap_ms?.p99) ? duration(figures.commit_gap_ms.p99 / 1e3) : "–", "99th percentile: the engine stands still"],
      ["Engine against learner", number(figures.mismatch_kl), "mismatch KL at equal weights"],
    ]),
  ];
}

function time(now, living) {
  if (living && isNumber(now.eta_s)) return `${duration(now.figures.wall_s)}, about ${duration(now.eta_s)} to go`;
  const latest = now.steps_of_last_life < now.steps_done ? `the last ${count(now.steps_of_last_life)} ` : "";
  return `${latest}in ${duration(now.figures.wall_s)}`;
}

function change(before, after) {
  return isNumber(before) || isNumber(after) ? `${figure(before)} → ${figure(after)}` : "–";
}

function below(now) {
  const waits = now.waits.filter((wait) => wait && typeof wait === "object");
  return [
    waits.length ? card("At this moment", h("ul", { class: "log" }, waits.map((wait) => h("li", {},
      h("time", {}, wait.loop), h("span", { class: "tag" }, wait.state),
      h("span", {}, visible(`${wait.what}, for ${duration(wait.since_s)}${wait.unblocked_by ? `; unblocked by ${wait.unblocked_by}` : ""}`)))))) : null,
    now.events.length ? card("Events", log(now.events.toReversed().map((event) => [duration(event.wall_s), event.text, event.level]))) : null,
    now.written_s ? h("p", { class: "sub" }, `last written ${moment(now.written_s)} · ${plain(now.state)}`) : null,
  ];
}

function drawLearning(chart, { step, columns, lives }, [, , color, metrics]) {
  const there = Object.entries(metrics).filter(([name]) => columns[name].some(isNumber));
  chart.draw({ x: step, lives, series: there.map(([name, words], at) => ({ name: words, values: columns[name], color: color || TINTS[at] })) });
}

/** The rewards of the batches; the held-out ones stand where their version was committed, the first before all steps. */
function drawReward(chart, { step, columns, lives }, evaluations) {
  const window = Math.max(1, Math.floor(step.length / 15));
  const x = [...new Set([...step, ...evaluations.map(([version]) => version)])].sort((one, two) => one - two);
  const spreadOut = (at, values) => x.map((place) => values[at.get(place)] ?? null);
  const ofStep = new Map(step.map((version, at) => [version, at]));
  const means = spreadOut(ofStep, columns.reward_mean);
  const smooth = spreadOut(ofStep, rolling(columns.reward_mean, window));
  const spread = spreadOut(ofStep, rolling(columns.reward_std, window));
  const heldOut = spreadOut(new Map(evaluations.map(([version], at) => [version, at])), evaluations.map(([, value]) => value));
  const edge = (sign) => smooth.map((value, at) => (isNumber(value) && isNumber(spread[at]) ? value + sign * spread[at] : null));
  const few = evaluations.length < JOINED;
  chart.draw({ x, lives, band: window > 1 ? inside(edge(-1), edge(1)) : undefined, series: [
    { name: "each step", values: means, color: "var(--blue)", opacity: window > 1 ? 0.4 : 1, width: 1.2, quiet: window > 1, bridge: true },
    ...(window > 1 ? [{ name: `mean of ${window}`, values: smooth, color: "var(--blue)", width: 2.4, bridge: true }] : []),
    ...(evaluations.length ? [{ name: "held out", values: heldOut, color: "var(--orange)", dots: true, loose: few, bridge: true, dash: "4 4" }] : [])] });
}

function inside(low, high) {
  return { low: low.map((value) => (isNumber(value) ? Math.max(value, 0) : null)), high: high.map((value) => (isNumber(value) ? Math.min(value, Math.max(1, value - 1)) : null)), color: "var(--blue)" };
}

function drawSpeed(chart, series) {
  const { step, wall_s: wall, columns } = series;
  const trained = columns.trained_tokens.reduce((sums, value) => [...sums, (sums.at(-1) ?? 0) + (value ?? 0)], []);
  const window = Math.max(3, Math.floor(step.length / 12));
  const rate = (tokens) => step.map((_, at) => {
    const from = at - window;
    const [before, start] = from < 0 ? [0, series.first_s] : [tokens[from], wall[from]];
    const passed = wall[at] - start;
    return passed > 0 && isNumber(tokens[at]) ? Math.max(0, (tokens[at] - before) / passed) : null;
  });
  chart.draw({ x: step, lives: series.lives, series: [
    { name: "generated", values: rate(columns.generated_tokens), color: "var(--blue)" },
    { name: "trained", values: rate(trained), color: "var(--orange)" }] });
}
