// Numbers, times and sizes as people read them.

const MINUS = "−";
const grouped = new Intl.NumberFormat("en"); // made once: it is slow to make
const signed = (text) => text.replace(/^-/, MINUS).replace(/e-/, `e${MINUS}`);

/** Three digits that count; "–" for what is not known. */
export function num(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return signed(grouped.format(value));
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return signed(value.toExponential(2));
  if (size >= 1000) return signed(grouped.format(Math.round(value)));
  return signed(String(Number(value.toPrecision(3))));
}

export const percent = (value) =>
  value === null || value === undefined ? "–" : `${num(Number((100 * value).toFixed(value < 0.1 ? 1 : 0)))} %`;

/** A score of the task: per cent of an accuracy, a number of any other reward. */
export const score = (value, measure) => (measure === "accuracy" ? percent(value) : num(value));

/** 494000000 as "494 M". */
export function short(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${num(value / size)} ${unit}`;
  }
  return num(value);
}

export function bytes(value) {
  return value >= 1000 ? `${short(value)}B` : `${num(value)} B`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const ago = (seconds) =>
  seconds ? `${duration(Date.now() / 1000 - seconds)} ago` : "never";

/** Of a rollout: was it learned from, wholly or in part? */
export const isLearned = (fate) => /^(learned|withheld)/.test(fate);

/** A token as it is shown: what has no ink of its own gets a sign. */
export function visible(text) {
  if (text === "") return "∎";
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}
