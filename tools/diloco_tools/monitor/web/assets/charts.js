// Plots by uPlot, on the dashboard and in a report. The page keeps their points while it is open.

import { make, say } from "./dom.js";

const HEIGHT = 184;
const HUES = 8; // colours in the style sheet; further lines are grey
const MOST_LINES = 64; // of a plot; more are slow to draw and hard to distinguish
const MOST = 10_000; // points of a line
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

/** 0.41, 1.5k, 38M; with unit "B" 1.5 kB, 38 MB, as diloco_protocol.quantities does. */
function scaled(value, unit = "") {
  const power = Math.min(5, Math.max(0, Math.floor(Math.log10(Math.abs(value) || 1) / 3)));
  const rest = Number((value / 1000 ** power).toPrecision(3));
  return `${rest}${unit && " "}${["", "k", "M", "G", "T", "P"][power]}${unit}`;
}
const significant = (value) => String(Number(value.toPrecision(4)));

/** The plots; each shows a column of the rounds, or points over time. */
const PLOTS = {
  loss: { title: "Loss", unit: "mean of a round", column: 4, empty: "No worker has reported a loss: diloco.report(loss=loss) does." },
  seconds: { title: "Round time", unit: "s", column: 2, fromZero: true },
  norm: { title: "Pseudo-gradient norm", unit: "mean of a round", column: 5, fromZero: true },
  network: { title: "Network", unit: "at the broker", fromZero: true, format: (value) => scaled(value, "B/s"), empty: "No bytes have been counted yet." },
  speeds: { title: "Speed", unit: "inner steps/s of each worker", fromZero: true, empty: "No worker has reported its speed yet." },
};

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const hue = (index) => colour(index < HUES ? `s${index + 1}` : "rest");

class Chart {
  constructor(parent, name, { title, unit, column, fromZero = false, format = significant, empty = "No round has closed yet." }) {
    Object.assign(this, { title, isTime: column === undefined, fromZero, format, scale: null, marker: null });
    this.surface = make("div", { className: "surface", tabIndex: 0, role: "img" });
    this.empty = make("p", { className: "empty", textContent: empty });
    this.note = make("p", { className: "note dim" });
    const heading = make("h3", {}, title, make("span", { className: "dim", textContent: ` ${unit}` }));
    this.node = make("figure", { className: "plot", id: `plot-${name}`, chart: this }, heading, this.empty, this.surface, this.note);
    parent.append(this.node);
    new ResizeObserver(() => this.plot?.setSize({ width: this.surface.clientWidth, height: HEIGHT })).observe(this.node);
    this.surface.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
    this.surface.addEventListener("keydown", (event) => this.key(event));
    for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", () => this.plot?.redraw());
  }

  /** `lines` are {name, points: [[x, y], ...]}; `scale` [low, high, note] or null; `marker` an x or null. */
  draw(lines, scale, marker) {
    const shown = lines.filter(({ points }) => points.some(([, y]) => y !== null)).slice(0, MOST_LINES);
    this.empty.hidden = shown.length > 0;
    this.surface.hidden = !shown.length;
    say(this.note, scale?.[2] ?? "");
    Object.assign(this, { scale, marker });
    if (!shown.length) return;
    this.surface.ariaLabel = `${this.title}. Arrow keys read values.`;
    const data = uPlot.join(shown.map(({ points }) => [0, 1].map((place) => points.map((point) => point[place]))));
    const names = JSON.stringify(shown.map(({ name }) => name));
    if (this.names !== names) this.plot = this.plot?.destroy();
    this.names = names;
    if (this.plot) this.plot.setData(data);
    else this.plot = new uPlot(this.options(shown), data, this.surface);
    this.newest();
  }

  options(lines) {
    const line = { stroke: () => colour("dim"), grid: { stroke: () => colour("grid"), width: 1 }, ticks: { stroke: () => colour("line"), width: 1, size: 4 }, font: FONT };
    const value = (_, y) => (y == null ? "—" : this.format(y));
    const time = (_, x) => (x == null ? "—" : `${new Date(1000 * x).toISOString().slice(11, 19)} UTC`);
    const across = { label: this.isTime ? "at" : "round", ...(this.isTime && { value: time }) };
    return {
      width: this.surface.clientWidth,
      height: HEIGHT,
      tzDate: (seconds) => uPlot.tzDate(new Date(1000 * seconds), "Etc/UTC"),
      fmtDate: (form) => uPlot.fmtDate(form.replace("{h}{aa}", "{HH}:00").replace("{h}:{mm}{aa}", "{HH}:{mm}")),
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: this.isTime }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: [{ ...line, size: 26 }, { ...line, size: 62, space: 24, values: (_, marks) => marks.map(this.format) }],
      series: [across, ...lines.map(({ name }, index) => ({ label: name, value, stroke: () => hue(index), width: index < HUES ? 1.6 : 1, points: { size: 5, fill: () => hue(index) } }))],
      hooks: { draw: [(plot) => this.mark(plot)], setCursor: [() => this.newest()] },
    };
  }

  /** Leave room above and below the lines; a flat line is in the middle. */
  range(low, high) {
    const [from, to] = this.scale ?? [low, high];
    const room = 0.06 * (to - from || Math.abs(to) || 1);
    return [this.fromZero ? Math.min(0, from) : from - room, to + room];
  }

  /** Draw a vertical line at the marker. */
  mark({ ctx, bbox, valToPos }) {
    if (this.marker === null) return;
    ctx.fillStyle = colour("text");
    ctx.fillRect(valToPos(this.marker, "x", true), bbox.top, 1.5 * devicePixelRatio, bbox.height);
  }

  /** Without a cursor, show the values at the marker, or the newest, in the legend. */
  newest() {
    const { plot, marker } = this;
    if (!plot || plot.cursor.idx != null) return;
    const found = marker === null ? -1 : plot.data[0].findIndex((x) => x >= marker);
    plot.setLegend({ idx: found < 0 ? plot.data[0].length - 1 : found });
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const last = this.plot.data[0].length - 1;
    const at = Math.max(0, Math.min(last, (this.plot.cursor.idx ?? last) + step));
    this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][at], "x"), top: 0 });
  }
}

export class Plots {
  constructor(parent) {
    this.charts = Object.fromEntries(Object.entries(PLOTS).map(([name, given]) => [name, new Chart(parent, name, given)]));
    this.forget();
  }

  forget() {
    Object.assign(this, { rounds: [], network: [], speeds: new Map() });
  }

  /** Add points from the server; `origin` is the Unix second that their times count from. */
  take({ rounds, network, speeds, scales }, origin, isWhole) {
    if (isWhole) this.forget();
    const keep = (kept, points) => kept.push(...points) && kept.splice(0, kept.length - MOST);
    const dated = (points) => points.map(([t, ...values]) => [origin + t, ...values]);
    // A broker that continued from an older version makes its rounds again.
    if (rounds.length) this.rounds = this.rounds.filter(([, number]) => number < rounds[0][1]);
    keep(this.rounds, rounds);
    keep(this.network, dated(network));
    for (const [name, points] of Object.entries(speeds)) {
      if (!this.speeds.has(name)) this.speeds.set(name, []);
      keep(this.speeds.get(name), dated(points));
    }
    for (const name of this.speeds.keys()) {
      if (this.speeds.size <= 2 * MOST_LINES) break;
      this.speeds.delete(name);
    }
    this.scales = scales;
  }

  /** `marker`: {number, at} of a recorded moment. */
  draw(marker = { number: null, at: null }) {
    const { network, speeds, ...ofRounds } = this.charts;
    for (const [name, chart] of Object.entries(ofRounds)) {
      chart.draw([{ name, points: this.rounds.map((point) => [point[1], point[PLOTS[name].column]]) }], this.scales[name], marker.number);
    }
    network.draw(["up", "down"].map((name, index) => ({ name, points: this.network.map((point) => [point[0], point[index + 1]]) })), null, marker.at);
    speeds.draw([...this.speeds].sort().map(([name, points]) => ({ name, points })), null, marker.at);
  }
}
