// Line plots in SVG: axes with units, a line that follows the pointer or the arrow keys, and the values
// there (or the newest) in words beneath the title.

import { duration, make } from "./format.js";

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 150;
const MARGIN = { left: 58, right: 12, top: 8, bottom: 24 };
const HUES = 8; // colours in the style sheet; further lines are grey
const MOST_LINES = 64; // more than an eye can follow, and as many as are drawn quickly
const IN_WORDS = 8; // values in the readout
const LEAST_RECENT = 4; // points that a scale goes by

/** About `count` round numbers from low to high. */
export function ticks(low, high, count, step0 = 0) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(step0, [1, 2, 5, 10].find((f) => f * power >= raw * 0.999) * power);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first) + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** Round seconds: people count them in sixties. */
function timeTicks(low, high, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const step = steps.find((s) => s * count >= high - low) ?? 86400 * Math.ceil((high - low) / 86400 / count);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first) + 1 }, (_, i) => (first + i) * step);
}

/**
 * The least and the greatest value to have room for: those of the newer half, and older ones that are at
 * most twice as far off as these differ. As `recent_scale` in diloco_tools/series.py.
 */
export function recentScale(values) {
  const newer = values.slice(-Math.max(LEAST_RECENT, Math.ceil(values.length / 2)));
  const [low, high] = extent(newer);
  const room = 2 * (high - low);
  if (!(room > 0 && Number.isFinite(room))) return extent(values);
  return extent(values.filter((value) => value >= low - room && value <= high + room));
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** Few enough points for the width: the lowest and the highest of each column stay. */
function thinned(points, columns) {
  if (points.length <= 2 * columns) return points;
  const kept = [];
  const size = points.length / columns;
  for (let column = 0; column < columns; column++) {
    const part = points.slice(Math.floor(column * size), Math.floor((column + 1) * size));
    const valued = part.filter((point) => point[1] !== null);
    if (valued.length < part.length || !valued.length) kept.push(part[0]);
    if (!valued.length) continue;
    let [low, high] = [valued[0], valued[0]];
    for (const point of valued) {
      if (point[1] < low[1]) low = point;
      if (point[1] > high[1]) high = point;
    }
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  kept.push(points[points.length - 1]);
  return kept;
}

function element(tag, attributes, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/**
 * One plot. `x` says what goes along: "round" (numbers), "past" (seconds before now, negative) or
 * "elapsed" (seconds since the start). `recent`: one line, scaled by its newer half.
 */
export class Chart {
  constructor({ id, title, unit, format, x, fromZero = true, recent = false, empty }) {
    Object.assign(this, { id, title, format, x, fromZero, recent });
    this.lines = [];
    this.marker = null;
    this.cursor = null;
    this.readout = make("p", { className: "readout", id: `${id}-now` });
    this.svg = element("svg", { tabindex: "0", role: "img", height: HEIGHT });
    this.svg.setAttribute("aria-describedby", this.readout.id);
    this.empty = make("p", { className: "empty", textContent: empty });
    const heading = make("h3", {}, title, make("span", { className: "dim", textContent: unit ? ` ${unit}` : "" }));
    this.cut = make("p", { className: "cut dim", hidden: true });
    this.node = make("figure", { className: "plot", id }, heading, this.readout, this.empty, this.svg, this.cut);
    this.width = 0;
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width && width !== this.width) {
        this.width = width;
        this.paint();
      }
    }).observe(this.node);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.aim(null));
    this.svg.addEventListener("blur", () => this.aim(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  /** `lines` are {name, points: [[x, y or null], ...]}, x ascending; `marker` an x or null. */
  draw(lines, marker = null) {
    this.total = lines.length;
    this.lines = lines.filter((line) => line.points.length).slice(0, MOST_LINES);
    this.marker = marker;
    this.paint();
  }

  paint() {
    const points = this.lines.flatMap((line) => line.points.filter((point) => point[1] !== null));
    this.empty.hidden = points.length > 0;
    this.svg.toggleAttribute("hidden", !points.length);
    this.svg.style.display = points.length ? "" : "none";
    this.readout.hidden = !points.length;
    this.cut.hidden = true;
    if (!points.length || !this.width) return;
    this.measure(points);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("width", this.width);
    this.cursorLayer = element("g", {});
    this.svg.replaceChildren(this.frame(), this.axes(), this.curves(), this.cursorLayer);
    this.aim(this.cursor);
  }

  measure(points) {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [x, y] of points) {
      if (x < x0) x0 = x;
      if (x > x1) x1 = x;
      if (y < y0) y0 = y;
      if (y > y1) y1 = y;
    }
    if (this.recent) {
      [y0, y1] = recentScale(points.map((point) => point[1]));
      this.tellCut(points.filter((point) => point[1] < y0 || point[1] > y1));
    }
    if (this.x === "past") x1 = Math.max(x1, 0);
    if (x0 === x1) [x0, x1] = this.x === "past" ? [x0 - 30, x1] : [x0 - 0.5, x1 + 0.5];
    if (this.fromZero) y0 = Math.min(0, y0);
    // Room above and below, so that lines do not lie on the frame; a flat line is in the middle.
    const room = y1 - y0 || Math.abs(y1) || 1;
    y1 += 0.06 * room;
    if (!(this.fromZero && y0 === 0)) y0 -= 0.06 * room;
    this.domain = { x0, x1, y0, y1 };
  }

  /** Say which points the scale has no room for: a line that leaves the plot would be a riddle. */
  tellCut(off) {
    this.cut.hidden = !off.length;
    if (!off.length) return;
    const [low, high] = extent(off.map((point) => point[1]));
    const values = low === high ? this.format(low) : `${this.format(low)} to ${this.format(high)}`;
    const which = off.length === 1 ? `${this.xText(off[0][0])} with ${values} is` : `${off.length} older rounds with ${values} are`;
    this.cut.textContent = `Scaled by the newer half: ${which} off the scale.`;
  }

  /** Lines end where the plot does. */
  frame() {
    const box = element("rect", { x: MARGIN.left, y: 0, width: this.width - MARGIN.left, height: HEIGHT - MARGIN.bottom + 2 });
    return element("clipPath", { id: `${this.id}-frame` }, box);
  }

  across = (x) => MARGIN.left + ((x - this.domain.x0) / (this.domain.x1 - this.domain.x0)) * (this.width - MARGIN.left - MARGIN.right);
  down = (y) => HEIGHT - MARGIN.bottom - ((y - this.domain.y0) / (this.domain.y1 - this.domain.y0)) * (HEIGHT - MARGIN.top - MARGIN.bottom);

  axes() {
    const { x0, x1, y0, y1 } = this.domain;
    const group = element("g", { class: "axes" });
    const label = (text, attributes) => group.append(element("text", attributes, text));
    for (const y of ticks(y0, y1, 4)) {
      const at = this.down(y).toFixed(1);
      group.append(element("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: at, y2: at }));
      label(this.format(y), { x: MARGIN.left - 7, y: at, class: "y" });
    }
    const room = Math.max(2, Math.floor((this.width - MARGIN.left) / 80));
    const marks = this.x === "round" ? ticks(Math.ceil(x0), Math.max(Math.ceil(x0), Math.floor(x1)), room, 1) : timeTicks(x0, x1, room);
    marks.forEach((x, index) => {
      const at = this.across(x);
      const anchor = at > this.width - 40 ? "end" : at < MARGIN.left + 15 ? "start" : "middle";
      group.append(element("line", { class: "tick", x1: at, x2: at, y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom + 4 }));
      // The first number says what is counted.
      const text = `${index === 0 && this.x === "round" ? "round " : ""}${this.xText(x, true)}`;
      label(text, { x: anchor === "end" ? this.width - 2 : at, y: HEIGHT - 6, "text-anchor": anchor });
    });
    const floor = this.down(Math.max(y0, Math.min(0, y1)));
    group.append(element("line", { class: "base", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom }));
    if (y0 < 0) group.append(element("line", { class: "tick", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: floor, y2: floor }));
    if (this.marker !== null && this.marker >= x0 && this.marker <= x1) {
      const at = this.across(this.marker);
      group.append(element("line", { class: "marker", x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    }
    return group;
  }

  xText(x, short = false) {
    if (this.x === "round") return short ? String(x) : `round ${x}`;
    if (this.x === "past") return Math.abs(x) < 0.5 ? "now" : short ? `−${duration(Math.abs(x)).replace(/\.0 s$/, " s")}` : `${duration(-x)} ago`;
    return short ? duration(x).replace(/\.0 s$/, " s") : `${duration(x)} after the start`;
  }

  curves() {
    const group = element("g", { class: "curves", "clip-path": `url(#${this.id}-frame)` });
    const columns = Math.max(50, this.width - MARGIN.left - MARGIN.right) / (this.lines.length > 8 ? 4 : 1);
    this.lines.forEach((line, index) => {
      let path = "";
      let pen = false;
      let last = -Infinity;
      const drawn = thinned(line.points, Math.floor(columns));
      for (const [x, y] of drawn) {
        const lifts = y === null || x < last; // a gap, or a broker that began again further back
        if (y !== null) {
          path += `${pen && !lifts ? "L" : "M"}${this.across(x).toFixed(1)} ${this.down(y).toFixed(1)}`;
          last = x;
        }
        pen = y !== null;
      }
      const hue = index < HUES ? `s${index + 1}` : "rest";
      group.prepend(element("path", { class: `curve ${hue}`, d: path }));
      const end = drawn.findLast((point) => point[1] !== null);
      if (end && line.points.length < 40) {
        group.append(element("circle", { class: `dot ${hue}`, cx: this.across(end[0]), cy: this.down(end[1]), r: 2.5 }));
      }
    });
    return group;
  }

  point(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const { x0, x1 } = this.domain;
    this.aim(x0 + ((x - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right)) * (x1 - x0));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.aim(null);
    if (step === undefined || !this.lines.length) return;
    event.preventDefault();
    const { points } = this.lines[0];
    const at = (this.cursor === null ? points.length - 1 : nearest(points, this.cursor)) + step;
    this.aim(points[Math.max(0, Math.min(points.length - 1, at))][0]);
  }

  /** Show the values at `x`, or those at the marker, or the newest ones. */
  aim(x) {
    this.cursor = x;
    if (!this.lines.length || !this.cursorLayer) return;
    this.cursorLayer.replaceChildren();
    const at = x ?? this.marker;
    const found = this.lines.map((line) => line.points[at === null ? lastValued(line.points) : nearest(line.points, at)]);
    if (x !== null && found[0]) {
      const closest = found.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
      const place = this.across(closest[0]);
      this.cursorLayer.append(element("line", { class: "cursor", x1: place, x2: place, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
      found.forEach((point, index) => {
        if (point[1] === null || point[1] < this.domain.y0 || point[1] > this.domain.y1) return;
        const hue = index < HUES ? `s${index + 1}` : "rest";
        this.cursorLayer.append(element("circle", { class: `dot ${hue}`, cx: this.across(point[0]), cy: this.down(point[1]), r: 3.5 }));
      });
    }
    this.describe(found, at);
  }

  describe(found, x) {
    const where = x === null ? "" : `${this.xText(found[0][0])}: `;
    const parts = found.slice(0, IN_WORDS).map((point, index) => {
      const text = `${this.lines[index].name ? `${this.lines[index].name} ` : ""}${this.format(point[1], true)}`;
      const key = make("span", { className: `key s${index + 1}` });
      return make("span", { className: "value" }, ...(this.lines[index].name ? [key] : []), text);
    });
    const more = this.total - parts.length;
    this.readout.replaceChildren(where, ...parts, ...(more > 0 ? [make("span", { className: "dim", textContent: `and ${more} more` })] : []));
    this.svg.setAttribute("aria-label", `${this.title} over ${this.x === "round" ? "rounds" : "time"}, ${this.lines.length === 1 ? "one line" : `${this.lines.length} lines`}. Arrow keys read values.`);
  }
}

function nearest(points, x) {
  let best = 0;
  for (let index = 1; index < points.length; index++) {
    if (Math.abs(points[index][0] - x) <= Math.abs(points[best][0] - x)) best = index;
  }
  return best;
}

function lastValued(points) {
  const found = points.findLastIndex((point) => point[1] !== null);
  return found < 0 ? points.length - 1 : found;
}
