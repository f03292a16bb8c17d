// Groups by round, one dot per rollout; filters are in the address.
import { el, svg } from "./dom.js";
import { change, go, link, redraw } from "./route.js";
import { isLearned, num, score } from "./words.js";

export const FILTERS = ["newest", "sender", "learner", "rounds", "kind", "rewards", "fate", "text"];
const LIMIT = 40;
const LONGEST_MS = 3000; // how long one press of "more" looks through a long log
const FATES = [
  "learned", "filtered", "silent group", "no advantage", "withheld in part", "learned as a rescue",
  "text only", "not cut", "unreadable", "not finite", "stale", "late", "not selected", "muted",
  "incomplete", "refused", "waiting", "not read yet", "not recorded", "truncated",
];

// The pages that are loaded, of one set of filters: who comes back from a group finds them.
const shelf = { key: "", pages: [], listed: [], from: null };

export const filtersOf = (params) =>
  Object.fromEntries(FILTERS.filter((name) => params[name]).map((name) => [name, params[name]]));


export async function rolloutsView({ run, params }) {
  const crew = await run.crew();
  const filters = filtersOf(params);
  const key = JSON.stringify([run.id, filters]);
  const pages = await renew(run, filters, shelf.key === key ? shelf.pages : []);
  Object.assign(shelf, { key, pages });
  const groups = groupsOf(pages, filters.newest);
  shelf.listed = groups.map((group) => group.position);
  const back = shelf.from;
  shelf.from = null;
  return el("div", { class: "stack" },
    el("section", { class: "panel", "aria-labelledby": "filters-title" },
      el("h2", { id: "filters-title" }, "Rollouts"), form(crew, params)),
    el("section", { class: "panel", "aria-labelledby": "groups-title" },
      el("div", { class: "tools" },
        el("h2", { id: "groups-title" }, "Groups"), legend(crew.measure)),
      list(groups, filters, crew.measure, back), foot(run, filters, groups)));
}

/** The pages to show. Of those that are known the ones where the log grows are asked for again. */
async function renew(run, filters, known) {
  if (!known.length) return lookOn(run, filters, undefined, 1);
  if (!filters.newest) {
    const pages = known.slice(0, -2);
    for (const { after } of known.slice(-2)) pages.push(await load(run, filters, after));
    return pages;
  }
  const first = await load(run, filters, undefined);
  const end = first.page.next;
  // Where the new page does not reach the old ones, what lies between is asked for by "more".
  const meets = end !== null && known.some(({ page }) => page.groups.some(({ position }) => position >= end));
  return meets ? [first, ...without(known, first.page.groups)] : [first];
}

function without(pages, groups) {
  const positions = new Set(groups.map((group) => group.position));
  const left = pages.map(({ after, page }) => {
    const others = page.groups.filter((group) => !positions.has(group.position));
    return { after, page: { ...page, groups: others, looked_at: page.looked_at - page.groups.length + others.length } };
  });
  return left.filter(({ page }, at) => page.groups.length || at === left.length - 1); // the last has the cursor
}

/** The groups of all pages, each once. */
function groupsOf(pages, isNewest) {
  const found = new Map();
  for (const { page } of pages) {
    for (const group of page.groups) if (!found.has(group.position)) found.set(group.position, group);
  }
  const sign = isNewest ? -1 : 1;
  return [...found.values()].sort((a, b) => sign * (a.position - b.position));
}

async function load(run, filters, after) {
  return { after, page: await run.ask("groups", { ...filters, after, limit: LIMIT }) };
}

/** Pages from a cursor on, until there are so many groups. One may come back with few or none:
 * the server looks for a moment, and says where to go on. */
async function lookOn(run, filters, cursor, wanted) {
  const until = Date.now() + LONGEST_MS;
  const pages = [];
  let found = 0;
  for (let after = cursor; after !== null;) {
    const { page } = await load(run, filters, after);
    // Nothing was looked at: the server is still loading what it needs to read a group.
    if (page.looked_at || page.next === null || !pages.length) pages.push({ after, page });
    found += page.groups.length;
    if (found >= wanted || Date.now() > until) break;
    if (page.next !== null && !page.looked_at) {
      run.forget();
      await new Promise((done) => setTimeout(done, 250));
    }
    after = page.next;
  }
  return pages;
}

async function more(run, filters) {
  const { key, pages } = shelf;
  const added = await lookOn(run, filters, pages.at(-1).page.next, LIMIT);
  if (shelf.key === key) shelf.pages = [...pages, ...added];
  redraw();
}

function form(crew, params) {
  const peers = crew.peers.map((peer) => peer.name);
  const learners = crew.peers.filter((peer) => peer.role !== "sampler").map((peer) => peer.name);
  const submit = (event) => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(event.currentTarget.closest("form")));
    change(values);
  };
  const pick = (name, label, values, any) => el("label", { class: "field", for: `f-${name}` }, el("span", {}, label),
    el("select", { id: `f-${name}`, name, onchange: submit }, el("option", { value: "" }, any),
      [...new Set([...values, params[name]].filter(Boolean))].map((value) =>
        el("option", { value, selected: value === params[name] }, value))));
  const write = (name, label, example, type = "text") => el("label", { class: "field", for: `f-${name}` }, el("span", {}, label),
    el("input", { id: `f-${name}`, name, type, placeholder: example, value: params[name] ?? "", onchange: submit }));
  return el("form", { class: "filters", id: "filters", role: "search", onsubmit: submit },
    pick("sender", "sampled by", peers, "all"), pick("learner", "for learner", learners, "any"),
    write("rounds", "rounds", "3..7 or 3.."), pick("kind", "kind", crew.kinds, "all"),
    write("rewards", "rewards", "0.5..1"), pick("fate", "what became of it", FATES, "anything"),
    write("text", "text", "in prompt or completion", "search"),
    el("label", { class: "field", for: "f-newest" }, el("span", {}, "order"),
      el("select", { id: "f-newest", name: "newest", onchange: submit },
        el("option", { value: "" }, "as in the log"), el("option", { value: "1", selected: params.newest === "1" }, "newest first"))),
    el("button", { type: "submit" }, "Filter"),
    el("a", { class: "button", href: link("rollouts"), id: "clear" }, "All"));
}

/** What shapes and colours say: a legend. */
function legend(measure) {
  const levels = measure === "accuracy" ? [0, 0.25, 0.5, 0.75, 1] : [];
  return el("p", { class: "key", "aria-label": "Legend" },
    levels.length ? levels.map((level) => el("span", {}, dot(level, true), score(level, measure)))
      : el("span", {}, dot(0, true), "least … ", dot(1, true), "most reward of the page"),
    el("span", {}, dot(1, false), "not learned from"));
}

/** A disc filled as far as its reward is high, in five steps: fill and colour say the same. */
function dot(level, isUsed, words) {
  const step = level === null ? "none" : Math.round(4 * Math.max(0, Math.min(1, level)));
  const angle = step === "none" ? 0 : (step / 4) * 2 * Math.PI;
  const r = isUsed ? 6 : 4; // what was not learned from is smaller too: not all see that it is pale
  const end = `${(8 + r * Math.sin(angle)).toFixed(2)} ${(8 - r * Math.cos(angle)).toFixed(2)}`;
  const pie = step === 4 ? svg("circle", { class: "pie", cx: 8, cy: 8, r })
    : step > 0 ? svg("path", { class: "pie", d: `M8 8V${8 - r}A${r} ${r} 0 ${step > 2 ? 1 : 0} 1 ${end}Z` }) : null;
  return svg("svg", {
    class: `dot r${step} ${isUsed ? "" : "unused"}`, viewBox: "0 0 16 16",
    ...(words ? { role: "img", "aria-label": words } : { "aria-hidden": "true" }),
  }, words && svg("title", {}, words),
    svg("circle", { class: "rim", cx: 8, cy: 8, r: 6.5 }), pie,
    step === "none" && svg("path", { class: "cross", d: "M5 5l6 6m0-6l-6 6" }));
}

function list(groups, filters, measure, back) {
  if (!groups.length) return el("p", { class: "empty", id: "no-groups" }, "No group found so far.");
  const rewards = groups.flatMap((group) => group.rollouts.map((rollout) => rollout.reward)).filter((reward) => reward !== null);
  const [low, high] = measure === "accuracy" ? [0, 1] : [Math.min(...rewards), Math.max(...rewards)];
  const level = (reward) => (reward === null ? null : high > low ? (reward - low) / (high - low) : 1);
  const heads = ["round", "sampled by", "kind", "rollouts", "prompt"];
  return el("div", { class: "scroll free blocks", role: "region", "aria-label": "List of groups" },
    el("table", { id: "groups" },
      el("caption", {}, "Groups in the order of the log"),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, groups.map((group) => row(group, filters, measure, level, back)))));
}

function row(group, filters, measure, level, back) {
  return el("tr", { "data-key": `group-${group.position}`, class: group.fault ? "faulty" : "" },
    el("td", { class: "num" }, num(group.round)),
    el("td", {}, group.sender, group.version >= 0 && el("small", {}, ` v${group.version}`)),
    el("td", {}, group.kind ?? "–"),
    el("td", { class: "dots" }, group.rollouts.map((rollout) => {
      const fates = filters.learner ? [rollout.fates[filters.learner] ?? "not recorded"] : Object.values(rollout.fates);
      const said = Object.entries(rollout.fates).map(([learner, fate]) => `${learner}: ${fate}`).join(", ");
      return dot(level(rollout.reward), fates.some(isLearned),
        `rollout ${rollout.number}: reward ${score(rollout.reward, measure)}, ${rollout.num_tokens} tokens; ${said || "not recorded"}`);
    })),
    el("td", { class: "prompt" },
      el("a", {
        href: link("group", { ...filters, open: group.position }), "data-position": group.position, class: "text",
        "data-return": group.position === back,
      }, group.prompt || `group ${group.position}`),
      group.fault && el("strong", { class: "fault" }, ` believed by nobody: ${group.fault}`)));
}

function foot(run, filters, groups) {
  const pages = shelf.pages.map(({ page }) => page);
  const last = pages.at(-1);
  const looked = Math.min(last.total, pages.reduce((sum, page) => sum + page.looked_at, 0));
  return el("p", { class: "tools end-note" },
    last.next !== null && el("button", {
      type: "button", id: "more",
      onclick: (event) => { event.currentTarget.disabled = true; more(run, filters); },
    }, "More"),
    el("span", { class: "note", id: "found" },
      `${num(groups.length)} groups found among ${num(looked)} of ${num(last.total)} looked at.`));
}

/** Keys of the list. True: the key was for it. */
export function rolloutKeys(event) {
  const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  if (!by) return false;
  const rows = [...document.querySelectorAll("#groups [data-position]")];
  if (!rows.length) return false;
  const at = rows.indexOf(document.activeElement);
  // An arrow key scrolls as everywhere until somebody is among the rows.
  if (at < 0 && event.key.startsWith("Arrow")) return false;
  rows[Math.max(0, Math.min(rows.length - 1, at + by))].focus();
  return true;
}

/** From an open group to its neighbour in the list, or in the log where there is no list. */
export function neighbour(group, by) {
  const at = shelf.listed.indexOf(group.position);
  const next = at >= 0 ? shelf.listed[at + by] : undefined;
  return next ?? (by > 0 ? group.after : group.before);
}

export const leave = (params) => {
  shelf.from = Number(params.open);
  go("rollouts", filtersOf(params));
};
