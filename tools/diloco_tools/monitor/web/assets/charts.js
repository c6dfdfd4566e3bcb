// Line plots, the same on the dashboard and in a report. uPlot draws them; beneath each title are the values
// under the pointer or the cursor of the arrow keys, or else the newest ones, in words.

import { make } from "./dom.js";

const HEIGHT = 184;
const HUES = 8; // colours in the style sheet; further lines are grey
const MOST_LINES = 64; // more than an eye can follow, and as many as are drawn quickly
const IN_WORDS = 8; // values in the readout
const LEAST_RECENT = 4; // points that a scale goes by
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const [MINUTE, HOUR, DAY] = [60, 3600, 86400];
const TIME_STEPS = [1, 2, 5, 10, 15, 30, MINUTE, 120, 300, 600, 900, 1800, HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, ...[1, 2, 5, 10, 20, 50, 100].map((days) => days * DAY)];
const ROUND_STEPS = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();

// How values are written, as diloco_protocol.quantities does.

/** 0.4 s, 41 s, 12 min, 3 h, 4 d. */
function duration(seconds) {
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  for (const [size, unit] of [[1, "s"], [MINUTE, "min"], [HOUR, "h"]]) {
    if (seconds / size < 99.5) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(seconds / DAY)} d`;
}
const short = (seconds) => duration(seconds).replace(/\.0 s$/, " s");

/** 0.41, 1.5k, 38M; with unit "B" 1.5 kB, 38 MB. Decimal prefixes. */
function scaled(value, unit = "") {
  const space = unit ? " " : "";
  const size = Math.abs(value);
  if (size > 0 && size < 0.995) return `${Number(value.toPrecision(2))}${space}${unit}`;
  let rest = value;
  for (const prefix of ["", "k", "M", "G", "T", "P"]) {
    if (Math.abs(rest) < 9.95 && (prefix || rest !== Math.trunc(rest))) return `${rest.toFixed(1)}${space}${prefix}${unit}`;
    if (Math.abs(rest) < 999.5) return `${rest.toFixed(0)}${space}${prefix}${unit}`;
    rest /= 1000;
  }
  return `${rest.toPrecision(3)}${space}E${unit}`;
}

const or = (zero, format) => (value, isExact) => (value === null ? "—" : value === 0 ? zero : format(value, isExact));
const significant = (digits) => (value) => (Math.abs(value) < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(digits))));

/** What each plot shows, over rounds (`x` "round") or over time; see `Chart`. */
export const PLOTS = {
  loss: { title: "Loss", unit: "mean of a round", x: "round", fromZero: false, recent: true, format: or("0", significant(4)), empty: "No worker has reported a loss: diloco.report(loss=loss) does." },
  seconds: { title: "Round time", unit: "from opening to release", x: "round", recent: true, mayJump: true, format: or("0 s", (value, isExact) => (isExact ? duration(value) : `${scaled(value)} s`)) },
  norm: { title: "Pseudo-gradient norm", unit: "mean of a round", x: "round", recent: true, format: or("0", significant(3)) },
  network: { title: "Network", unit: "at the broker", x: "time", format: or("0", (value) => scaled(value, "B/s")), empty: "No bytes have been counted yet." },
  speeds: { title: "Speed", unit: "inner steps/s of each worker", x: "time", format: or("0", (value) => scaled(value)), empty: "No worker has reported its speed yet." },
};

/** Along the x axis: how a place is written, in full and beside the axis, and the steps between two marks. */
export const AXES = {
  round: { steps: ROUND_STEPS, over: "rounds", text: (x) => `round ${x}`, mark: (x, isFirst) => (isFirst ? `round ${x}` : String(x)) },
  past: { steps: TIME_STEPS, over: "time", text: (x) => (Math.abs(x) < 0.5 ? "now" : `${duration(-x)} ago`), mark: (x) => (x ? `−${short(-x)}` : "now") },
  elapsed: { steps: TIME_STEPS, over: "time", text: (x) => `${duration(x)} after the start`, mark: short },
};

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/**
 * The least and the greatest value to have room for: those of the newer half, and older ones that are at
 * most twice as far off as these differ. `mayJump`: values far above 95% of all (or all but one), such as
 * rounds that a pause interrupted, have no say in it, wherever they are.
 */
function recentScale(values, mayJump = false) {
  let usual = values;
  if (mayJump && values.length >= LEAST_RECENT) {
    const ranked = Float64Array.from(values).sort();
    const most = ranked[Math.min(ranked.length - 2, Math.floor(0.95 * ranked.length))];
    const limit = most + 8 * Math.max(most - ranked[0], 0.1 * Math.abs(most));
    usual = values.filter((value) => value <= limit);
  }
  const [low, high] = extent(usual.slice(-Math.max(LEAST_RECENT, Math.ceil(usual.length / 2))));
  const room = 2 * (high - low);
  if (!(room > 0 && Number.isFinite(room))) return extent(usual);
  return extent(usual.filter((value) => value >= low - room && value <= high + room));
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const hue = (index) => (index < HUES ? `s${index + 1}` : "rest");

/** Parts of a line of which each goes on in x: a broker that went on from an older version begins another. */
function parts(points) {
  const found = [];
  let last = Infinity;
  for (const [x, y] of points) {
    if (x < last) found.push([[], []]);
    found[found.length - 1][0].push(x);
    found[found.length - 1][1].push(y);
    last = x;
  }
  return found;
}

/**
 * One plot. `axis` is one of `AXES`; `recent`: a single line is scaled by its newer half, but of a whole run
 * (`isWhole`) only where few values would flatten all others.
 */
export class Chart {
  constructor({ id, title, unit = "", format, axis, fromZero = true, recent = false, mayJump = false, isWhole = false, empty = "No round has closed yet." }) {
    Object.assign(this, { title, format, axis, fromZero, recent, mayJump, isWhole });
    this.lines = [];
    this.readout = make("p", { className: "readout", id: `${id}-now` });
    this.surface = make("div", { className: "surface", tabIndex: 0, role: "img" });
    this.surface.setAttribute("aria-describedby", this.readout.id);
    this.empty = make("p", { className: "empty", textContent: empty });
    this.cut = make("p", { className: "cut dim" });
    const heading = make("h3", {}, title, make("span", { className: "dim", textContent: unit && ` ${unit}` }));
    this.node = make("figure", { className: "plot", id, chart: this }, heading, this.readout, this.empty, this.surface, this.cut);
    new ResizeObserver(() => this.paint()).observe(this.node);
    this.surface.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
    this.surface.addEventListener("keydown", (event) => this.key(event));
    for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", () => this.plot?.redraw());
    this.draw([]);
  }

  /** `lines` are {name, points: [[x, y or null for a gap], ...]}, the newest point last; `marker` an x or null. */
  draw(lines, marker = null) {
    this.marker = marker;
    this.lines = lines.filter(({ points }) => points.some(([, y]) => y !== null)).slice(0, MOST_LINES);
    this.more = lines.length - Math.min(lines.length, IN_WORDS);
    const isEmpty = !this.lines.length;
    this.empty.hidden = !isEmpty;
    for (const node of [this.readout, this.surface]) node.hidden = isEmpty;
    this.cut.hidden = true;
    if (isEmpty) return;
    this.measure(this.lines.flatMap(({ points }) => points.filter(([, y]) => y !== null)));
    const count = this.lines.length === 1 ? "one line" : `${this.lines.length} lines`;
    this.surface.setAttribute("aria-label", `${this.title} over ${this.axis.over}, ${count}. Arrow keys read values.`);
    const split = this.lines.map(({ points }) => parts(points));
    this.data = split.flat().length === 1 ? split[0][0] : uPlot.join(split.flat());
    const hues = split.flatMap((found, index) => found.map(() => hue(index))).join(" ");
    if (this.hues !== hues) this.plot = this.plot?.destroy();
    this.hues = hues;
    this.plot?.setData(this.data);
    this.paint();
  }

  measure(points) {
    const [x0, x1] = extent(points.map(([x]) => x));
    let [y0, y1] = extent(points.map(([, y]) => y));
    if (this.recent && this.lines.length === 1) {
      const [low, high] = recentScale(points.map(([, y]) => y), this.mayJump);
      const off = points.filter(([, y]) => y < low || y > high);
      if (!this.isWhole || (off.length <= points.length / 10 && y1 - y0 > 8 * (high - low))) {
        [y0, y1] = [low, high];
        this.tellCut(off);
      }
    }
    this.across = x0 < x1 ? [x0, x1] : [x0 - 0.5, x1 + 0.5];
    if (this.fromZero) y0 = Math.min(0, y0);
    // Room above and below, so that lines do not lie on the frame; a flat line is in the middle.
    const room = y1 - y0 || Math.abs(y1) || 1;
    this.up = [this.fromZero && y0 === 0 ? 0 : y0 - 0.06 * room, y1 + 0.06 * room];
  }

  /** Say which points the scale has no room for: a line that leaves the plot would be a riddle. */
  tellCut(off) {
    this.cut.hidden = !off.length;
    if (!off.length) return;
    const [low, high] = extent(off.map(([, y]) => y));
    const values = low === high ? this.format(low, true) : `${this.format(low, true)} to ${this.format(high, true)}`;
    this.cut.textContent = `Off the scale: ${off.length === 1 ? this.axis.text(off[0][0]) : `${off.length} ${this.axis.over}`} with ${values}.`;
  }

  paint() {
    const width = this.surface.clientWidth;
    if (!width || !this.lines.length) return;
    if (!this.plot) this.plot = new uPlot(this.options(width), this.data, this.surface);
    else if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
    this.describe();
  }

  options(width) {
    const line = { stroke: () => colour("dim"), grid: { stroke: () => colour("grid"), width: 1 }, ticks: { stroke: () => colour("line"), width: 1, size: 4 }, font: FONT };
    const series = this.hues.split(" ").map((name) => ({ stroke: () => colour(name), width: name === "rest" ? 1 : 1.6, points: { size: 5, fill: () => colour(name) } }));
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false, range: () => this.across }, y: { range: () => this.up } },
      axes: [
        { ...line, size: 26, space: 70, incrs: this.axis.steps, values: (_, marks) => marks.map((x, index) => this.axis.mark(x, index === 0)) },
        { ...line, size: 62, space: 24, values: (_, marks) => marks.map((y) => this.format(y)) },
      ],
      series: [{}, ...series],
      hooks: {
        draw: [(plot) => this.marker !== null && this.mark(plot)],
        setCursor: [() => this.describe()],
      },
    };
  }

  /** A line over the whole height, where the marker is. */
  mark({ ctx, bbox, valToPos }) {
    ctx.fillStyle = colour("text");
    ctx.fillRect(valToPos(this.marker, "x", true), bbox.top, 1.5 * devicePixelRatio, bbox.height);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity, Escape: NaN }[event.key];
    if (step === undefined || !this.plot) return;
    event.preventDefault();
    const xs = this.data[0];
    const at = (this.plot.cursor.left >= 0 ? this.plot.cursor.idx : xs.length - 1) + step;
    const left = Number.isNaN(at) ? -10 : this.plot.valToPos(xs[Math.max(0, Math.min(xs.length - 1, at))], "x");
    this.plot.setCursor({ left, top: left });
  }

  /** The values at the cursor, or those at the marker, or the newest ones. */
  describe() {
    if (!this.lines.length) return;
    const left = this.plot?.cursor.left ?? -10;
    const x = left >= 0 ? this.plot.posToVal(left, "x") : this.marker;
    const found = this.lines.map(({ points }) => (x === null ? points.findLast(([, y]) => y !== null) : nearest(points, x)));
    const [closest] = [...found].sort((one, other) => Math.abs(one[0] - x) - Math.abs(other[0] - x));
    const values = found.slice(0, IN_WORDS).map(([, y], index) => {
      const { name } = this.lines[index];
      const key = name ? [make("span", { className: `key ${hue(index)}` }), `${name} `] : [];
      return make("span", { className: "value" }, ...key, this.format(y, true));
    });
    const more = this.more > 0 ? [make("span", { className: "dim", textContent: `and ${this.more} more` })] : [];
    this.readout.replaceChildren(x === null ? "" : `${this.axis.text(closest[0])}: `, ...values, ...more);
  }
}

function nearest(points, x) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - x) <= Math.abs(best[0] - x)) best = point;
  return best;
}
