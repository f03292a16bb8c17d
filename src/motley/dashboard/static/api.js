// Questions to the server. What it refuses, and what went wrong on the way, is said in words.

export class Refusal extends Error {}

const NOT_READY = 503; // what is asked for is still being read
const [AGAIN_MS, MOST_TIMES] = [500, 20];

/** The answer to a question; parameters that are empty are left out, lists are repeated. */
export async function ask(path, query = {}) {
  const url = new URL(path, location.origin);
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) {
      if (one !== undefined && one !== null && one !== "") url.searchParams.append(name, one);
    }
  }
  let answer = await get(url);
  for (let times = 0; answer.status === NOT_READY && times < MOST_TIMES; times++) {
    await new Promise((go) => setTimeout(go, AGAIN_MS));
    answer = await get(url);
  }
  const body = await answer.json().catch(() => null);
  if (!answer.ok) {
    throw new Refusal(body?.error ?? `The server answered ${answer.status} to ${url.pathname}.`);
  }
  if (body === null) throw new Refusal(`The answer to ${url.pathname} is no JSON.`);
  return body;
}

async function get(url) {
  try {
    return await fetch(url, { headers: { Accept: "application/json" } });
  } catch {
    throw new Refusal("The server does not answer. Is `motley watch` still running?");
  }
}

/** One run, as the views ask about it. An answer is kept until `forget`, so that two parts of a
 * view, or two views, do not ask the same twice within a round. */
export class Run {
  constructor(id) {
    this.id = id;
    this.known = new Map();
  }

  forget() {
    this.known.clear();
  }

  /** As `ask`, but not from what is kept. */
  askAnew(what, query) {
    this.known.delete(JSON.stringify([what, query]));
    return this.ask(what, query);
  }

  ask(what, query = {}) {
    const key = JSON.stringify([what, query]);
    if (!this.known.has(key)) {
      if (this.known.size > 200) this.forget(); // a run that is over never says that it changed
      const answer = ask(`/api/runs/${encodeURIComponent(this.id)}/${what}`, query);
      answer.catch(() => this.known.delete(key));
      this.known.set(key, answer);
    }
    return this.known.get(key);
  }

  crew(rounds = "") {
    return this.ask("crew", { rounds });
  }

  async curves(keys, { points = 150, rounds = "", peer = "" } = {}) {
    return (await this.ask("curves", { key: keys, points, rounds, peer })).curves;
  }

  formula(position, number, learner, token) {
    return this.ask(`groups/${position}/${number}/${encodeURIComponent(learner)}/${token}`);
  }
}

/** Listen to what a run does. `said` is called with "live", "over" or "lost", `changed` at news. */
export class Live {
  constructor(id, { said, changed }) {
    this.address = `/api/runs/${encodeURIComponent(id)}/events`;
    this.said = said;
    this.changed = changed;
    if (!document.hidden) this.open();
  }

  open() {
    this.close();
    this.source = new EventSource(this.address);
    this.source.onopen = () => this.said("live");
    this.source.addEventListener("changed", (event) => {
      const news = JSON.parse(event.data);
      this.said(news.is_over ? "over" : "live", news);
      this.changed(news);
    });
    this.source.onerror = () => {
      this.said("lost");
      // A browser gives up for good when it gets an error page; we do not.
      if (this.source.readyState === EventSource.CLOSED) {
        this.timer = setTimeout(() => this.open(), 3000);
      }
    };
  }

  /** Also where nobody looks: a browser has six connections to a server, for all of its tabs. */
  close() {
    clearTimeout(this.timer);
    this.source?.close();
  }
}
