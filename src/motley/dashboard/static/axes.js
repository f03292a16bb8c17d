// The frame of a chart: scales, ticks, grid lines and words on the axes.
import { svg } from "./dom.js";
import { num } from "./words.js";

const TOP = 10;
const BOTTOM = 40;
const LEFT = 54;
const RIGHT = 12;

/** Charts are drawn for the width they are shown at: a scaled one has tiny words on a phone. */
function sizeOf(columns) {
  const room = Math.min(1560, document.documentElement.clientWidth);
  if (room < 760) return { width: Math.max(280, room - 34), height: 210 };
  const beside = room < 1000 ? 1 : room < 1300 ? Math.min(2, columns) : columns; // as in app.css
  return { width: room / beside - 50, height: beside === 2 ? 240 : 280 };
}

/** Round numbers that cover low..high, about `count` of them. */
export function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) {
    found.push(Number((at * step).toPrecision(12)));
  }
  return found;
}

/** low..high of finite values, with a little room; never empty. */
export function span(values, { zero = false } = {}) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [0, 1];
  if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (zero && low === 0 && high === 0) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
  const room = (high - low) * 0.05;
  return [zero && low === 0 ? 0 : low - room, zero && high === 0 ? 0 : high + room];
}

export class Axes {
  constructor({ x, y, xWords = "round", yWords = "", yText = num, xText = num, xTicks, columns = 2 }) {
    Object.assign(this, sizeOf(columns), { xSpan: x, ySpan: y, xWords, yWords, yText, xText, xTicks });
  }

  x = (value) =>
    LEFT + ((value - this.xSpan[0]) / (this.xSpan[1] - this.xSpan[0] || 1)) * (this.width - LEFT - RIGHT);

  y = (value) =>
    TOP + (1 - (value - this.ySpan[0]) / (this.ySpan[1] - this.ySpan[0] || 1)) * (this.height - TOP - BOTTOM);

  get left() { return LEFT; }
  get right() { return this.width - RIGHT; }
  get top() { return TOP; }
  get bottom() { return this.height - BOTTOM; }

  /** Grid and words, below what is drawn. */
  draw() {
    const lines = ticks(...this.ySpan, 4).map((value) => svg("g", {},
      svg("line", { class: "grid", x1: this.left, x2: this.right, y1: this.y(value), y2: this.y(value) }),
      svg("text", { class: "tick end", x: this.left - 6, y: this.y(value) + 4 }, this.yText(value))));
    const count = this.width < 520 ? 4 : 7;
    // Without ticks of its own the axis is one of rounds, and there is no round 3.5.
    const marks = (this.xTicks ?? ticks(...this.xSpan, count).filter(Number.isInteger)).map((value) =>
      svg("text", { class: "tick mid", x: this.x(value), y: this.bottom + 16 }, this.xText(value)));
    return svg("g", { "aria-hidden": "true" }, lines, marks,
      svg("line", { class: "axis", x1: this.left, x2: this.right, y1: this.bottom, y2: this.bottom }),
      svg("text", { class: "tick end", x: this.right, y: this.height - 6 }, this.xWords),
      this.yWords && svg("text", { class: "tick", x: 0, y: this.height - 6 }, this.yWords));
  }
}
