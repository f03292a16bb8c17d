// Who learns from whom: peers on a circle, arrows as wide as their share of what was learned,
// and a ring around each peer for the share of its own rollouts.
import { asTable, colour } from "./charts.js";
import { el, roundsField, svg } from "./dom.js";
import { change, link } from "./route.js";
import { num, percent } from "./words.js";

/** Drawn for the width it is shown at. On a phone the names of a few peers stand below them, to
 * have a larger circle; those of many would cover each other there, and stand beside. */
function sheet(count) {
  const room = document.documentElement.clientWidth - 44;
  const isNarrow = room < 480;
  const isBelow = isNarrow && count <= 8;
  const margin = isBelow ? 48 : isNarrow ? 78 : 62;
  return { width: isNarrow ? room : 520, height: isNarrow ? room : 420, margin, isBelow, letters: isNarrow ? 8 : 12 };
}

const CROWDED = 30; // arrows: beyond it only those of the peer or arrow pointed at stand out

export function drawArrows(crew, rounds) {
  const names = crew.peers.map((peer) => peer.name);
  const radius = names.length > 12 ? 11 : names.length > 8 ? 15 : 24;
  const paper = sheet(names.length);
  const places = new Map(names.map((name, index) => [name, placeOf(index, names.length, paper)]));
  const foreign = crew.arrows.filter((arrow) =>
    arrow.sender !== arrow.learner && arrow.share > 0 && places.has(arrow.sender) && places.has(arrow.learner));
  const own = new Map(crew.arrows.filter((arrow) => arrow.sender === arrow.learner)
    .map((arrow) => [arrow.learner, arrow]));
  const drawing = svg("svg", {
    viewBox: `0 0 ${paper.width} ${paper.height}`,
    class: foreign.length > CROWDED ? "crew-arrows crowded" : "crew-arrows", role: "group",
    "aria-label": "Who learns from whom. Arrow keys go from arrow to arrow, Enter opens one.",
    onkeydown: walk,
  },
    foreign.map((arrow, index) => drawArrow(arrow, places, radius, index, foreign.length > CROWDED)),
    names.map((name, index) => drawPeer(cut(name, paper.letters), name, index, places.get(name), radius, own.get(name))));
  return el("section", { "aria-labelledby": "arrows-title", class: "panel" },
    el("div", { class: "tools" }, el("h2", { id: "arrows-title" }, "Who learns from whom"),
      roundsField(rounds, (value) => change({ rounds: value }))),
    drawing,
    el("p", { class: "readout", id: "arrow-readout", "aria-live": "polite", "data-keep": true },
      "An arrow is as wide as the share of the learner's steps that came from the sender; a ring is the peer's own share."),
    asTable("arrows", "Who learned from whom", () => tableOf(crew)));
}

function placeOf(index, count, { width, height, margin, isBelow }) {
  const angle = (index / count) * 2 * Math.PI - Math.PI / 2;
  const far = count === 1 ? 0 : height / 2 - margin;
  const [x, y] = [width / 2 + far * Math.cos(angle), height / 2 + far * Math.sin(angle)];
  return { x, y, angle: isBelow ? Math.PI / 2 : angle };
}

const whole = (share) => Math.round(100 * share);
const wordsOf = (arrow) =>
  `${arrow.learner} learns from ${arrow.sender}: ${whole(arrow.share)} % of its steps, ` +
  `${num(arrow.sequences)} rollouts, mean weight ${num(arrow.weight)}`;

function say(event, arrow) {
  event.currentTarget.closest("section").querySelector(".readout").textContent = wordsOf(arrow);
}

/** Of a peer: its own share in words, and the arrows to it stand out. */
function light(event, name, own) {
  if (own) say(event, own);
  for (const arrow of event.currentTarget.closest("svg").querySelectorAll("[data-arrow]")) {
    arrow.classList.toggle("lit", arrow.dataset.arrow.endsWith(`>${name}`));
  }
}

function drawArrow(arrow, places, radius, index, isCrowded) {
  const from = places.get(arrow.sender);
  const to = places.get(arrow.learner);
  const length = Math.hypot(to.x - from.x, to.y - from.y);
  const [ux, uy] = [(to.x - from.x) / length, (to.y - from.y) / length];
  const width = 1.5 + 16 * Math.min(1, arrow.share);
  const bend = 14 + length * 0.06; // to one side, so that both directions are seen
  const start = { x: from.x + ux * (radius + 4) - uy * 8, y: from.y + uy * (radius + 4) + ux * 8 };
  const head = width + (isCrowded ? 3 : 5);
  const tip = { x: to.x - ux * (radius + 7) - uy * 8, y: to.y - uy * (radius + 7) + ux * 8 };
  const neck = { x: tip.x - ux * head, y: tip.y - uy * head };
  const knee = { x: (start.x + neck.x) / 2 - uy * bend, y: (start.y + neck.y) / 2 + ux * bend };
  const middle = { x: (start.x + 2 * knee.x + neck.x) / 4, y: (start.y + 2 * knee.y + neck.y) / 4 };
  const path = `M${pair(start)}Q${pair(knee)} ${pair(neck)}`;
  const wing = head * 0.75;
  const triangle = [tip, { x: neck.x - uy * wing, y: neck.y + ux * wing }, { x: neck.x + uy * wing, y: neck.y - ux * wing }];
  return svg("a", {
    href: link("offpolicy", { learner: arrow.learner, sender: arrow.sender }),
    class: "arrow", "data-arrow": `${arrow.sender}>${arrow.learner}`,
    "data-key": `${arrow.sender}>${arrow.learner}`, tabindex: index ? "-1" : "0",
    "aria-label": `${wordsOf(arrow)}. Opens off-policy.`,
    onpointerenter: (event) => say(event, arrow),
    onfocus: (event) => say(event, arrow),
  },
    svg("path", { class: "reach", d: path }),
    svg("path", { class: "shaft", d: path, "stroke-width": width }),
    svg("polygon", { points: triangle.map(pair).join(" ") }),
    !isCrowded && svg("circle", { class: "knob", cx: middle.x, cy: middle.y, r: 14 }),
    !isCrowded && svg("text", { class: "tick mid", x: middle.x, y: middle.y + 4 }, whole(arrow.share)));
}

const pair = (point) => `${point.x.toFixed(1)} ${point.y.toFixed(1)}`;

const cut = (name, letters) => (name.length > letters ? `${name.slice(0, letters - 1)}…` : name);

function drawPeer(shown, name, index, place, radius, own) {
  const round = 2 * Math.PI * (radius + 3);
  const share = own?.share ?? 0;
  const outward = radius + 16;
  const label = { x: place.x + outward * Math.cos(place.angle), y: place.y + outward * Math.sin(place.angle) };
  const side = Math.cos(place.angle);
  // The words stand beside the link, not in it: its label says more than they do.
  return svg("g", { class: `peer ${colour(index)}`, "data-key": `peer-${name}` },
    svg("a", {
      href: link("rollouts", { sender: name }), "data-peer": name,
      "aria-label": own ? `${wordsOf(own)}. Opens its rollouts.` : `${name}. Opens its rollouts.`,
      onpointerenter: (event) => light(event, name, own), onfocus: (event) => light(event, name, own),
    },
      svg("circle", { class: "disc", cx: place.x, cy: place.y, r: radius }),
      svg("circle", { class: "ring0", cx: place.x, cy: place.y, r: radius + 3 }),
      svg("circle", {
        class: "ring", cx: place.x, cy: place.y, r: radius + 3,
        "stroke-dasharray": `${share * round} ${round}`, transform: `rotate(-90 ${place.x} ${place.y})`,
      })),
    svg("text", { class: "mid share", x: place.x, y: place.y + 4 }, own ? whole(share) : ""),
    svg("text", {
      class: `name ${side > 0.3 ? "" : side < -0.3 ? "end" : "mid"}`, x: label.x, y: label.y + 5,
    }, shown));
}

function walk(event) {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const arrows = [...event.currentTarget.querySelectorAll("[data-arrow]")];
  const at = arrows.indexOf(document.activeElement);
  if (!by || at < 0) return;
  event.preventDefault();
  arrows[at].setAttribute("tabindex", "-1");
  const next = arrows[(at + by + arrows.length) % arrows.length];
  next.setAttribute("tabindex", "0");
  next.focus();
}

const tableOf = (crew) => ({
  heads: ["learner", "sender", "share", "rollouts", "mean weight"],
  body: crew.arrows.map(({ learner, sender, share, sequences, weight }) => [
    learner, el("a", { href: link("offpolicy", { learner, sender }) }, sender),
    percent(share), num(sequences), num(weight),
  ]),
});
