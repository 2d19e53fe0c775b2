// The page about a server of the Tinker protocol: tenants, queues, and the tokens of the sequence that was chosen.

import { ask } from "./api.js";
import { h, oneLine, put, visible } from "./dom.js";
import { bytes, count, duration, figure, moment } from "./format.js";
import { card, cards, empty, table, trouble } from "./parts.js";

const EVERY_MS = 1000;
const VERSIONS = 8; // colours of versions, which repeat
const main = document.getElementById("main");
const lists = h("div", {});
const detail = h("div", {});
let drawn = "";

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

function button(words, choose) {
  return h("button", { class: "plain mono", type: "button", onclick: choose }, oneLine(words, 60));
}

function tenantRow(one) {
  return [button(one.model, () => show(() => trained(one.model))), oneLine(one.who, 40), one.base,
    one.rank === null ? "" : `${one.rank}: ${one.parts.join(", ")}`, count(one.steps), one.loss === null ? "" : figure(one.loss),
    count(one.waiting), one.waiting ? duration(one.waiting_s) : "", count(one.failed), one.finished ? "ended" : duration(one.idle_s)];
}

function sampleRow(one) {
  return [button(String(one.number), () => show(() => sample(one.number))), moment(one.created_s), oneLine(one.model ?? one.base ?? "", 60),
    one.kind ?? "", count(one.prompt), count(one.tokens), one.stop];
}

/** Whether there is something new: times alone are drawn only while requests wait, so that the focus stays where it is. */
function isNew(found) {
  const now = JSON.stringify(found, (name, value) => (name.endsWith("_s") ? 0 : value));
  const changed = now !== drawn;
  drawn = now;
  return changed || found.queue.length > 0;
}

function draw(found) {
  document.getElementById("state").textContent = visible(found.directory);
  const waiting = found.tenants.reduce((sum, one) => sum + one.waiting, 0);
  put(lists, h("h1", {}, "Tenants"),
    cards([["models", count(found.tenants.length)], ["requests that wait", count(waiting)],
      ["longest wait", duration(Math.max(0, ...found.queue.map((one) => one.waiting_s)))]]),
    card("Models", found.tenants.length ? table([["model", true], ["client", true], ["base", true], ["rank and layers", true], ["steps"], ["last loss"], ["waiting"], ["for"], ["failed"], ["idle"]],
      found.tenants.map(tenantRow), "models") : empty("No client has made a model yet.")),
    card("Queue", found.queue.length ? table([["model", true], ["request"], ["kind", true], ["size"], ["waits for"]],
      found.queue.map((one) => [h("span", { class: "mono" }, one.model), one.seq, one.kind, bytes(one.bytes), duration(one.waiting_s)]), "queue") : empty("Nothing waits.")),
    card("Sampled", found.samples.length ? table([["sequence", true], ["when", true], ["weights of", true], ["kind", true], ["prompt"], ["tokens"], ["ended by", true]],
      found.samples.map(sampleRow), "samples") : empty("Nothing was sampled yet.")));
}

/** A token, with what is known of it as its title. */
function token(piece, facts, tint) {
  return h("span", { class: `t ${tint}`, title: facts.join("\n") }, visible(piece) || h("i", {}, "·"));
}

async function sample(number) {
  const one = await ask(`tenants/samples/${number}`);
  const tokens = one.pieces.map((piece, at) => token(piece, [`id ${one.ids[at]}`, `log-probability ${figure(one.logprobs[at])}`,
    `version ${one.versions[at]}`], `v${one.versions[at] % VERSIONS}`));
  const versions = [...new Set(one.versions)].sort((a, b) => a - b);
  return card(`Sequence ${one.name}`, h("p", {}, `Sampled by versions ${versions.join(", ")}; each version has its colour. Ended by ${one.stop}.`),
    h("div", { class: "tokens" }, h("span", { class: "t given" }, visible(one.prompt_text)), tokens));
}

async function trained(model) {
  const data = await ask(`tenants/trained/${encodeURIComponent(model)}`);
  const shown = data.map((one) => {
    const worth = one.advantages ?? one.weights;
    const tokens = one.pieces.map((piece, at) => {
      const facts = ["weights", "advantages", "logprobs"].filter((name) => one[name]).map((name) => `${name} ${[one[name][at]].flat().map(figure).join(" ")}`);
      const value = worth ? [worth[at]].flat()[0] : 1;
      return token(piece, [`target ${[one.targets[at]].flat().join(" ")}`, ...facts], value > 0 ? "u2" : value < 0 ? "d2" : "given");
    });
    return h("div", { class: "turn" }, h("p", {}, `request ${one.seq}, datum ${one.place}, ${one.loss}, ${one.status}`), h("div", { class: "tokens" }, tokens));
  });
  return card(`Trained by ${model}`, h("p", {}, "The targets of the last requests: of positive weight or advantage, of negative, of none."),
    shown.length ? shown : empty("The data of its requests are no longer kept: the model was copied to the disk after them."));
}

async function show(make) {
  try {
    put(detail, await make());
  } catch (error) {
    put(detail, trouble(error));
  }
  detail.scrollIntoView({ block: "nearest" });
}

async function refresh() {
  const line = document.getElementById("line");
  try {
    const found = await ask("tenants");
    if (isNew(found)) draw(found);
    line.textContent = "";
  } catch (error) {
    line.textContent = "not connected: figures stand still";
    if (error.status !== 0) put(lists, trouble(error));
  }
  setTimeout(refresh, EVERY_MS);
}

put(main, lists, detail);
refresh();
