// One episode: what it earned, its siblings, the graph of its turns, and every token.

import { h, oneLine, put, visible } from "../dom.js";
import { count, isNumber, number, plain, plural } from "../format.js";
import { card, cards, fate, notice, segments } from "../parts.js";
import { paints, scaleOf } from "../tokens/paint.js";
import { TokenView } from "../tokens/view.js";
import { turnGraph } from "../tokens/graph.js";

export async function openEpisode(root, { ask, to, more, filters }) {
  const [key] = more;
  const episode = await ask(`episodes/${encodeURIComponent(key)}`);
  const choices = paints(episode);
  const views = [];
  const scale = h("div", { class: "scale" });
  let current = choices.find((each) => each.name === filters.by && !each.missing) ?? choices.find((each) => !each.missing);
  const paint = (name) => {
    current = choices.find((each) => each.name === name);
    put(scale, scaleOf(current));
    for (const view of views) view.paint(current);
    history.replaceState(null, "", to("episodes", [key], { ...filters, by: name }));
  };
  const turns = episode.turns.map((turn) => {
    const view = new TokenView({ turn, episode, load: (from, many) => ask(`episodes/${key}/turns/${turn.index}?from=${from}&count=${many}`),
      detail: (place) => ask(`episodes/${key}/turns/${turn.index}/${place}`) });
    view.paint(current);
    views.push(view);
    return section(turn, view);
  });
  put(scale, scaleOf(current));
  put(root, head(episode, to, filters), siblings(episode, to, filters),
    episode.words_problem ? notice(episode.words_problem) : null,
    h("div", { class: "episode" }, h("nav", { class: "card graph", "aria-label": "turns" }, turnGraph(episode.turns, (turn) => {
      const target = document.getElementById(`turn-${turn.index}`);
      target.scrollIntoView({ behavior: "smooth", block: "start" });
      target.focus({ preventScroll: true });
    })),
    h("div", {}, h("div", { class: "painter" }, h("span", { class: "sub", style: { margin: "0" } }, "Colour by"),
      segments("colour tokens by", choices.map((each) => [each.name, each.words, each.missing || each.what, Boolean(each.missing)]), current.name, paint), scale), turns)));
  const wanted = views[Number(filters.turn ?? -1)];
  return { close: () => views.forEach((view) => view.close()), shown: () => wanted?.reveal(Number(filters.at) || 0) };
}

function head(episode, to, filters) {
  const advantage = episode.turns.map((turn) => turn.advantage).find(isNumber);
  const { by, turn, at, ...back } = filters;
  return [
    h("p", { class: "sub", style: { margin: "0 0 4px" } }, h("a", { href: to("episodes", [], back) }, "← all episodes")),
    h("h1", {}, `Episode ${episode.key} `, fate(episode)),
    h("p", { class: "sub" }, `group ${count(episode.group)}, attempt ${episode.place + 1} of ${episode.siblings.length} at row ${count(episode.row)}${episode.cause ? ` · ${visible(episode.cause)}` : ""}`),
    cards([
      ["Reward", number(episode.reward), Object.entries({ ...episode.parts, ...episode.agent_rewards }).map(([name, value]) => `${visible(name)} ${number(value)}`).join(", ")],
      ["Advantage", isNumber(advantage) ? number(advantage) : "–", isNumber(advantage) ? `from the rewards of its step${episode.turns.some((turn) => turn.teacher_adds) ? "; its teacher adds to each token" : ""}` : episode.advantage_why],
      ["Sampled tokens", count(episode.tokens), `in ${plural(episode.turns.filter((turn) => turn.stop_reason).length, "turn")}`],
      ["Trained in step", episode.step === null ? "–" : count(episode.step + 1), isNumber(episode.age) ? `oldest token of age ${episode.age}` : ""],
    ]),
  ];
}

function siblings(episode, to, filters) {
  if (episode.siblings.length < 2) return null;
  return h("nav", { "aria-label": "other attempts of the group" }, h("ul", { class: "siblings" }, episode.siblings.map((each) => h("li", {},
    h("a", { href: to("episodes", [each.key], { by: filters.by }), "aria-current": each.key === episode.key ? "page" : null }, `${each.key} · ${number(each.reward)}`)))));
}

function section(turn, view) {
  const facts = [
    `${plural(turn.tokens, "token")}${turn.sampled && turn.sampled !== turn.tokens ? `, ${count(turn.sampled)} sampled` : ""}`,
    turn.versions ? `version ${turn.versions[0] === turn.versions[1] ? turn.versions[0] : turn.versions.join(" to ")}` : null,
    turn.stop_reason ? `ended by ${plain(turn.stop_reason)}` : null,
    isNumber(turn.reward) ? `reward ${number(turn.reward)}` : null,
    isNumber(turn.process) ? `process reward ${number(turn.process)}` : null,
    turn.branch ? `branch ${turn.branch[1] + 1} of pivot ${turn.branch[0] + 1}${isNumber(turn.branch[2]) ? `, reward ${number(turn.branch[2])}` : ""}` : null,
    ...Object.entries(turn.extra ?? {}).map(([name, value]) => `${oneLine(name, 40)}: ${oneLine(String(value), 120)}`),
    turn.failed ? "a tool's error" : null,
    turn.teacher ? `taught by ${oneLine(turn.teacher, 40)}` : null,
    turn.untrained ? `carries no loss: ${plain(visible(turn.untrained))}` : null,
    turn.mixed ? `${count(turn.mixed)} of mixed versions` : null,
    isNumber(turn.rerouted) && turn.rerouted > 0 ? `${plural(turn.rerouted, "token was", "tokens were")} routed otherwise when read again` : null,
  ];
  return h("section", { class: "card turn", id: `turn-${turn.index}`, tabindex: -1, "aria-label": `turn ${turn.index + 1} by ${oneLine(turn.author, 40)}` },
    h("header", {}, h("h2", { style: { margin: "0" } }, oneLine(turn.author, 60) || "–"), h("span", { class: "faint" }, facts.filter(Boolean).join(" · "))), view.element);
}
