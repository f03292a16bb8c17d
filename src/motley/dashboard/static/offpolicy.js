// How far the senders are from those who learn from them, by pair.
import { ratioHistogram } from "./bars.js";
import { colour, lines } from "./charts.js";
import { choice, el, roundsField, table } from "./dom.js";
import { change, go, link, redraw } from "./route.js";
import { num } from "./words.js";

const NUMBERS = {
  kl_k3: "KL (k3), nats per token", ess: "effective sample size", age: "age in versions",
  filtered_negative: "filtered share of A ≤ 0", filtered_positive: "filtered share of A > 0",
  "weight.mean": "mean weight", "ratio.q95": "ratio, 95 % quantile",
};
const MOST_POINTS = 3200; // of all pairs together, of which the newest is shown

export async function offpolicyView({ run, params }) {
  const crew = await run.crew();
  const names = crew.peers.map((peer) => peer.name);
  const number = params.number || "kl_k3";
  const pairs = Math.max(1, crew.arrows.length);
  const points = Math.max(8, Math.min(300, Math.floor(MOST_POINTS / pairs)));
  const pair = pairOf(crew, params);
  const [everyones, its, counted] = await Promise.all([
    run.curves([`senders.${number}`], { points, rounds: params.rounds }),
    pair && run.curves([`senders.${number}`], { rounds: params.rounds, peer: pair.learner }),
    pair && countsOf(run, pair, params.rounds),
  ]);
  const known = [...new Set([...Object.keys(NUMBERS), ...crew.keys.filter((key) => key.startsWith("senders.")).map((key) => key.slice(8))])];
  return el("div", { class: "stack" },
    el("section", { class: "panel", "aria-labelledby": "pairs-title" },
      el("div", { class: "tools" }, el("h2", { id: "pairs-title" }, "Pairs"),
        choice("number", "number", known.map((key) => [key, NUMBERS[key] ?? key]), number, (value) => change({ number: value })),
        roundsField(params.rounds, (value) => change({ rounds: value })),
        el("p", { class: "note" }, "The newest value of each pair. A pair opens its curve and its histogram.")),
      matrix(names, everyones, number, pair, params.rounds)),
    el("div", { class: "columns" }, pair && curve(its, number, pair, names), pair && histogram(pair, counted)));
}

/** The asked pair; else the stranger that somebody learned most from. */
function pairOf(crew, params) {
  if (params.learner && params.sender) return { learner: params.learner, sender: params.sender };
  const sizes = (arrow) => (arrow.sender === arrow.learner ? -1 : arrow.share);
  const best = [...crew.arrows].sort((a, b) => sizes(b) - sizes(a))[0];
  return best ? { learner: best.learner, sender: best.sender } : null;
}

const newest = (points) => points.findLast(([, value]) => value !== null)?.[1] ?? null;

function matrix(names, curves, number, pair, rounds) {
  const values = new Map(curves.map((curve) => [`${curve.sender}>${curve.peer}`, newest(curve.points)]));
  const learners = names.filter((name) => curves.some((curve) => curve.peer === name));
  if (!learners.length) return el("p", { class: "empty" }, "Nothing is recorded yet.");
  const largest = Math.max(...[...values.values()].map((value) => Math.abs(value ?? 0)), 1e-12);
  return table("Newest value by learner and sender", ["learner \\ sender", ...names], learners.map((learner) =>
    el("tr", {}, el("th", { scope: "row" }, learner), names.map((sender) => {
      const key = `${sender}>${learner}`;
      const value = values.get(key);
      if (value === undefined) return el("td", {}, "");
      const isHere = pair.learner === learner && pair.sender === sender;
      return el("td", { class: "num cell", style: { "--tint": `${Math.round((Math.abs(value ?? 0) / largest) * 55)}%` } },
        el("a", {
          class: "target", href: link("offpolicy", { learner, sender, number, rounds }), "data-pair": key,
          "aria-current": isHere ? "true" : null, "aria-label": `${learner} from ${sender}: ${num(value)}`,
        }, num(value)));
    }))), { id: "matrix" });
}

function curve(curves, number, pair, names) {
  const one = curves.filter((curve) => curve.peer === pair.learner && curve.sender === pair.sender);
  const own = curves.filter((curve) => curve.peer === pair.learner && curve.sender === pair.learner && pair.sender !== pair.learner);
  const series = [...one, ...own].map((curve) => ({
    name: curve.sender === pair.learner ? `${curve.sender}'s own` : `${curve.sender} for ${curve.peer}`,
    peer: curve.peer, sender: curve.sender, points: curve.points, dashed: curve.sender === pair.learner && own.length > 0,
    colour: colour(Math.max(0, names.indexOf(curve.sender))),
  }));
  return lines({
    id: "pair", title: `${NUMBERS[number] ?? number}: ${pair.learner} learns from ${pair.sender}`, series, zero: true,
    onPick: (mark) => go("rollouts", { learner: mark.peer, sender: mark.sender, rounds: `${mark.round}..${mark.round}` }),
  });
}

/** What is counted so far. The server counts for a moment at a time, and remembers: who looks at
 * a part is shown more as soon as there is more. */
async function countsOf(run, pair, rounds) {
  const query = { ...pair, rounds };
  const find = ({ histograms }) => histograms.find((each) => each.learner === pair.learner && each.sender === pair.sender);
  const one = find(await run.ask("histograms", query));
  const isMore = (again) => again && again.left < one.left;
  if (one?.left) run.askAnew("histograms", query).then((again) => isMore(find(again)) && redraw(), () => {});
  return one;
}

function histogram(pair, one) {
  if (!one || !one.num_tokens) {
    return el("section", { class: "panel", id: "no-histogram" },
      el("p", { class: "empty" }, `No tokens of ${pair.sender} are traced for ${pair.learner}: traces are kept of some rounds only.`));
  }
  return ratioHistogram({
    id: "ratios", title: `Ratios before and after truncation, ${num(one.num_tokens)} tokens`, histogram: one,
    above: el("span", { class: "note" }, `Of traced rounds from ${num(one.rounds[0])} to ${num(one.rounds[1])}${one.left ? `, without ${num(one.left)} that are not counted yet` : ""}. The bar at 0 has tokens that were filtered, clipped or withheld.`),
  });
}
