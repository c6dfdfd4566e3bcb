// What the plots show: points kept for as long as the page is open, and no longer than `MOST`.

import { AXES, Chart, PLOTS } from "./charts.js";

const MOST = 10_000; // points of a line
const MOST_WORKERS = 256;

export class History {
  /** `isRecorded`: times count from the start of the run, else back from now. */
  constructor(parent, isRecorded) {
    const axes = { round: AXES.round, time: isRecorded ? AXES.elapsed : AXES.past };
    const charts = Object.entries(PLOTS).map(([name, given]) => [name, new Chart({ id: `plot-${name}`, ...given, axis: axes[given.x], isWhole: isRecorded })]);
    this.charts = Object.fromEntries(charts);
    parent.append(...Object.values(this.charts).map((chart) => chart.node));
    this.forget();
  }

  forget() {
    Object.assign(this, { rounds: [], network: [], speeds: new Map() });
  }

  /** Take what the server sent; `origin` is the second of this page's clock that its times count from. */
  take(series, origin, isWhole) {
    if (isWhole) this.forget();
    const keep = (kept, points) => kept.push(...points) && kept.splice(0, kept.length - MOST);
    const dated = (points) => points.map(([t, ...values]) => [origin + t, ...values]);
    keep(this.rounds, series.rounds);
    keep(this.network, dated(series.network));
    for (const [name, points] of Object.entries(series.speeds)) {
      if (!this.speeds.has(name)) this.speeds.set(name, []);
      keep(this.speeds.get(name), dated(points));
    }
    for (const name of this.speeds.keys()) {
      if (this.speeds.size <= MOST_WORKERS) break;
      this.speeds.delete(name);
    }
  }

  /** `now`: the second that "now" is; `marker`: {number, elapsed} of a recorded moment. */
  draw(now, marker = null) {
    const { loss, seconds, norm, network, speeds } = this.charts;
    for (const [chart, column] of [[seconds, 2], [loss, 4], [norm, 5]]) {
      chart.draw([{ name: "", points: this.rounds.map((point) => [point[1], point[column]]) }], marker?.number ?? null);
    }
    const over = (points, column = 1) => points.map((point) => [point[0] - now, point[column]]);
    network.draw(["up", "down"].map((name, index) => ({ name, points: over(this.network, index + 1) })), marker?.elapsed ?? null);
    const byName = [...this.speeds].sort(([a], [b]) => (a < b ? -1 : 1));
    speeds.draw(byName.map(([name, points]) => ({ name, points: over(points) })), marker?.elapsed ?? null);
  }
}
