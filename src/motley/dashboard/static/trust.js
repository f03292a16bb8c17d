// What learners hold against senders: refusals, evidence, strikes, and who is muted.
import { colour, lines } from "./charts.js";
import { choice, el, table } from "./dom.js";
import { change } from "./route.js";
import { num } from "./words.js";

const MOST_LINES = 10; // in a chart: those with the highest values

export async function trustView({ run, params, served }) {
  const trust = await run.ask("trust");
  const learners = [...new Set(trust.suspects.map((suspect) => suspect.learner))];
  const chosen = trust.suspects.filter((suspect) => !params.learner || suspect.learner === params.learner);
  const place = served.find((one) => one.id === run.id)?.place ?? "RUN";
  return el("div", { class: "stack" },
    muted(chosen, place),
    el("section", { class: "panel", "aria-labelledby": "suspects-title" },
      el("div", { class: "tools" }, el("h2", { id: "suspects-title" }, "Refusals, by learner and sender"),
        choice("learner", "learner", [["", "all"], ...learners.map((name) => [name, name])], params.learner ?? "", (value) => change({ learner: value }))),
      suspects(chosen)),
    el("div", { class: "columns" },
      over(chosen, "evidence", "Evidence against log-probs, in powers of ten", trust.alarm === null ? null : { y: trust.alarm, words: `alarm: muted at ${num(trust.alarm)}` }),
      over(chosen, "strikes", "Strikes: refused records that a sender signed")),
    faults(trust.faults));
}

function muted(suspects, place) {
  const found = suspects.filter((suspect) => suspect.muted);
  return el("section", { class: found.length ? "panel warned" : "panel", "aria-labelledby": "muted-title", id: "muted" },
    el("h2", { id: "muted-title" }, found.length ? `Muted (${found.length})` : "Nobody is muted"),
    found.length > 0 && el("ul", {}, found.map((suspect) => el("li", { "data-muted": `${suspect.sender}>${suspect.learner}` },
      el("strong", {}, suspect.sender), ` is not learned from by ${suspect.learner}`,
      suspect.until === null ? "" : ` until round ${num(suspect.until)}`, `: ${suspect.muted}. If it is honest, `,
      el("code", {}, `motley pardon ${place} ${suspect.sender}`), ` in the folder of ${suspect.learner} has it heard again.`))));
}

const counts = (reasons) => {
  const found = Object.entries(reasons).filter(([, count]) => count);
  return found.length ? found.map(([reason, count]) => el("span", { class: "count" }, `${reason} ${num(count)} `)) : "–";
};
const last = (points) => points.findLast(([, value]) => value !== null)?.[1] ?? null;

function suspects(found) {
  if (!found.length) return el("p", { class: "empty" }, "Nothing is held against anybody.");
  return table("Refusals by learner and sender", ["learner", "sender", "refused", "dropped", "missing", "evidence", "strikes", "muted until"],
    found.map((suspect) => el("tr", { "data-suspect": `${suspect.sender}>${suspect.learner}` },
      el("th", { scope: "row" }, suspect.learner), el("td", {}, suspect.sender),
      el("td", {}, counts(suspect.refused)), el("td", {}, counts(suspect.dropped)), el("td", { class: "num" }, num(suspect.missing)),
      el("td", { class: "num" }, num(last(suspect.evidence))), el("td", { class: "num" }, num(last(suspect.strikes))),
      el("td", { class: "num" }, suspect.muted ? (suspect.until === null ? "pardoned" : num(suspect.until)) : "–"))));
}

function over(found, key, title, rule) {
  const most = (suspect) => suspect[key].reduce((high, [, value]) => Math.max(high, value ?? 0), 0);
  const isKnown = (suspect) => suspect[key].length > 0;
  const shown = found.filter(isKnown).sort((a, b) => most(b) - most(a)).slice(0, MOST_LINES);
  const series = shown.map((suspect, at) => ({
    name: `${suspect.sender} for ${suspect.learner}`, points: suspect[key],
    colour: colour(at), dashed: false, peer: suspect.learner, sender: suspect.sender,
  }));
  const note = found.filter(isKnown).length > MOST_LINES && el("span", { class: "note" }, `the ${MOST_LINES} highest`);
  return lines({ id: key, title, series, zero: true, rule, above: note || null });
}

function faults(bySender) {
  const rows = Object.entries(bySender).flatMap(([sender, faults]) =>
    Object.entries(faults).map(([fault, count]) => [sender, fault, count]));
  return el("section", { class: "panel", "aria-labelledby": "faults-title", id: "faults" },
    el("h2", { id: "faults-title" }, "Faulty records of the log"),
    rows.length ? table("Faulty records by sender", ["sender", "fault", "records"], rows.map(([sender, fault, count]) =>
      el("tr", {}, el("th", { scope: "row" }, sender), el("td", {}, fault), el("td", { class: "num" }, num(count)))))
      : el("p", { class: "empty" }, "All records that were looked at are sound."));
}
