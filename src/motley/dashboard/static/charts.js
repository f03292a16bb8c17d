// Charts of our own, in SVG: a frame with readout, legend and table, and lines within it.
// bars.js draws bars into the same frame.
import { Axes, span } from "./axes.js";
import { el, svg, table } from "./dom.js";
import { redraw } from "./route.js";
import { num } from "./words.js";

const COLOURS = 10;
/** The classes of a series: a second ten has the same colours, dotted. */
export const colour = (index) => `c${index % COLOURS}${index % (2 * COLOURS) < COLOURS ? "" : " second"}`;

// What somebody chose in a chart outlives its drawing: by the chart's id.
const hidden = new Map(); // names of series that the legend has off
const cursors = new Map(); // {row, at}: where the keyboard stands
const opened = new Set(); // whose table is shown

/** A figure around a drawing.
 *
 * rows: [{name, colour, dashed, marks: [{px, py, words, round, peer, sender, reason}]}] is what
 * can be pointed at: px and py are where it is drawn, words() says what it is, and `onPick` gets
 * the mark.
 * tableOf makes the table that says the same. restack: what the legend hides is drawn anew.
 */
export function figure({ id, title, axes, drawing, rows, onPick, tableOf, above = null, restack = false }) {
  const off = hiddenOf(id);
  const hint = onPick ? "Choose a point to see its rollouts." : "Point at the chart to read it.";
  const plot = el("div", {
    class: onPick ? "plot pick" : "plot", tabindex: "0", role: "group",
    "aria-label": `${title}. Arrow keys read its points${onPick ? ", Enter opens one" : ""}.`,
    "data-chart": id,
    onpointermove: (event) => point(event.currentTarget, nearest(event, axes, rows, off)),
    onpointerleave: (event) => point(event.currentTarget, null),
    onblur: (event) => point(event.currentTarget, null),
    onclick: (event) => {
      const mark = nearest(event, axes, rows, off);
      if (mark && onPick) onPick(mark);
    },
    onkeydown: (event) => walk(event, id, rows, off, onPick),
  },
    svg("svg", { viewBox: `0 0 ${axes.width} ${axes.height}`, role: "img", "aria-label": title },
      svg("title", {}, title), axes.draw(), drawing,
      svg("circle", { class: "mark off", r: 5, "data-keep": true })));
  return el("figure", { class: "chart", "data-key": `chart-${id}` },
    el("figcaption", {}, el("strong", {}, title), above),
    plot,
    el("p", { class: "readout", "aria-live": "polite", "data-keep": true, "data-hint": hint }, hint),
    rows.length > 1 ? legend(rows, off, restack) : null,
    asTable(id, title, tableOf));
}

/** Names that the legend of a chart has off; `first`: before anybody chose. */
export function hiddenOf(id, first = []) {
  if (!hidden.has(id)) hidden.set(id, new Set(first));
  return hidden.get(id);
}

function legend(rows, off, restack) {
  return el("div", { class: "legend", role: "group", "aria-label": "Shown lines" },
    rows.map((row) => el("button", {
      type: "button", class: `${row.colour} ${row.dashed ? "dashed" : ""}`, "data-key": row.name,
      "aria-pressed": String(!off.has(row.name)),
      onclick: (event) => {
        const button = event.currentTarget;
        if (!off.delete(row.name)) off.add(row.name);
        button.setAttribute("aria-pressed", String(!off.has(row.name)));
        if (restack) redraw();
        const shown = button.closest("figure").querySelectorAll("[data-series]");
        for (const part of shown) part.classList.toggle("off", off.has(part.dataset.series));
      },
    }, el("span", { class: "swatch", "aria-hidden": "true" }), row.name)));
}

// The table is made when it is opened: most are never looked at, and they are long.
export function asTable(id, title, tableOf) {
  const make = () => {
    const { heads, body } = tableOf();
    return table(title, heads, body.map(([first, ...rest]) =>
      el("tr", {}, el("th", { scope: "row" }, first), rest.map((cell) => el("td", {}, cell)))));
  };
  return el("details", {
    open: opened.has(id),
    ontoggle: (event) => {
      const box = event.currentTarget;
      if (box.open === opened.has(id)) return;
      opened[box.open ? "add" : "delete"](id);
      box.lastChild.replaceChildren(...(box.open ? [make()] : []));
    },
  }, el("summary", {}, "Show as table"), el("div", {}, opened.has(id) && make()));
}

/** Show what is pointed at, or nothing. The nodes are looked up: the shown ones may be older
 * than the drawing that this handler came with. */
function point(plot, mark) {
  const dot = plot.querySelector(".mark");
  dot.classList.toggle("off", !mark);
  if (mark) {
    dot.setAttribute("cx", mark.px);
    dot.setAttribute("cy", mark.py);
  }
  const readout = plot.parentNode.querySelector(".readout");
  readout.textContent = mark ? mark.words() : readout.dataset.hint;
}

function nearest(event, axes, rows, off) {
  const box = event.currentTarget.firstElementChild.getBoundingClientRect();
  const px = ((event.clientX - box.left) / box.width) * axes.width;
  const py = ((event.clientY - box.top) / box.height) * axes.height;
  let best = null;
  let least = 60 ** 2; // farther than this from everything, a pointer means nothing
  for (const row of rows) {
    if (off.has(row.name)) continue;
    for (const mark of row.marks) {
      if (isInside(mark.box, px, py)) return mark;
      const far = (mark.px - px) ** 2 + ((mark.py - py) * 0.7) ** 2;
      if (far < least) [best, least] = [mark, far];
    }
  }
  return best;
}

const isInside = (box, px, py) =>
  box && px >= box.left && px <= box.right && py >= box.top && py <= box.bottom;

function walk(event, id, rows, off, onPick) {
  const shown = rows.filter((row) => !off.has(row.name) && row.marks.length);
  if (!shown.length) return;
  const cursor = cursors.get(id) ?? { row: 0, at: -1 };
  const row = shown[Math.min(cursor.row, shown.length - 1)];
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 };
  if (event.key in steps) {
    cursor.at = Math.max(0, Math.min(row.marks.length - 1, cursor.at + steps[event.key]));
  } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
    const round = row.marks[Math.max(0, cursor.at)]?.round;
    const by = event.key === "ArrowDown" ? 1 : shown.length - 1;
    cursor.row = (Math.min(cursor.row, shown.length - 1) + by) % shown.length;
    const other = shown[cursor.row].marks;
    cursor.at = Math.max(0, other.findIndex((mark) => mark.round >= round));
  } else if (event.key === "Enter" && onPick && cursor.at >= 0) {
    onPick(row.marks[Math.min(cursor.at, row.marks.length - 1)]);
    return;
  } else return;
  event.preventDefault();
  event.stopPropagation();
  cursors.set(id, cursor);
  const marks = shown[Math.min(cursor.row, shown.length - 1)].marks;
  point(event.currentTarget, marks[Math.min(cursor.at, marks.length - 1)]);
}

/** Lines over rounds. series: [{name, colour, dashed, points, peer, sender}]; rule: {y, words} is
 * a level to compare with. yText writes a value, `whole` is the span of an accuracy. */
export function lines({ id, title, series, yText = num, whole = false, zero = false, rule, onPick, above, columns }) {
  const drawn = series.filter((one) => one.points.length);
  const rounds = drawn.flatMap((one) => one.points.map(([round]) => round));
  const values = drawn.flatMap((one) => one.points.map(([, value]) => value));
  if (!values.some((value) => value !== null)) return blank(id, title, above);
  const axes = new Axes({
    x: spanOfRounds(rounds), y: whole ? [0, 1] : span(rule ? [...values, rule.y] : values, { zero }), yText, columns,
  });
  const off = hiddenOf(id);
  const rows = drawn.map((one) => ({
    ...one,
    marks: one.points.filter(([, value]) => value !== null).map(([round, value]) => ({
      round, value, peer: one.peer, sender: one.sender, px: axes.x(round), py: axes.y(value),
      words: () => `round ${num(round)} · ${one.name} · ${yText(value)}`,
    })),
  }));
  const drawing = svg("g", { fill: "none" },
    rule && svg("line", { class: "rule", x1: axes.left, x2: axes.right, y1: axes.y(rule.y), y2: axes.y(rule.y) }),
    rows.map((row) => svg("path", {
      class: `line ${row.colour} ${row.dashed ? "dashed" : ""} ${off.has(row.name) ? "off" : ""}`,
      "data-series": row.name, d: pathOf(row.points, axes),
    })),
    rule && svg("text", { class: "tick end halo", x: axes.right, y: axes.y(rule.y) - 5 }, rule.words));
  return figure({ id, title, axes, drawing, rows, onPick, above, tableOf: () => tableOf(rows, yText) });
}

function spanOfRounds(rounds) {
  const low = rounds.reduce((a, b) => Math.min(a, b));
  const high = rounds.reduce((a, b) => Math.max(a, b));
  return low === high ? [low - 1, high + 1] : [low, high];
}

export const blank = (id, title, above = null) =>
  el("figure", { class: "chart", "data-key": `chart-${id}` },
    el("figcaption", {}, el("strong", {}, title), above),
    el("p", { class: "empty" }, "Nothing is recorded yet."));

/** A value that is missing breaks the line; a point that stands alone is a small ring. */
function pathOf(points, axes) {
  const isThere = (at) => at >= 0 && at < points.length && points[at][1] !== null;
  let path = "";
  for (const [at, [round, value]] of points.entries()) {
    if (value === null) continue;
    const place = `${axes.x(round).toFixed(1)} ${axes.y(value).toFixed(1)}`;
    if (isThere(at - 1)) path += `L${place}`;
    else path += isThere(at + 1) ? `M${place}` : `M${place}m-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0 -5 0`;
  }
  return path;
}

function tableOf(rows, yText) {
  const rounds = [...new Set(rows.flatMap((row) => row.marks.map((mark) => mark.round)))];
  const byRow = rows.map((row) => new Map(row.marks.map((mark) => [mark.round, mark.value])));
  return {
    heads: ["round", ...rows.map((row) => row.name)],
    body: rounds.sort((a, b) => a - b).map((round) =>
      [num(round), ...byRow.map((values) => (values.has(round) ? yText(values.get(round)) : ""))]),
  };
}
