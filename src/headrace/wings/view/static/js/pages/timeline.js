// What every lane did, when.

import { Lanes, legend } from "../charts/lanes.js";
import { query } from "../api.js";
import { h, put } from "../dom.js";
import { count, duration, percent, plain, plural } from "../format.js";
import { card, empty, notice, table } from "../parts.js";

export async function open(root, { ask, to }) {
  const asked = (from, until) => ask(`timeline?${query({ from, to: until, bins: Math.round(Math.max(300, root.clientWidth || 1000)) })}`);
  let whole = await ask("timeline?bins=900");
  const under = h("div", {});
  const about = h("p", { class: "sub" });
  const keys = h("div", {});
  let latest = 0;
  let following = true;
  const lanes = new Lanes({
    opened: (episode) => { location.hash = to("episodes", [episode]); },
    wanted: async (from, until) => {
      const mine = ++latest;
      following = Math.abs(until - lastStep(whole)) < 0.02 * (until - from) || until >= whole.extent[1] * 0.999;
      const data = await asked(from, until);
      if (mine === latest) show(data);
    },
  });
  const move = (share) => lanes.show(lanes.window[0] + share * (lanes.window[1] - lanes.window[0]), lanes.window[1] + share * (lanes.window[1] - lanes.window[0]));
  const buttons = h("div", { class: "bar" },
    h("button", { type: "button", onclick: () => lanes.zoom(0.5) }, "Zoom in"), h("button", { type: "button", onclick: () => lanes.zoom(2) }, "Zoom out"),
    h("button", { type: "button", onclick: () => move(-0.5) }, "← Earlier"), h("button", { type: "button", onclick: () => move(0.5) }, "Later →"),
    h("button", { type: "button", onclick: () => lanes.show(...whole.extent) }, "Whole run"),
    h("button", { type: "button", onclick: () => lanes.show(middle(whole) - steps(whole, 2.5), middle(whole) + steps(whole, 2.5)) }, "Five steps of the middle"),
    h("button", { type: "button", onclick: () => lanes.show(lastStep(whole) - steps(whole, 5), lastStep(whole)) }, "Last five steps"));

  function show(data) {
    lanes.draw(data, whole);
    put(about, `${duration(data.window[0])} to ${duration(data.window[1])} of ${duration(data.extent[1])} since the first rollout · ${plural(whole.spans, "span")} · drag to move, Ctrl + wheel or double click to zoom`);
    put(keys, legend(data.lanes));
    put(under, table([["lane", true], ["busy in this window", false], ["busy in training", false], ["spans in this window", false], ["", true]],
      data.lanes.map((lane) => [lane.lane, percent(lane.busy), percent(lane.busy_overall), count(lane.parts.reduce((sum, part) => sum + part.count, 0)),
        lane.parts.map((part) => `${plain(part.name)} ${count(part.count)}`).join(", ")]), "lanes"));
  }

  async function refresh() {
    whole = await ask("timeline?bins=900");
    if (!whole.lanes.length) return;
    if (!lanes.window) first();
    const length = lanes.window[1] - lanes.window[0];
    if (following) lanes.window = length >= whole.extent[1] * 0.7 ? [...whole.extent] : [Math.max(0, lastStep(whole) - length), lastStep(whole)];
    show(await asked(...lanes.window));
  }

  function first() {
    put(root, h("h1", {}, "Timeline"), about, buttons, h("div", { class: "card" }, lanes.element, keys), card("Lanes", under));
    lanes.window = [Math.max(0, lastStep(whole) - steps(whole, 8)), lastStep(whole)];
    following = true;
  }

  if (whole.lanes.length) first();
  else put(root, h("h1", {}, "Timeline"), notice("Colour is work; where a lane is blank or grey, it stood idle."), empty("No trace yet."));
  return { refresh, shown: async () => { if (lanes.window) show(await asked(...lanes.window)); } };
}

/** When the last step ended. */
function lastStep({ steps: marks, extent }) {
  return marks.at(-1)?.at ?? extent[1];
}

/** Half of the time between the first step's end and the last's. */
function middle({ steps: marks, extent }) {
  return marks.length ? (marks[0].at + marks.at(-1).at) / 2 : extent[1] / 2;
}

/** About how long the last few steps took. */
function steps({ steps: marks, extent }, wanted) {
  if (marks.length < 2) return extent[1];
  const each = (marks.at(-1).at - marks[0].at) / Math.max(1, marks.at(-1).step - marks[0].step);
  return Math.min(extent[1], Math.max(0.01, each * wanted));
}
