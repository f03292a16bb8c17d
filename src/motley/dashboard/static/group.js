// One open group: its prompt, its completions side by side, and the formula of a token.
import { choice, el } from "./dom.js";
import { filtersOf, leave, neighbour } from "./rollouts.js";
import { change, go, link } from "./route.js";
import { drawTokens, reachOf, reading, SCALES, scaleLegend } from "./tokens.js";
import { ago, isLearned, num, score } from "./words.js";

let shown = null; // the group on the page, for the keys

export async function groupView({ run, params }) {
  const [crew, all] = await Promise.all([run.crew(), run.ask(`groups/${Number(params.open)}`)]);
  const learners = learnersOf(all);
  const learner = params.trace || params.learner || bestLearner(all, params.fate) || learners[0] || "";
  // The traces of many learners together may be too large for one answer: then those of this one.
  const group = all.left_out.includes(learner) ? await run.ask(`groups/${all.position}`, { learner }) : all;
  shown = { group, params };
  const by = params.by in SCALES ? params.by : "log_ratio";
  const readings = group.rollouts.map((rollout) => reading(rollout, learner, by));
  const reach = reachOf(readings, by);
  const chosen = chosenOf(group, readings, learner, params);
  const lines = await formula(run, group, readings, learner, chosen);
  return el("div", { class: "stack", "data-key": `group-${group.position}` },
    head(group, params),
    el("div", { class: "with-aside" },
      el("div", { class: "stack" },
        el("div", { class: "panel tools" },
          choice("trace", "as seen by", learners.map((name) => [name, name]), learner, (value) => change({ trace: value, token: "" })),
          choice("by", "tint by", Object.entries(SCALES).map(([key, { words }]) => [key, words]), by, (value) => change({ by: value })),
          scaleLegend(by, reach)),
        leftOut(group, learner),
        el("div", { class: "side", id: "completions" }, group.rollouts.map((rollout, index) =>
          completion(rollout, readings[index], { learner, by, reach, chosen, params, measure: crew.measure })))),
      el("aside", { class: "panel formula", id: "formula", tabindex: "0", "aria-live": "polite", "aria-label": "Formula of a token" },
        lines)));
}

const leftOut = (group, learner) => group.left_out.includes(learner) && el("p", { class: "note", id: "left-out" },
  `Some rollouts of this group are too large to show all that ${learner} made of them: their tokens have no tint.`);

const learnersOf = (group) =>
  [...new Set(group.rollouts.flatMap((rollout) => [...Object.keys(rollout.fates), ...rollout.traces.map((trace) => trace.learner)]))];

/** Who looks for a fate wants to see it through the eyes of one who had it. */
function bestLearner(group, fate) {
  const traces = group.rollouts.flatMap((rollout) => rollout.traces);
  return (traces.find((trace) => fate && trace.fate.includes(fate)) ?? traces.find((trace) => trace.learner !== group.sender) ?? traces[0])?.learner;
}

/** The token in the address. Without one, who filters by a fate gets a token that had it: the
 * reason is then on the page at once. */
function chosenOf(group, readings, learner, params) {
  if (params.token) {
    const [number, token] = params.token.split(".").map(Number);
    return { number, token };
  }
  if (!params.fate) return null;
  const found = group.rollouts.find((rollout) => (rollout.fates[learner] ?? "").includes(params.fate));
  return found ? { number: found.number, token: 0 } : null;
}

function head(group, params) {
  const open = (position, words, id) => position !== null && position !== undefined &&
    el("a", { class: "button", id, href: link("group", { ...kept(params), open: position }) }, words);
  const facts = [
    ["Round", num(group.round)], ["Sampled by", group.sender], ["Version", num(group.version)], ["Model", group.model],
    ["Kind", group.kind ?? "–"], ["Temperature", num(group.temperature)], ["Made", ago(group.created_s)],
    ["Place in the log", num(group.position)],
  ];
  return el("section", { class: "panel", "aria-labelledby": "group-title" },
    el("div", { class: "tools" },
      el("h2", { id: "group-title" }, `Group ${num(group.position)}`),
      el("a", { class: "button", id: "back", href: link("rollouts", filtersOf(params)) }, "Back to the list"),
      open(neighbour(group, -1), "Before", "before"), open(neighbour(group, 1), "Next", "next")),
    group.fault && el("p", { class: "fault", id: "fault" }, el("strong", {}, `Believed by nobody: ${group.fault}. `), group.fault_words),
    el("dl", { class: "facts" }, facts.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)))),
    el("h3", {}, "Prompt"),
    el("pre", { class: "text", id: "prompt" }, group.prompt ?? "not known on this machine"),
    group.answer !== null && el("p", {}, el("strong", {}, "Answer: "), el("span", { class: "text" }, group.answer)));
}

const kept = (params) => ({ ...filtersOf(params), trace: params.trace, by: params.by });

function completion(rollout, one, { learner, by, reach, chosen, params, measure }) {
  const isChosen = chosen?.number === rollout.number;
  const isWanted = params.fate && (rollout.fates[learner] ?? "").includes(params.fate);
  const facts = one.trace ? `A = ${num(one.trace.advantage)}, ` +
    `KL of the filter ${num(one.trace.filter_kl)}, ${one.trace.kept ? "kept" : "not kept"}` : "no trace of this learner";
  return el("article", { class: `completion ${isWanted ? "wanted" : ""}`, "data-rollout": rollout.number, "data-key": `rollout-${rollout.number}` },
    el("h3", {}, `Rollout ${rollout.number}`, el("small", {}, ` reward ${score(rollout.reward, measure)} · ended by ${rollout.ending}`)),
    el("p", { class: "note" }, `${learner ? `${learner}: ` : ""}${facts}`),
    el("ul", { class: "fates", "aria-label": "What became of it" }, Object.entries(rollout.fates).map(([name, fate]) =>
      el("li", { class: `${isLearned(fate) ? "learned" : ""} ${name === learner ? "looked" : ""}`, "data-fate": fate, "data-learner": name }, `${name}: ${fate}`))),
    drawTokens(one, {
      position: Number(params.open), rollout, by, reach, chosen: isChosen ? chosen.token : null,
      onPick: (token) => change({ token: `${rollout.number}.${token}`, trace: learner }, true),
    }),
    !rollout.canonical && el("p", { class: "note" }, "These are not the tokens that the sender's tokenizer makes of the text."));
}

async function formula(run, group, readings, learner, chosen) {
  if (!chosen) return [el("h3", {}, "Formula"), el("p", { class: "empty" }, "Choose a token to see how it was weighed.")];
  const index = group.rollouts.findIndex((rollout) => rollout.number === chosen.number);
  const one = readings[index];
  const title = el("h3", {}, `Rollout ${chosen.number}, token ${chosen.token}`, el("small", {}, ` for ${learner || "nobody"}`));
  if (!one) return [title, el("p", {}, `This group has no rollout ${chosen.number}.`)];
  if (one.isForeignCut) {
    return [title, el("p", {}, `${learner} cuts this text into other tokens than its sender. Tint by something else than the sampler's log-prob to choose one of them.`)];
  }
  try {
    const found = await run.formula(group.position, chosen.number, learner, chosen.token);
    return [title, el("p", { class: "verdict", id: "verdict" }, found.verdict),
      el("ol", { class: "lines" }, found.lines.map(formulaLine)),
      el("p", { class: "note" }, el("strong", {}, `${found.objective}. `), found.about)];
  } catch (error) {
    const fate = group.rollouts[index].fates[learner];
    return [title, fate && el("p", { class: "verdict" }, `What became of it: ${fate}.`), el("p", { id: "no-trace" }, error.message)];
  }
}

const formulaLine = (line) => el("li", { "data-symbol": line.symbol },
  el("p", { class: "text" }, el("var", {}, line.symbol), line.formula && ` = ${line.formula}`,
    line.values && el("span", { class: "values" }, ` = ${line.values}`), " = ", el("strong", {}, line.result)),
  el("p", { class: "note" }, line.words));

export function groupKeys(event) {
  if (!shown) return false;
  const { group, params } = shown;
  if (event.key === "Escape") leave(params);
  else if (event.key === "n" || event.key === "p") {
    const position = neighbour(group, event.key === "n" ? 1 : -1);
    if (position === null || position === undefined) return false;
    go("group", { ...kept(params), open: position });
  } else return false;
  return true;
}
