// The turns of an episode as a graph: one row per turn, one column per branch, edges from parents to children.

import { h, oneLine, s } from "../dom.js";
import { count } from "../format.js";

const ROW = 46;
const COLUMN = 14;
const MOST_COLUMNS = 8;

export function turnGraph(turns, chosen) {
  const columns = columnsOf(turns);
  const wide = Math.min(MOST_COLUMNS, Math.max(...columns, 0) + 1) * COLUMN + 6;
  const x = (at) => 8 + Math.min(columns[at], MOST_COLUMNS - 1) * COLUMN;
  const y = (at) => at * ROW + ROW / 2;
  const drawing = s("svg", { width: wide, height: turns.length * ROW, "aria-hidden": "true" });
  turns.forEach((turn, at) => {
    if (turn.parent === null) return;
    const from = turn.parent;
    drawing.append(s("path", { d: `M${x(from)} ${y(from)}C${x(from)} ${y(from) + ROW * 0.6} ${x(at)} ${y(at) - ROW * 0.9} ${x(at)} ${y(at)}` }));
  });
  turns.forEach((turn, at) => drawing.append(s("circle", { cx: x(at), cy: y(at), r: 6, fill: shade(turn) })));
  return h("ol", {}, drawing, turns.map((turn) => h("li", {}, h("a", { href: `#turn-${turn.index}`, style: { marginLeft: `${wide}px` },
    onclick: (event) => { event.preventDefault(); chosen(turn); } },
  h("b", {}, oneLine(turn.author, 24) || "–"), h("small", {}, `${count(turn.tokens)} · ${oneLine(turn.preview.trim(), 40) || "empty"}`)))));
}

function shade(turn) {
  if (turn.failed) return "var(--red)";
  if (turn.untrained) return "var(--slate)";
  return turn.sampled ? "var(--blue)" : "var(--wait)";
}

/** A first child goes on in its parent's column; every other one opens a column of its own. */
function columnsOf(turns) {
  const continued = new Set();
  let opened = -1;
  const columns = [];
  for (const turn of turns) {
    if (turn.parent !== null && !continued.has(turn.parent)) {
      continued.add(turn.parent);
      columns.push(columns[turn.parent]);
    } else {
      opened += 1;
      columns.push(opened);
    }
  }
  return columns;
}
