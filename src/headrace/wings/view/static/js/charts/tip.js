// A small box beside the pointer.

import { h, put } from "../dom.js";

export class Tip {
  /** `below`: under the place that it tells of, where it does not cover what stands above. */
  constructor(host, { below = false } = {}) {
    this.below = below;
    this.box = h("div", { class: "tip", hidden: true });
    host.append(this.box);
    this.host = host;
  }

  /** Show `content` near (x, y) of the host, inside the window. */
  show(x, y, ...content) {
    put(this.box, ...content);
    this.box.hidden = false;
    const place = this.host.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.box;
    let left = x + 14;
    if (place.left + left + width > document.documentElement.clientWidth - 8) left = x - width - 14;
    left = Math.max(left, 8 - place.left);
    const [over, under] = [y - height - 12, y + 26];
    const fits = this.below ? place.top + under + height > document.documentElement.clientHeight - 8 : place.top + over >= 64;
    const top = fits ? over : under;
    this.box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }

  hide() {
    this.box.hidden = true;
  }
}

/** Rows of a tip: [colour or null, words, value]. */
export function rows(list) {
  return h("dl", {}, list.map(([tint, words, value]) => [
    h("dt", {}, tint ? h("span", { class: "key line", style: { background: tint } }) : null, words), h("dd", {}, value)]));
}
