// The curves of a report, and when each worker was here, from the data in the page.

import { AXES, Chart, DAY, PLOTS, TIME_STEPS } from "./charts.js";
import { duration, make } from "./format.js";

const NS = "http://www.w3.org/2000/svg";
const ROW = 20; // pixels
const LONGEST_AWAY = 0.06; // of the axis: a time without a broker, or a pause, takes no more of it
const NEAR = 0.004; // of the axis: marks of one kind that are nearer are one
const SHAPES = {
  joined: ["joined", "M-3 -6L4 0L-3 6z"],
  back: ["came back", "M-3 -6L4 0L-3 6z"],
  left: ["left", "M-4 -5h8v10h-8z"],
  died: ["counted as dead", "M-5 -5L5 5M-5 5L5 -5"],
  kicked: ["removed by an operator", "M0 -6L6 0L0 6L-6 0z"],
  revoked: ["its key was revoked", "M0 -6L6 0L0 6L-6 0z"],
};
const STATES = { active: "contributed", here: "here", lost: "connection lost", stalled: "stalled", away: "no broker", pause: "the run was paused" };

const data = JSON.parse(document.getElementById("data").textContent);
const DATE = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
const iso = (at) => new Date(1000 * at).toISOString();
const moment = (at) => `${iso(at).slice(0, 10)} ${iso(at).slice(11, 19)} UTC`;

function element(tag, attributes, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const titled = (text) => element("title", {}, text);

/** Seconds of the run along an axis on which long times without a broker, and long pauses, are short. */
class Timeline {
  constructor({ began, ended, away, pauses }) {
    const short = (this.short = []);
    for (const [start, end] of [...away, ...pauses].sort((one, other) => one[0] - other[0])) {
      const last = short[short.length - 1];
      if (last && start <= last[1]) last[1] = Math.max(last[1], end);
      else short.push([start, end]);
    }
    const shown = Math.max(1, ended - began - short.reduce((sum, [start, end]) => sum + end - start, 0));
    this.knots = [[began, 0]]; // [moment, place]
    const reach = (at, length) => this.knots.push([at, this.knots[this.knots.length - 1][1] + Math.max(0, length)]);
    for (const [start, end] of short) {
      reach(start, start - this.knots[this.knots.length - 1][0]);
      reach(end, Math.min(end - start, LONGEST_AWAY * shown));
    }
    reach(Math.max(ended, began + 1), Math.max(ended, began + 1) - this.knots[this.knots.length - 1][0]);
    this.length = this.knots[this.knots.length - 1][1];
  }

  at = (moment) => this.follow(moment, 0, 1);
  back = (place) => this.follow(place, 1, 0);

  follow(value, from, to) {
    const after = Math.max(1, this.knots.findIndex((knot) => knot[from] >= value));
    const [start, end] = [this.knots[after - 1], this.knots[after]];
    const share = end[from] > start[from] ? (value - start[from]) / (end[from] - start[from]) : 0;
    return start[to] + Math.min(1, Math.max(0, share)) * (end[to] - start[to]);
  }

  /** Round moments, about `step` of the axis apart, as places. */
  marks(step) {
    const found = [];
    const end = this.knots[this.knots.length - 1][0];
    const every = Math.max(step, (end - this.knots[0][0]) / 10_000); // a broker may be away for years
    for (let at = Math.ceil(this.knots[0][0] / every) * every; at <= end; at += every) {
      const place = this.at(at);
      const isShort = this.short.some(([start, end]) => start < at && at < end);
      if (!isShort && !(place - found[found.length - 1] < 0.6 * step)) found.push(place);
    }
    return found;
  }

  /** As one of `AXES`. */
  axis() {
    const mark = (place) => {
      const at = Math.round(this.back(place));
      return at % DAY ? iso(at).slice(11, this.length < 360 ? 19 : 16) : DATE.format(1000 * at);
    };
    return { steps: TIME_STEPS, over: "time", text: (place) => moment(this.back(place)), mark, splits: { splits: (_, __, low, high, step) => this.marks(step).filter((place) => low <= place && place <= high) } };
  }
}

const timeline = new Timeline(data);
const bands = data.away.map(([start, end]) => [timeline.at(start), timeline.at(end), "away"]);
const axes = { round: AXES.round(data.word), time: timeline.axis() };

for (const { plot, lines, ...words } of data.charts) {
  const given = PLOTS[plot];
  const isTime = given.x === "time";
  const chart = new Chart({ id: `plot-${words.id ?? plot}`, ...given, ...words, axis: axes[given.x], bands: isTime ? bands : [], isWhole: true, empty: words.empty ?? "Not in this history." });
  document.getElementById("charts").append(chart.node);
  chart.draw(isTime ? lines.map(({ name, points }) => ({ name, points: points.map(([at, y]) => [timeline.at(at), y]) })) : lines);
}

const percent = (at) => `${((100 * timeline.at(at)) / timeline.length).toFixed(2)}%`;

function stretch(kind, [start, end], y, height, ...title) {
  const width = Math.max(0.2, (100 * (timeline.at(end) - timeline.at(start))) / timeline.length);
  return element("rect", { class: kind, x: percent(start), width: `${width.toFixed(2)}%`, y, height }, ...title);
}

function sign(what) {
  return element("path", { class: what === "left" ? "left-run" : what, d: SHAPES[what][1] });
}

function marksOf(marks) {
  const last = {};
  return marks.flatMap(([at, what, text]) => {
    const place = timeline.at(at) / timeline.length;
    if (!SHAPES[what] || place - last[what] < NEAR) return [];
    last[what] = place;
    const shape = sign(what);
    shape.append(titled(`${moment(at)}: ${text}`));
    return [element("svg", { x: percent(at), y: ROW / 2, width: 1, height: 1, overflow: "visible" }, shape)];
  });
}

function row(name, ...layers) {
  return make("li", { className: "row" }, make("span", { className: "who", textContent: name, title: name }), element("svg", { width: "100%", height: ROW }, ...layers));
}

function rowOf({ id, spans, active, marks }) {
  const told = (kind, [start, end]) => titled(`${STATES[kind]} for ${duration(end - start)}, from ${moment(start)}`);
  const over = (kind, times) => times.map((time) => stretch(kind, time, 0, ROW, told(kind, time)));
  return row(
    id,
    element("rect", { class: "base", width: "100%", y: ROW / 2, height: 1 }),
    ...spans.map(([start, end, state]) => stretch(state, [start, end], 3, 14, told(state, [start, end]))),
    ...active.map((time) => stretch("active", time, 6, 8)),
    ...over("away", data.away),
    ...over("pause", data.pauses),
    ...marksOf(marks),
  );
}

function legend() {
  const kinds = new Set(data.workers.flatMap(({ spans }) => spans.map(([, , state]) => state)));
  if (data.workers.some(({ active }) => active.length)) kinds.add("active");
  if (data.away.length) kinds.add("away");
  if (data.pauses.length) kinds.add("pause");
  const marks = new Set(data.workers.flatMap((worker) => worker.marks.map(([, what]) => what)));
  const key = (node, width, viewBox, word) => make("span", {}, element("svg", { width, height: 12, viewBox }, node), word);
  return make(
    "p",
    { className: "legend" },
    ...Object.keys(STATES).filter((kind) => kinds.has(kind)).map((kind) => key(element("rect", { class: kind, width: 16, height: 12 }), 16, "0 0 16 12", STATES[kind])),
    ...Object.keys(SHAPES).filter((what) => marks.has(what)).map((what) => key(sign(what), 14, "-7 -6 14 12", SHAPES[what][0])),
  );
}

if (data.workers.length) {
  const step = TIME_STEPS.find((each) => 5 * each >= timeline.length) ?? timeline.length / 5;
  const texts = timeline.marks(step).map((place) => {
    const share = place / timeline.length;
    const anchor = share < 0.08 ? "start" : share > 0.92 ? "end" : "middle";
    return element("text", { x: `${100 * share}%`, y: 12, "text-anchor": anchor }, axes.time.mark(place));
  });
  const foot = row("", ...texts);
  foot.classList.add("foot");
  document.getElementById("strip").append(make("ol", {}, ...data.workers.map(rowOf), foot), legend());
}
