// Builds elements and brings a shown tree up to date. Whatever a peer wrote goes in as text:
// no function here, and none on the page, reads markup.

const SVG = "http://www.w3.org/2000/svg";
// Handlers are properties rather than listeners, so that `morph` can carry them over.
const HANDLERS = [
  "onclick", "onchange", "oninput", "onsubmit", "onkeydown", "onfocus", "onblur", "ontoggle",
  "onpointermove", "onpointerleave", "onpointerenter",
];

/** An element: attributes by name, handlers by "on...", `style` as an object; children are
 * nodes, texts, numbers, or lists of them. null, undefined and false are left out. */
export const el = (tag, attrs, ...children) =>
  fill(document.createElement(tag), attrs, children);

/** The same of SVG. */
export const svg = (tag, attrs, ...children) =>
  fill(document.createElementNS(SVG, tag), attrs, children);

function fill(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node[name] = value;
    else if (name === "style") {
      for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    } else if (name === "value" && node.tagName !== "OPTION") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(3).filter(isShown).map(asNode));
  return node;
}

const isShown = (child) => child !== null && child !== undefined && child !== false;
const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));
const keyOf = (node) =>
  node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") || node.id || "" : "";

/** What is large and already shown: a stand-in, which `morph` takes for it; else made anew. `key`
 * must say all that it depends on. */
export function unlessShown(key, make) {
  const shown = document.querySelector(`[data-same="${CSS.escape(key)}"]`);
  const node = shown ? document.createElement(shown.tagName) : make();
  node.setAttribute("data-same", key);
  return node;
}

/** Make `old` look like `fresh` and keep its nodes, so that scroll, focus, selection and what
 * somebody types survive a new round. Children with an id or data-key are matched by it. What
 * has data-keep is left as it is: a handler writes there. */
export function morph(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  const same = fresh.getAttribute("data-same");
  if (same !== null && same === old.getAttribute("data-same")) return;
  for (const name of HANDLERS) {
    if (old[name] !== fresh[name] && (old[name] || fresh[name])) old[name] = fresh[name];
  }
  if (old.hasAttribute("data-keep")) return;
  // A select's value is one of its options, which may move from the fresh one to the old: so it
  // is read before, and set behind them.
  const { value } = fresh;
  morphAttributes(old, fresh);
  morphChildren(old, fresh);
  if (value !== undefined && old !== document.activeElement && old.value !== value) old.value = value;
}

function morphAttributes(old, fresh) {
  // Whether details are open is the reader's choice.
  const isOurs = (name) => name !== "style" && !(name === "open" && old.tagName === "DETAILS");
  for (const { name } of [...old.attributes]) {
    if (isOurs(name) && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (isOurs(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  // Not by setAttribute: the page's policy forbids style attributes, and allows this.
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
}

function morphChildren(old, fresh) {
  const wanted = new Set([...fresh.children].map(keyOf).filter(Boolean));
  const keyed = new Map();
  for (const child of [...old.children]) {
    const key = keyOf(child);
    // What went away is removed first: then nothing that stays has to move and lose its focus.
    if (key && !wanted.has(key)) child.remove();
    else if (key) keyed.set(key, child);
  }
  let at = old.firstChild;
  for (const want of [...fresh.childNodes]) {
    const key = keyOf(want);
    const match = key ? keyed.get(key) : at && !keyOf(at) ? at : null;
    if (match && match.nodeName === want.nodeName) {
      if (match === at) at = at.nextSibling;
      else old.insertBefore(match, at);
      morph(match, want);
    } else old.insertBefore(want, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

/** A table in a box of its own, which scrolls where the window is narrow. */
export function table(caption, heads, rows, attrs = {}) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, ...attrs },
    el("table", {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows)));
}

/** A field for a range of rounds, which goes to the address. */
export const roundsField = (value, onpick) =>
  el("label", { for: "rounds", class: "field" }, el("span", {}, "rounds"),
    el("input", {
      id: "rounds", type: "text", size: "9", placeholder: "all, or 3..7", value: value ?? "",
      onchange: (event) => onpick(event.currentTarget.value.trim()),
    }));

/** A labelled select; options are [value, text]. */
export const choice = (id, label, options, value, onpick) =>
  el("label", { for: id, class: "field" }, el("span", {}, label),
    el("select", { id, onchange: (event) => onpick(event.currentTarget.value) },
      options.map(([key, text]) => el("option", { value: key, selected: key === value }, text))));
