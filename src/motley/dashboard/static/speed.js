// Where the time goes, and what the log costs.
import { stacked } from "./bars.js";
import { colour, lines } from "./charts.js";
import { choice, el, table } from "./dom.js";
import { change } from "./route.js";
import { bytes, num } from "./words.js";

const PHASES = ["timing.sample_s", "timing.reward_s", "timing.learn_s", "timing.overlap_s"];
const RATES = {
  "timing.sampled_tokens_per_s": "Sampled tokens per second",
  "timing.learned_tokens_per_s": "Learned tokens per second",
  waiting: "Admitted groups that no step has taken yet",
  behind: "Versions that samplers are behind",
};

export async function speedView({ run, params }) {
  const crew = await run.crew();
  const keys = [...PHASES, ...Object.keys(RATES)].filter((key) => crew.keys.includes(key));
  const [speed, curves] = await Promise.all([
    run.ask("speed"), keys.length ? run.curves(keys, { points: 75, rounds: params.rounds }) : [],
  ]);
  const names = crew.peers.map((peer) => peer.name);
  const peer = params.peer || names[0] || "";
  const pick = choice("peer", "peer", names.map((name) => [name, name]), peer, (value) => change({ peer: value }));
  return el("div", { class: "stack" },
    el("div", { class: "columns" },
      stacked({ id: `phases-${peer}`, title: "Seconds by phase", parts: phases(curves, peer), yText: (value) => `${num(value)} s`, above: pick }),
      Object.entries(RATES).filter(([key]) => keys.includes(key)).map(([key, title]) => lines({
        id: key, title, zero: true,
        series: curves.filter((curve) => curve.key === key && curve.points.some(([, value]) => value !== null)).map((curve) => ({
          name: curve.peer, peer: curve.peer, sender: "", points: curve.points,
          colour: colour(Math.max(0, names.indexOf(curve.peer))), dashed: false,
        })),
      }))),
    wires(speed, names));
}

/** Phases of one peer that add up to the time of its rounds. Waiting for rewards is a part of
 * sampling; what ran beside each other is counted twice, and said so. */
function phases(curves, peer) {
  const of = (key) => curves.find((curve) => curve.key === key && curve.peer === peer)?.points ?? [];
  const rewards = new Map(of("timing.reward_s"));
  const parts = [
    { name: "sampling", colour: colour(0), points: of("timing.sample_s").map(([round, value]) => [round, Math.max(0, (value ?? 0) - (rewards.get(round) ?? 0))]) },
    { name: "waiting for rewards", colour: colour(6), points: of("timing.reward_s") },
    { name: "learning", colour: colour(1), points: of("timing.learn_s") },
    { name: "of these, at once", colour: colour(9), points: of("timing.overlap_s") },
  ];
  return parts.filter((part) => part.points.some(([, value]) => value));
}

function wires(speed, names) {
  const readers = names.filter((name) => speed.wires.some((wire) => name in wire.lag));
  return el("section", { class: "panel", "aria-labelledby": "wire-title", id: "wire" },
    el("h2", { id: "wire-title" }, `The log: ${num(speed.records)} records`),
    table("The log by sender", ["sender", "groups", "size", "bytes per token", "outbox", ...readers.map((name) => `not read by ${name}`)],
      speed.wires.map((wire) => el("tr", { "data-wire": wire.sender },
        el("th", { scope: "row" }, wire.sender), el("td", { class: "num" }, num(wire.groups)), el("td", { class: "num" }, bytes(wire.num_bytes)),
        el("td", { class: "num" }, num(wire.bytes_per_token)), el("td", { class: "num" }, wire.outbox === null ? "not known" : num(wire.outbox)),
        readers.map((name) => el("td", { class: "num" }, num(wire.lag[name])))))),
    el("p", { class: "note" }, "Outbox: records that wait to be sent. Not read: records of the sender that a learner has not come to."));
}
