// Starts the page: which view the address asks for, keys, and news of the run.
import { ask, Live, Refusal, Run } from "./api.js";
import { compareView } from "./compare.js";
import { crewView } from "./crew.js";
import { discardedView } from "./discarded.js";
import { el, morph } from "./dom.js";
import { groupKeys, groupView } from "./group.js";
import { offpolicyView } from "./offpolicy.js";
import { rolloutKeys, rolloutsView } from "./rollouts.js";
import { change, go, here, link } from "./route.js";
import { speedView } from "./speed.js";
import { trustView } from "./trust.js";
import { ago } from "./words.js";

const VIEWS = {
  crew: { title: "Crew", show: crewView },
  rollouts: { title: "Rollouts", show: rolloutsView, keys: rolloutKeys },
  group: { title: "Group", show: groupView, keys: groupKeys, of: "rollouts" },
  discarded: { title: "Discarded", show: discardedView },
  offpolicy: { title: "Off-policy", show: offpolicyView },
  trust: { title: "Trust", show: trustView },
  speed: { title: "Speed and wire", show: speedView },
  compare: { title: "Compare", show: compareView },
};
const SHOWN = Object.keys(VIEWS).filter((name) => !VIEWS[name].of);
const LEAST_MS = 1500; // between two refreshes: a fast crew has several rounds a second

const page = { served: [], run: null, live: null, view: "", turn: 0, busy: 0, waiting: 0, isStale: false, last: 0 };
const find = (id) => document.getElementById(id);

async function start() {
  page.served = await ask("/api/runs");
  window.addEventListener("hashchange", () => show());
  window.addEventListener("keydown", onKey);
  window.addEventListener("resize", later);
  document.addEventListener("visibilitychange", onLook);
  find("skip").onclick = (event) => {
    event.preventDefault(); // the address says what is shown, not where one is on the page
    find("view").focus();
  };
  setInterval(tick, 1000);
  await show();
}

function follow(id) {
  if (page.run?.id === id) return;
  page.live?.close();
  page.run = new Run(id);
  page.live = new Live(id, { said: say, changed: later });
}

/** Somebody turned to this page, or away from it. */
function onLook() {
  if (document.hidden) page.live?.close();
  else {
    page.live?.open();
    later();
  }
}

/** Draw the view that the address asks for; of several in flight only the last one counts. */
async function show({ isNews = false } = {}) {
  const { view: asked, params } = here();
  const runs = page.served.filter((one) => one.kind === "run");
  const name = asked in VIEWS && runs.length ? asked : runs.length ? "crew" : "compare";
  const turn = ++page.turn;
  const id = params.run ?? runs[0]?.id;
  if (id !== undefined) follow(id);
  else find("status").textContent = "";
  if (isNews) page.run?.forget();
  drawHead(name, id, runs);
  const box = find("view");
  box.setAttribute("aria-busy", "true");
  page.busy++;
  try {
    const fresh = await VIEWS[name].show({ run: page.run, params, served: page.served });
    if (turn === page.turn) place(box, name, fresh, isNews);
    problem("");
  } catch (error) {
    if (turn !== page.turn) return;
    if (!isNews && page.view !== name) box.replaceChildren();
    problem(error instanceof Refusal ? error.message : `The page has a fault: ${error.message}`);
    if (!(error instanceof Refusal)) throw error;
  } finally {
    page.busy--;
    if (turn === page.turn) box.removeAttribute("aria-busy");
    if (page.isStale && !page.busy) later();
  }
}

function place(box, name, fresh, isNews) {
  const old = box.firstElementChild;
  // Another group is another thing to look at, from its top, though the view is the same.
  const isSame = old && page.view === name && old.dataset.key === fresh.dataset.key;
  page.view = name;
  box.dataset.view = name;
  if (isSame) morph(old, fresh);
  else {
    box.replaceChildren(fresh);
    if (!isNews && page.last) {
      window.scrollTo(0, 0);
      box.focus({ preventScroll: true }); // who reads by ear hears the new view
    }
  }
  page.last = Date.now();
  box.querySelector("[data-return]")?.focus();
  if (!isSame) box.querySelector("[data-token][aria-pressed=true]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

function drawHead(name, id, runs) {
  const run = page.served.find((one) => one.id === id);
  const shown = VIEWS[name].of ?? name;
  find("title").textContent = run ? run.name : "Motley";
  document.title = `${VIEWS[name].title} · ${run ? run.name : "Motley"}`;
  morph(find("nav"), el("nav", { id: "nav", "aria-label": "Views" }, SHOWN.map((one) => el("a", {
    href: link(one), "data-nav": one, "aria-current": one === shown ? "page" : null,
  }, VIEWS[one].title))));
  const pick = (event) => go(shown, { run: event.currentTarget.value });
  morph(find("run"), el("select", { id: "run", onchange: pick }, runs.map((one) =>
    el("option", { value: one.id, selected: one.id === id }, `${one.name} (${one.place})`))));
  find("run-field").hidden = runs.length < 2;
}

function say(state, news) {
  const words = { live: "live", over: "over", lost: "lost connection, trying again" };
  const status = find("status");
  status.dataset.state = state;
  const round = news ? `, round ${news.round}` : "";
  if (news || state === "lost") status.textContent = words[state] + round;
}

function problem(words) {
  find("problem").textContent = words;
  find("problem").hidden = !words;
}

/** Refresh soon, but not more often than people can read, not where nobody looks, and never
 * instead of what somebody just asked for: a slow answer would else be overtaken for ever. */
function later() {
  page.isStale = true;
  if (page.waiting || page.busy || document.hidden) return;
  page.waiting = setTimeout(() => {
    page.waiting = 0;
    if (page.busy) return;
    page.isStale = false;
    show({ isNews: true });
  }, Math.max(0, page.last + LEAST_MS - Date.now()));
}

function tick() {
  for (const time of document.querySelectorAll("time[data-seen]")) {
    const words = ago(Number(time.dataset.seen));
    if (time.textContent !== words) time.textContent = words;
  }
}

function onKey(event) {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const number = Number(event.key);
  if (number >= 1 && number <= SHOWN.length) go(SHOWN[number - 1]);
  else if (VIEWS[page.view]?.keys?.(event, { run: page.run, change })) event.preventDefault();
}

start().catch((error) => problem(error.message));
