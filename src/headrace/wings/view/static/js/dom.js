// Elements from data. Text only ever becomes text nodes: nothing that a model wrote can be markup here.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element: attributes, `on...` listeners, `class`, `data`, and children (text, elements, null, lists). */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, the same way. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...nodes(children));
  return element;
}

function nodes(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== "");
}

/** Put `children` in the place of whatever `element` holds. */
export function put(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

/** A colour of the theme, for SVG attributes and canvases. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Text as it is, but for characters that could steer a terminal, a line's direction or hide: those are spelled out. */
export function visible(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Cs}\p{Zl}\p{Zp}]/gu, (found) => {
    if (found === "\n" || found === "\t") return found;
    return `⟨U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** On one line, not longer than `limit`. */
export function oneLine(text, limit = 200) {
  const line = visible(String(text).slice(0, limit + 1)).replaceAll("\n", "↵").replaceAll("\t", "→");
  return line.length > limit ? `${line.slice(0, limit)}…` : line;
}
