// The first view: who is here, who learns from whom, and how well it goes.
import { drawArrows } from "./arrows.js";
import { colour, lines } from "./charts.js";
import { choice, el } from "./dom.js";
import { change, go, link } from "./route.js";
import { ago, duration, num, score, short } from "./words.js";

export async function crewView({ run, params }) {
  const keys = keysOf(params);
  const [crew, found] = await Promise.all([
    run.crew(params.rounds), run.curves([keys.number, keys.held], { rounds: params.rounds }),
  ]);
  return el("div", { class: "stack" },
    summary(crew), warnings(crew), notes(crew),
    el("div", { class: "columns three" }, curves(crew, found, params, keys), drawArrows(crew, params.rounds)),
    cards(crew));
}

function summary(crew) {
  const done = crew.rounds ? Math.min(1, crew.round / crew.rounds) : 0;
  const left = crew.is_over ? "over" : crew.left_s === null ? "not known yet" : `about ${duration(crew.left_s)}`;
  const pairs = [
    ["Round", `${num(crew.round)} of ${num(crew.rounds)}`], ["Time left", left],
    ["A round takes", duration1(crew.seconds)], ["Task", crew.task],
    ["Objective", crew.objective], ["Pace", crew.pace],
  ];
  return el("section", { class: "panel", "aria-label": "Progress" },
    el("progress", { max: "1", value: done, "aria-label": `${Math.round(100 * done)} % of the rounds` }),
    el("dl", { class: "facts" },
      pairs.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)))),
    crew.indexed < 1 && el("p", { class: "note" },
      `${Math.round(100 * crew.indexed)} % of the run's files are looked at so far; numbers will still change.`));
}

const duration1 = (seconds) => (seconds !== null && seconds < 10 ? `${num(seconds)} s` : duration(seconds));

function warnings(crew) {
  if (!crew.warnings.length) return null;
  return el("section", { class: "panel warned", "aria-labelledby": "warnings-title", id: "warnings" },
    el("h2", { id: "warnings-title" }, `Warnings of the run (${crew.warnings.length})`),
    el("ul", {}, crew.warnings.map((warned) => el("li", { "data-warning": warned.sign },
      el("strong", {}, warned.sign), ` · ${warned.peer}, round ${num(warned.round)}: ${warned.words}`))));
}

function notes(crew) {
  return crew.notes.length ? el("ul", { class: "note", id: "notes" }, crew.notes.map((note) => el("li", {}, note))) : null;
}

/** The two numbers whose curves are shown. */
function keysOf({ kind = "", number = "" }) {
  const held = /^ood(\.|$)/.test(kind) ? kind : kind ? `heldout.${kind}` : "heldout";
  return { held, number: number || "reward" };
}

function curves(crew, found, params, { held, number }) {
  const index = new Map(crew.peers.map((peer, at) => [peer.name, at]));
  const seriesOf = (key) => found.filter((curve) => curve.key === key).map((curve) => ({
    name: curve.is_alone ? `${curve.peer}, alone` : curve.peer, peer: curve.peer, sender: "",
    colour: colour(index.get(curve.peer) ?? 9), dashed: curve.is_alone, points: curve.points,
  }));
  const isAccuracy = crew.measure === "accuracy";
  const text = (value) => score(value, crew.measure);
  const onPick = (mark) => go("rollouts", { sender: mark.peer, rounds: `${mark.round}..${mark.round}` });
  const isReward = number === "reward";
  return [
    lines({
      id: "heldout", title: isAccuracy ? "Held-out accuracy" : "Held-out reward", series: seriesOf(held),
      yText: text, whole: isAccuracy, columns: 3, onPick,
      above: choice("kind", "kind", kindsOf(crew), params.kind ?? "", (value) => change({ kind: value })),
    }),
    lines({
      id: "number", title: isReward ? "Reward of own samples" : number, series: seriesOf(number),
      yText: isReward ? text : num, whole: isReward && isAccuracy, columns: 3, onPick,
      above: choice("number", "number", numbersOf(crew), number, (value) => change({ number: value })),
    }),
  ];
}

function kindsOf(crew) {
  const ood = crew.keys.filter((key) => key === "ood" || key.startsWith("ood."));
  return [["", "all kinds"], ...crew.kinds.map((kind) => [kind, kind]),
    ...ood.map((key) => [key, key === "ood" ? "outside of training" : `outside of training: ${key.slice(4)}`])];
}

const numbersOf = (crew) => {
  const plain = crew.keys.filter((key) => !/^(senders|heldout|ood|timing)\b/.test(key));
  return [...new Set(["reward", ...plain])].map((key) => [key, key]);
};

function cards(crew) {
  return el("section", { "aria-labelledby": "peers-title" },
    el("h2", { id: "peers-title" }, `Peers (${crew.peers.length})`),
    el("div", { class: "cards" }, crew.peers.map((peer, index) => card(peer, index, crew))));
}

function card(peer, index, crew) {
  const facts = [
    ["Model", peer.model], ["Parameters", peer.size === null ? "not known" : short(peer.size)],
    ["Trains", peer.adapter], ["Vocabulary", peer.vocabulary ?? "not known"], ["Device", peer.device || "not known"],
    ["Version", num(peer.version)], ["Round", num(peer.round)],
    ["Reward", score(peer.reward, crew.measure)],
    ...Object.entries(peer.heldout).map(([kind, value]) => [`Held-out ${kind}`, score(value, crew.measure)]),
  ];
  return el("article", { class: `card ${colour(index)}`, "data-peer": peer.name, "data-key": peer.name },
    el("h3", {}, el("span", { class: "swatch", "aria-hidden": "true" }), peer.name,
      el("small", {}, peer.follows ? `${peer.role} of ${peer.follows}` : peer.role)),
    el("p", { class: "seen" }, "last seen ",
      el("time", { "data-seen": peer.last_seen_s ?? "" }, ago(peer.last_seen_s))),
    el("dl", {}, facts.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)))),
    el("p", { class: "links" },
      el("a", { href: link("rollouts", { sender: peer.name }) }, "its rollouts"),
      peer.role !== "sampler" && el("a", { href: link("discarded", { learner: peer.name }) }, "what it discarded")));
}
