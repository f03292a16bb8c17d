// Bars, in the frame of charts.js: counts stacked over rounds, and histograms of ratios.
import { Axes, span, ticks } from "./axes.js";
import { blank, colour, figure, hiddenOf } from "./charts.js";
import { svg } from "./dom.js";
import { num } from "./words.js";

/** Counts over rounds, one part on the other. parts: [{name, colour, points}]; hide: names that
 * are off until somebody wants them. A mark has round, next (the round the next bar begins at)
 * and reason, the part's name. */
export function stacked({ id, title, parts, hide = [], yText = num, onPick, above, columns }) {
  const rounds = [...new Set(parts.flatMap((part) => part.points.map(([round]) => round)))].sort((a, b) => a - b);
  if (!rounds.length) return blank(id, title, above);
  const off = hiddenOf(id, hide);
  // A bar is as wide as the rounds that it sums up: the usual distance of two bars.
  const gaps = rounds.slice(1).map((round, at) => round - rounds[at]).sort((a, b) => a - b);
  const width = gaps[Math.floor(gaps.length / 2)] ?? 1;
  const values = parts.map((part) => new Map(part.points));
  const shown = parts.map((part) => !off.has(part.name));
  const sum = (round) => parts.reduce((all, _, at) => all + (shown[at] ? values[at].get(round) ?? 0 : 0), 0);
  const axes = new Axes({
    x: [rounds[0], rounds.at(-1) + width], y: span(rounds.map(sum), { zero: true }), yText, columns,
  });
  const base = new Map(rounds.map((round) => [round, 0]));
  const rows = parts.map((part, at) => ({
    ...part,
    marks: !shown[at] ? [] : rounds.filter((round) => values[at].get(round)).map((round) => {
      const value = values[at].get(round);
      const low = base.get(round);
      base.set(round, low + value);
      const box = {
        left: axes.x(round), right: axes.x(round + width), top: axes.y(low + value), bottom: axes.y(low),
      };
      return {
        round, next: round + width, value, reason: part.name, box,
        px: (box.left + box.right) / 2, py: (box.top + box.bottom) / 2,
        words: () => `${roundsOf(round, width)} · ${part.name} · ${yText(value)}`,
      };
    }),
  }));
  const drawing = svg("g", {}, rows.map((row) => svg("path", {
    class: `bar-part ${row.colour} ${axes.x(width) - axes.x(0) < 5 ? "thin" : ""}`, "data-series": row.name, d: row.marks.map(({ box }) =>
      `M${box.left.toFixed(1)} ${box.top.toFixed(1)}H${box.right.toFixed(1)}V${box.bottom.toFixed(1)}H${box.left.toFixed(1)}Z`).join(""),
  })));
  const tableOf = () => ({
    heads: ["round", ...parts.map((part) => part.name)],
    body: rounds.map((round) => [num(round), ...values.map((map) => yText(map.get(round) ?? 0))]),
  });
  return figure({ id, title, axes, drawing, rows, onPick, above, tableOf, restack: true });
}

const roundsOf = (round, width) =>
  width > 1 ? `rounds ${num(round)} to ${num(round + width - 1)}` : `round ${num(round)}`;

/** Tokens by ratio before, and by weight after truncation, on a scale of powers of ten; tokens of
 * weight 0 have no place on it, and stand at the left. */
export function ratioHistogram({ id, title, histogram, above }) {
  const { edges, before, after, zero } = histogram;
  if (!histogram.num_tokens) return blank(id, title, above);
  const step = edges[1] - edges[0];
  const left = edges[0] - 3 * step; // where the bar of 0 stands
  const powers = ticks(edges[0] + step, edges.at(-1), document.documentElement.clientWidth < 760 ? 5 : 6);
  const axes = new Axes({
    x: [left, edges.at(-1)], y: span([...before, ...after, zero], { zero: true }),
    xWords: "ratio, or weight used", yWords: "tokens",
    xText: (power) => (power === left + step ? "0" : num(10 ** power)),
    xTicks: [left + step, ...powers],
  });
  const bars = (counts, words, wide) => counts.map((count, at) => mark(axes, {
    count, from: edges[at], to: edges[at + 1], wide,
    words: () => `${words} ${num(10 ** edges[at])} to ${num(10 ** edges[at + 1])}: ${num(count)} tokens`,
  }));
  const rows = [
    { name: "ratio, before truncation", colour: colour(9), marks: bars(before, "ratio", 1) },
    {
      name: "weight, after truncation", colour: colour(0),
      marks: [mark(axes, { count: zero, from: left + step * 0.5, to: left + step * 1.5, wide: 1, words: () => `weight 0: ${num(zero)} tokens` }),
        ...bars(after, "weight", 0.6)],
    },
  ];
  const drawing = svg("g", {}, rows.map((row) => svg("g", { "data-series": row.name, class: hiddenOf(id).has(row.name) ? "off" : "" },
    row.marks.filter(({ value }) => value).map(({ area }) => svg("rect", {
      class: `bar-part ${row.colour} ${row === rows[0] ? "hollow" : ""}`, x: area.left, y: area.top,
      width: Math.max(0.5, area.right - area.left), height: area.bottom - area.top,
    })))));
  const tableOf = () => ({
    heads: ["from", "to", "by ratio", "by weight"],
    body: [["0", "0", "", num(zero)], ...before.map((count, at) =>
      [num(10 ** edges[at]), num(10 ** edges[at + 1]), num(count), num(after[at])])],
  });
  return figure({ id, title, axes, drawing, rows, tableOf, above });
}

function mark(axes, { count, from, to, wide, words }) {
  const slack = ((to - from) * (1 - wide)) / 2;
  const area = { left: axes.x(from + slack), right: axes.x(to - slack), top: axes.y(count), bottom: axes.y(0) };
  // A narrow bar stands before a wide one: who points into both means the narrow one.
  return { value: count, round: from, words, area, px: (area.left + area.right) / 2, py: area.top, box: wide < 1 ? area : null };
}
