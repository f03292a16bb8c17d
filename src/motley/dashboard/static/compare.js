// Two runs side by side, and the reports of studies and sweeps.
import { Run } from "./api.js";
import { colour, lines } from "./charts.js";
import { choice, el, table } from "./dom.js";
import { change, link } from "./route.js";
import { duration, num, score } from "./words.js";

export async function compareView({ run, params, served }) {
  const runs = served.filter((one) => one.kind === "run");
  const reports = served.filter((one) => one.kind === "report");
  return el("div", { class: "stack" },
    runs.length > 0 && await twoRuns(run, runs, params), reportList(reports, params));
}

async function twoRuns(run, runs, params) {
  const left = run;
  const otherId = params.with || runs.find((one) => one.id !== run.id)?.id;
  const options = runs.filter((one) => one.id !== run.id).map((one) => [one.id, one.name]);
  const head = el("div", { class: "tools" }, el("h2", { id: "compare-title" }, "Two runs"),
    options.length > 0 && choice("with", "compare with", options, otherId, (value) => change({ with: value })));
  if (!otherId) {
    return el("section", { class: "panel", "aria-labelledby": "compare-title" }, head,
      el("p", { class: "empty" }, "Only one run is served. Give `motley watch` several to compare them."));
  }
  const right = new Run(otherId);
  const crews = await Promise.all([left.crew(), right.crew()]);
  const names = [left, right].map((one) => runs.find((each) => each.id === one.id)?.name ?? one.id);
  const number = params.number || "heldout";
  const keys = [...new Set([...crews[0].keys, ...crews[1].keys])].filter((key) => !key.startsWith("senders."));
  return el("section", { class: "stack", "aria-labelledby": "compare-title" },
    el("div", { class: "panel" }, head, facts(crews, names)),
    await chart([left, right], crews, names, number, keys));
}

async function chart(both, crews, names, number, keys) {
  const found = await Promise.all(both.map((one, at) => (crews[at].keys.includes(number) ? one.curves([number]) : [])));
  const peers = [...new Set(crews.flatMap((crew) => crew.peers.map((peer) => peer.name)))];
  const series = found.flatMap((curves, at) => curves.filter((curve) => !curve.is_alone).map((curve) => ({
    name: `${names[at]}: ${curve.peer}`, peer: curve.peer, sender: "", points: curve.points,
    colour: colour(peers.indexOf(curve.peer)), dashed: at === 1,
  })));
  const isScore = /^(reward|heldout|ood)\b/.test(number);
  const isAccuracy = isScore && crews.every((crew) => crew.measure === "accuracy");
  return lines({
    id: "compare", title: `${number}: ${names[0]} (solid) and ${names[1]} (dashed)`, series, whole: isAccuracy, columns: 1,
    yText: isAccuracy ? (value) => score(value, "accuracy") : num,
    above: choice("number", "number", keys.map((key) => [key, key]), number, (value) => change({ number: value })),
  });
}

function facts(crews, names) {
  const mean = (crew) => {
    const all = crew.peers.flatMap((peer) => Object.values(peer.heldout));
    return all.length ? all.reduce((sum, value) => sum + value, 0) / all.length : null;
  };
  const rows = [
    ["task", (crew) => crew.task], ["objective", (crew) => crew.objective], ["pace", (crew) => crew.pace],
    ["round", (crew) => `${num(crew.round)} of ${num(crew.rounds)}${crew.is_over ? ", over" : ""}`],
    ["a round takes", (crew) => duration(crew.seconds)],
    ["peers", (crew) => crew.peers.map((peer) => peer.name).join(", ")],
    ["newest held-out, mean", (crew) => score(mean(crew), crew.measure)],
    ["warnings", (crew) => num(crew.warnings.length)],
  ];
  return table("Two runs side by side", ["of the run", ...names], rows.map(([name, of]) =>
    el("tr", {}, el("th", { scope: "row" }, name), crews.map((crew) => el("td", {}, of(crew))))));
}

function reportList(reports, params) {
  if (!reports.length) return null;
  const shown = reports.find((one) => one.id === params.report);
  return el("section", { class: "panel", "aria-labelledby": "reports-title", id: "reports" },
    el("h2", { id: "reports-title" }, "Reports of studies and sweeps"),
    el("ul", { class: "links" }, reports.map((one) => el("li", {},
      el("a", { href: link("compare", { ...params, report: one.id }), "data-report": one.id, "aria-current": one === shown ? "true" : null }, one.name),
      el("small", {}, ` ${one.place}`)))),
    // A report is a file that somebody made: it gets no scripts and no way to this page.
    shown && el("iframe", { "data-key": `report-${shown.id}`, src: `/reports/${encodeURIComponent(shown.id)}`, sandbox: "", title: `Report: ${shown.name}` }));
}
