// What a token's colour says. Every paint gives a class for a token, a legend, and says when it is missing.

import { h } from "../dom.js";
import { isNumber, number } from "../format.js";

export const FROZEN = 2 ** 31 - 1;

/** A version in words: -1 was given, numbers below it are mixed, the greatest one is an agent that is not trained. */
export function versionWords(version) {
  if (version === -1) return "given";
  if (version === FROZEN) return "frozen";
  return version < -1 ? `mixed: ${-2 - version} and later` : String(version);
}

/** Of a teacher's weights. */
export function teacherWords(version) {
  return version === FROZEN ? "none of this run" : String(version);
}

export function oldestVersion(version) {
  return version < -1 ? -2 - version : version;
}

/** All paints of an episode, in their order: { name, words, what, missing, of(column, at, turn) -> class, scale }. */
export function paints(episode) {
  const sampled = episode.turns.filter((turn) => turn.sampled);
  const lowest = Math.min(...sampled.map((turn) => turn.logprob?.[0] ?? 0), -1);
  const known = (field) => sampled.some((turn) => turn[field] !== null && turn[field] !== undefined);
  const advantages = sampled.filter((turn) => isNumber(turn.advantage)).flatMap((turn) => (turn.teacher_adds ?? [0]).map((adds) => turn.advantage + adds));
  const most = Math.max(...advantages.map(Math.abs), 1e-9);
  const teacherMost = Math.max(...sampled.map((turn) => turn.teacher_gap ?? 0), 0);
  const gapMost = Math.max(...sampled.map((turn) => turn.gap ?? 0), 0);
  const keptMost = Math.max(...sampled.map((turn) => turn.kept?.[1] ?? 0), 2);
  const entropyMost = Math.max(...sampled.map((turn) => turn.entropy?.[1] ?? 0), 1e-9);
  return [
    { name: "version", words: "Version", what: "which weights sampled it", missing: sampled.length ? "" : "no policy sampled a token",
      of: (column, at) => `v${oldestVersion(column.version[at]) % 8}`, scale: () => versionScale(episode) },
    { name: "age", words: "Age", what: "versions between sampling and training", missing: isNumber(episode.step) ? "" : "no step has taken its group",
      of: (column, at) => level(Math.max(0, episode.step - oldestVersion(column.version[at])) / 8), scale: () => steps("age 0", "8 and more") },
    { name: "logprob", words: "Surprise", what: "how improbable it was when it was sampled: −log μ", missing: sampled.length ? "" : "no policy sampled a token",
      of: (column, at) => level(isNumber(column.logprob[at]) ? Math.sqrt(column.logprob[at] / lowest) : 1), scale: () => steps("certain", `μ = ${number(Math.exp(lowest))}`) },
    { name: "gap", words: "Gap", what: "log π − log μ: how the learner's probability differs from the engine's", missing: gapMost ? "" : isNumber(episode.step) ? "not recorded: its step has not ended, or an earlier version wrote it" : "no step has taken its group",
      of: (column, at) => signed((column.gap?.[at] ?? 0) / gapMost), scale: () => around(gapMost) },
    { name: "entropy", words: "Entropy", what: "of the distribution it was drawn from", missing: known("entropy") ? "" : "not recorded: set observe.record_entropy = true",
      of: (column, at) => level((column.entropy?.[at] ?? 0) / entropyMost), scale: () => steps("0", `${number(entropyMost)} nats`) },
    { name: "advantage", words: "Advantage", what: "what it was credited with", missing: advantages.length ? "" : episode.advantage_why || "not known",
      of: (column, at, turn) => signed(turn.untrained ? 0 : (advantageOf(column, at, turn) ?? 0) / most), scale: () => around(most) },
    { name: "teacher", words: "Teacher", what: "log ν − log μ: how much likelier its teacher finds it than who sampled it", missing: episode.teacher_why,
      of: (column, at) => (isNumber(column.teacher?.[at]) && isNumber(column.logprob[at]) && teacherMost ? signed((column.teacher[at] - column.logprob[at]) / teacherMost) : ""), scale: () => around(teacherMost) },
    { name: "kept", words: "Kept-set", what: "how many vocabulary entries it was drawn from", missing: known("kept") ? "" : "no kept-sets were recorded: sampling was not truncated",
      of: (column, at) => level(column.kept?.[at] ? Math.log(column.kept[at]) / Math.log(keptMost) : 0), scale: () => steps("1 entry", `${number(keptMost)} entries`) },
    { name: "rerouted", words: "Routing", what: "how many experts a later turn chose otherwise for the same token", missing: known("rerouted") ? "" : known("experts") ? "no later turn read these tokens again" : "no experts were recorded",
      of: (column, at) => level(Math.max(0, column.rerouted?.[at] ?? 0) / 8), scale: () => steps("the same", "8 experts and more differ") },
    { name: "none", words: "Plain", what: "no colour", missing: "", of: () => "", scale: () => null },
  ];
}

/** What a token is credited with: its turn's advantage, and what a teacher adds to it. */
export function advantageOf(column, at, turn) {
  return isNumber(turn.advantage) ? turn.advantage + (column.teacher_adds?.[at] ?? 0) : null;
}

export function scaleOf(paint) {
  return [h("span", {}, paint.what), paint.scale()];
}

function level(share) {
  const at = Math.max(0, Math.min(9, Math.round(share * 9)));
  return at ? `c${at}` : "";
}

function signed(share) {
  const at = Math.max(1, Math.min(4, Math.ceil(Math.abs(share) * 4)));
  if (!share) return "";
  return share > 0 ? `u${at}` : `d${at}`;
}

function steps(low, high) {
  return h("span", {}, `${low} `, swatches(["c1", "c3", "c5", "c7", "c9"]), ` ${high}`);
}

function around(most) {
  return h("span", {}, swatches(["d4", "d2", "u2", "u4"]), ` −${number(most)} to ${number(most)}`);
}

function swatches(classes) {
  return classes.map((name) => h("i", { class: name, "aria-hidden": "true" }));
}

function versionScale(episode) {
  const span = episode.turns.map((turn) => turn.versions).filter(Boolean).flat().filter((version) => version !== FROZEN);
  if (!span.length) return null;
  const [low, high] = [Math.min(...span), Math.max(...span)];
  const all = Array.from({ length: Math.min(8, high - low + 1) }, (_, at) => low + at);
  return h("span", {}, all.map((version) => [h("i", { class: `v${version % 8}`, "aria-hidden": "true" }), ` ${version} `]), high - low > 7 ? `… ${high}` : "");
}
