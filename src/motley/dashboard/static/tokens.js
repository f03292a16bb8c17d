// Tokens of a completion, tinted by a number of theirs. Every token is a button; arrow keys go
// from one to the next.
import { el, unlessShown } from "./dom.js";
import { num, visible } from "./words.js";

/** By what tokens can be tinted. `middle` is what has no tint, `least` the smallest full scale:
 * rounding errors of own samples must not look like news. */
export const SCALES = {
  log_ratio: { words: "log-ratio", middle: 0, least: 0.5, low: "less likely for the learner", high: "likelier for the learner" },
  weight: { words: "weight used", middle: 1, least: 0.5, low: "counts less", high: "counts more" },
  advantage: { words: "advantage", middle: 0, least: 0.5, low: "worse than its group", high: "better than its group" },
  push: { words: "push of the step", middle: 0, least: 1e-9, low: "made less likely", high: "made likelier" },
  entropy: { words: "entropy", middle: 0, least: 1, low: "", high: "the learner is unsure" },
  logprob: { words: "sampler's log-prob", middle: 0, least: 1, low: "unlikely for its sampler", high: "" },
};

/** The tokens, their numbers and, if any, the trace behind them, of one rollout. */
export function reading(rollout, learner, by) {
  const trace = rollout.traces.find((one) => one.learner === learner) ?? null;
  if (by === "logprob" || !trace) {
    const values = by === "logprob" ? rollout.logprobs : rollout.tokens.map(() => null);
    // A formula is of a token of the learner's cut, which may be another than the sender's.
    const isCut = trace !== null && trace.tokens.join("\u0000") !== rollout.tokens.join("\u0000");
    return { tokens: rollout.tokens, values, starts: null, trace, isForeignCut: isCut };
  }
  const values = by === "advantage" ? trace.tokens.map(() => trace.advantage) : trace[by];
  return { tokens: trace.tokens, values, starts: trace.spans && new Set(trace.spans), trace, isForeignCut: false };
}

/** The number at which a tint is full: that of nearly all tokens, so that one outlier does not
 * make all others pale. */
export function reachOf(readings, by) {
  const { middle, least } = SCALES[by];
  const sizes = readings.flatMap((one) => one.values)
    .filter((value) => value !== null).map((value) => Math.abs(value - middle)).sort((a, b) => a - b);
  return Math.max(least, sizes[Math.floor(sizes.length * 0.97)] ?? 0);
}

function tint(value, by, reach) {
  if (value === null || value === undefined) return {};
  const { middle } = SCALES[by];
  const part = Math.max(-1, Math.min(1, (value - middle) / reach));
  return { "--tint": `${Math.round(Math.abs(part) * 75)}%`, "--side": part < 0 ? "var(--low)" : "var(--high)" };
}

/** chosen: number of the chosen token, or null; position: of the group. */
export function drawTokens(one, { position, rollout, by, reach, chosen, onPick }) {
  const home = chosen ?? 0;
  const key = [rollout.number, one.trace?.learner, one.trace?.round, by, reach, chosen, position].join("/");
  return unlessShown(key, () => el("div", {
    class: "tokens text", role: "group", "aria-label": `tokens of rollout ${rollout.number}`,
    onclick: (event) => {
      const button = event.target.closest("[data-token]");
      if (button) onPick(Number(button.dataset.token));
    },
    onkeydown: walk,
  }, one.tokens.map((text, index) => {
    const value = one.values[index];
    // There may be thousands: no more attributes than it takes.
    return el("button", {
      "data-token": index, tabindex: index === home ? "0" : "-1",
      class: one.starts?.has(index) ? "starts" : null, title: `${SCALES[by].words} ${num(value)}`,
      "aria-pressed": index === chosen ? "true" : null, style: tint(value, by, reach),
    }, visible(text));
  })));
}

function walk(event) {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -1e9, End: 1e9 }[event.key];
  if (!by) return;
  const tokens = [...event.currentTarget.querySelectorAll("[data-token]")];
  const at = tokens.indexOf(document.activeElement);
  const next = tokens[Math.max(0, Math.min(tokens.length - 1, at + by))];
  event.preventDefault();
  event.stopPropagation();
  tokens[at]?.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}

export function scaleLegend(by, reach) {
  const { words, middle, low, high } = SCALES[by];
  const box = (part) => el("span", {
    class: "box", "aria-hidden": "true",
    style: { "--tint": `${Math.abs(part) * 75}%`, "--side": part < 0 ? "var(--low)" : "var(--high)" },
  });
  return el("p", { class: "key", id: "scale" }, el("strong", {}, words),
    low && el("span", {}, `${num(middle - reach)} ${low}`, box(-1), box(-0.5)),
    el("span", {}, box(0), num(middle)),
    high && el("span", {}, box(0.5), box(1), `${num(middle + reach)} ${high}`));
}
