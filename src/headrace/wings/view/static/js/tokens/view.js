// The tokens of one turn. Only blocks near the window of the screen exist as elements, and only their tokens are
// fetched: a turn of 32,000 tokens costs what a page of it costs.

import { h, oneLine, put, visible } from "../dom.js";
import { isNumber, number } from "../format.js";
import { rows, Tip } from "../charts/tip.js";
import { FROZEN, advantageOf, oldestVersion, teacherWords, versionWords } from "./paint.js";

const BLOCK = 256;
const WINDOW = 2048;
const PAGES = 24; // windows that are kept
const ROW_PX = 23.6;

export class TokenView {
  constructor({ turn, episode, load, detail }) {
    Object.assign(this, { turn, episode, load, detail });
    this.pages = new Map();
    this.at = -1;
    this.element = h("div", { class: "tokens", tabindex: turn.tokens ? 0 : null, role: "group",
      "aria-label": `${turn.tokens} tokens; arrow keys read them one by one` });
    this.said = h("p", { class: "hidden", "aria-live": "polite" });
    const rowsEach = Math.ceil((BLOCK * 4) / 90); // about 4 characters a token
    this.blocks = Array.from({ length: Math.ceil(turn.tokens / BLOCK) }, (_, index) => {
      const many = Math.min(BLOCK, turn.tokens - index * BLOCK);
      return h("div", { class: turn.tokens > BLOCK ? "block" : "block only", data: { index }, style: { minHeight: `${Math.ceil((rowsEach * many) / BLOCK) * ROW_PX}px` } });
    });
    put(this.element, this.blocks.length ? this.blocks : h("p", { class: "sub" }, "no token"), this.said);
    const holder = h("div", { style: { position: "relative" } }, this.element);
    this.element = holder;
    this.inner = holder.firstChild;
    this.tip = new Tip(holder, { below: true });
    this.watch = new IntersectionObserver((entries) => entries.forEach((entry) => this.#seen(entry)), { rootMargin: "900px 0px" });
    this.blocks.forEach((block) => this.watch.observe(block));
    this.inner.addEventListener("pointerover", (event) => this.#hover(event));
    this.inner.addEventListener("pointerleave", () => this.#leave());
    this.inner.addEventListener("keydown", (event) => this.#key(event));
    this.inner.addEventListener("blur", () => this.#leave());
  }

  paint(paint) {
    this.current = paint;
    for (const block of this.blocks) if (block.firstChild) this.#fill(block);
  }

  close() {
    this.watch.disconnect();
  }

  #page(token) {
    const first = Math.floor(token / WINDOW) * WINDOW;
    if (!this.pages.has(first)) {
      if (this.pages.size >= PAGES) this.pages.delete(this.pages.keys().next().value);
      this.pages.set(first, this.load(first, WINDOW).catch((error) => {
        this.pages.delete(first);
        throw error;
      }));
    }
    return this.pages.get(first);
  }

  #seen({ target, isIntersecting }) {
    target.dataset.near = isIntersecting ? "1" : "";
    if (isIntersecting) this.#fill(target);
    else if (target.firstChild) {
      target.style.minHeight = `${target.offsetHeight}px`;
      put(target);
    }
  }

  async #fill(block) {
    const first = Number(block.dataset.index) * BLOCK;
    let page;
    try {
      page = await this.#page(first);
    } catch (error) {
      put(block, h("span", { class: "at" }, ""), h("div", {}, visible(error.message)));
      return;
    }
    if (!block.dataset.near) return;
    const text = h("div", {});
    const from = first - page.first;
    const until = Math.min(from + BLOCK, page.text.length);
    for (let at = from; at < until; at += 1) text.append(this.#token(page, at));
    put(block, h("span", { class: "at", "aria-hidden": "true" }, String(first)), text);
    block.style.minHeight = "";
  }

  #token(page, at) {
    const sampled = page.version[at] !== -1;
    const paint = sampled && page.version[at] !== FROZEN ? this.current.of(page, at, this.turn) : "";
    const element = document.createElement("span");
    element.className = `t ${sampled ? paint : "given"}${page.first + at === this.at ? " hot" : ""}`;
    element.dataset.at = page.first + at;
    element.append(...pieces(page.text[at]));
    return element;
  }

  #hover(event) {
    const element = event.target.closest(".t");
    if (element) this.#tell(Number(element.dataset.at), element, false);
    else this.#leave();
  }

  async #tell(place, element, aloud) {
    const page = await this.#page(place);
    const at = place - page.first;
    if (at < 0 || at >= page.text.length) return;
    this.told = place;
    const box = this.element.getBoundingClientRect();
    const own = element.getClientRects()[0] ?? element.getBoundingClientRect();
    const facts = this.#facts(page, at, place);
    const show = (...more) => this.tip.show(own.left - box.left, own.top - box.top, h("b", { class: "text" }, quoted(page.text[at])), rows(facts), more);
    show();
    if (aloud) this.said.textContent = `${quoted(page.text[at])}: ${facts.map(([, words, value]) => `${words} ${value}`).join(", ")}`;
    if (!page.kept?.[at] && !this.turn.experts && !this.turn.teacher_entries) return;
    clearTimeout(this.waiting);
    this.waiting = setTimeout(async () => {
      const more = await this.detail(place).catch(() => null);
      if (more && this.told === place) show(...extra(more));
    }, 140);
  }

  #facts(page, at, place) {
    const version = page.version[at];
    const facts = [["", "token", `${place}, id ${page.id[at]}`]];
    if (version === -1) return facts;
    facts.push(["", "version", versionWords(version)]);
    if (isNumber(this.episode.step) && version !== FROZEN) facts.push(["", "age", String(this.episode.step - oldestVersion(version))]);
    const logprob = page.logprob[at];
    facts.push(["", "log μ", isNumber(logprob) ? `${number(logprob)} (μ = ${number(Math.exp(logprob))})` : "not finite: carries no loss"]);
    if (isNumber(page.gap?.[at])) facts.push(["", "log π − log μ", number(page.gap[at])]);
    if (page.entropy) facts.push(["", "entropy", `${number(page.entropy[at])} nats`]);
    if (page.kept) facts.push(["", "kept-set", page.kept[at] ? `${page.kept[at]} entries` : "all entries"]);
    if (page.rerouted) facts.push(["", "experts that differ when read again", page.rerouted[at] < 0 ? "not recorded" : String(page.rerouted[at])]);
    if (isNumber(page.teacher?.[at])) {
      const name = this.turn.teacher ? ` of ${oneLine(this.turn.teacher, 40)}` : "";
      facts.push(["", `log ν${name}`, `${number(page.teacher[at])} (ν = ${number(Math.exp(page.teacher[at]))})`]);
      if (isNumber(logprob)) facts.push(["", "log ν − log μ", number(page.teacher[at] - logprob)]);
      facts.push(["", "teacher's version", teacherWords(page.teacher_version[at])]);
    }
    const advantage = advantageOf(page, at, this.turn);
    if (isNumber(advantage)) facts.push(["", "advantage", `${number(advantage)}${page.teacher_adds ? `, of it ${number(page.teacher_adds[at])} by the teacher` : ""}`]);
    return facts;
  }

  #leave() {
    this.told = -1;
    clearTimeout(this.waiting);
    this.tip.hide();
  }

  async #key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (move === undefined || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    await this.reveal(this.at + move);
  }

  /** Bring a token onto the screen, mark it, and tell what is known of it. */
  async reveal(wanted) {
    if (!this.blocks.length) return;
    const place = Math.max(0, Math.min(this.turn.tokens - 1, wanted));
    this.inner.querySelector(".hot")?.classList.remove("hot");
    this.at = place;
    const block = this.blocks[Math.floor(place / BLOCK)];
    if (!block.firstChild) {
      block.scrollIntoView({ block: "center" });
      block.dataset.near = "1";
      await this.#fill(block);
    }
    const element = this.inner.querySelector(`[data-at="${place}"]`);
    element?.classList.add("hot");
    element?.scrollIntoView({ block: "nearest" });
    if (element) this.#tell(place, element, true);
  }
}

/** Text nodes of a token: ends of lines and tabs are marked, what could steer or hide is spelled out. */
function pieces(text) {
  if (text === "") return [h("i", {}, "·")];
  if (!/[\n\t]/.test(text)) return [visible(text)];
  return text.split(/([\n\t])/).filter(Boolean).flatMap((piece) => {
    if (piece === "\n") return [h("i", {}, "↵"), "\n"];
    return piece === "\t" ? [h("i", {}, "→"), "\t"] : [visible(piece)];
  });
}

function quoted(text) {
  return text === "" ? "a part of a character" : `“${oneLine(text, 80)}”`;
}

function extra({ kept, kept_more: more, experts, teacher }) {
  return [
    teacher?.length ? h("p", { class: "kept" }, `likeliest by the teacher: ${teacher.map(({ text, id, logprob }) => `${text === "" ? `⟨${id}⟩` : oneLine(text, 20)} ${number(Math.exp(logprob))}`).join(" ▏")}`) : null,
    kept ? h("p", { class: "kept" }, `drawn from: ${kept.map(({ text, id }) => (text === "" ? `⟨${id}⟩` : oneLine(text, 20))).join(" ▏")}${more ? ` and ${more} more` : ""}`) : null,
    experts ? h("p", { class: "kept" }, `experts by layer: ${experts.map((layer) => layer.join("+")).join(" ▏")}`) : null,
  ];
}
