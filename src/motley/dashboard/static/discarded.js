// What a learner did not learn from, by reason.
import { stacked } from "./bars.js";
import { colour } from "./charts.js";
import { choice, el, table } from "./dom.js";
import { change, go, link } from "./route.js";
import { num, percent } from "./words.js";

const learnersOf = (crew) => crew.peers.filter((peer) => peer.role !== "sampler").map((peer) => peer.name);

export async function discardedView({ run, params }) {
  const learners = learnersOf(await run.crew());
  const learner = params.learner || learners[0] || "";
  const found = await run.ask("discarded", { learner, points: 120 });
  // What was learned stands beside it for comparison; it is gray, and off in the chart at first.
  const parts = found.reasons.map((reason, index) => ({
    name: reason.reason, colour: colour(reason.reason === "learned" ? 9 : index), points: reason.points,
  }));
  return el("div", { class: "stack" },
    el("section", { class: "panel", "aria-labelledby": "discarded-title" },
      el("div", { class: "tools" },
        el("h2", { id: "discarded-title" }, "What became of the rollouts"),
        choice("learner", "for learner", learners.map((name) => [name, name]), learner, (value) => change({ learner: value })),
        el("p", { class: "note" }, `${num(found.total)} rollouts. A reason opens its rollouts.`)),
      reasons(found, parts)),
    stacked({
      id: `discarded-${learner}`, title: "Rollouts by reason, over rounds", parts, hide: ["learned"], columns: 1,
      onPick: (mark) => go("rollouts", { learner, fate: mark.reason, rounds: `${mark.round}..${mark.next - 1}` }),
    }));
}

function reasons(found, parts) {
  if (!found.reasons.length) return el("p", { class: "empty" }, "Nothing is recorded yet.");
  return table("Reasons, with how many rollouts had them", ["reason", "rollouts", "share", "what it means"],
    found.reasons.map((reason, index) => el("tr", { "data-reason": reason.reason, "data-key": `reason-${reason.reason}` },
      el("th", { scope: "row", class: parts[index].colour },
        el("span", { class: "swatch block", "aria-hidden": "true" }),
        el("a", { class: "target", href: link("rollouts", { learner: found.learner, fate: reason.reason }) }, reason.reason)),
      el("td", { class: "num" }, num(reason.count), el("small", { class: "phone" }, " rollouts")),
      el("td", { class: "num" }, percent(found.total ? reason.count / found.total : null)),
      el("td", { class: "words" }, reason.words))), { class: "scroll blocks", id: "reasons" });
}
