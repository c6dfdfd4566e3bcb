// What the plots show: points kept for as long as the page is open, and no longer than `MOST`.

import { Chart } from "./charts.js";
import { duration, number, rate, scaled } from "./format.js";

const MOST = 2100; // points of a line; a recorded run has up to 2001
const MOST_WORKERS = 256;

export class History {
  /** `isRecorded`: times count from the start of the run, else back from now. */
  constructor(parent, isRecorded) {
    this.isRecorded = isRecorded;
    const time = isRecorded ? "elapsed" : "past";
    const none = "No round has closed yet, as far as the dashboard knows.";
    const loss = (value) => (value !== 0 && Math.abs(value) < 0.01 ? number(value) : String(Number(value.toPrecision(4))));
    const seconds = (value, exact) => (value === null ? "—" : exact ? duration(value) : `${scaled(value)} s`);
    const count = (value) => (value === 0 ? "0" : scaled(value));
    const nothing = (format) => (value, exact) => (value === null ? "—" : format(value, exact));
    this.charts = {
      loss: new Chart({ id: "plot-loss", title: "Loss", unit: "mean of a round", format: nothing(loss), x: "round", fromZero: false, recent: true, empty: "No worker has reported a loss yet." }),
      seconds: new Chart({ id: "plot-seconds", title: "Round time", unit: "from opening to release", format: nothing(seconds), x: "round", recent: true, empty: none }),
      norm: new Chart({ id: "plot-norm", title: "Pseudo-gradient norm", unit: "mean of a round", format: nothing((v) => (v === 0 ? "0" : Math.abs(v) < 0.001 ? v.toExponential(1) : String(Number(v.toPrecision(3))))), x: "round", recent: true, empty: none }),
      network: new Chart({ id: "plot-network", title: "Network", unit: "at the broker", format: nothing((v) => (v === 0 ? "0" : rate(v))), x: time, empty: "No bytes have been counted yet." }),
      speeds: new Chart({ id: "plot-speeds", title: "Speed", unit: "inner steps/s of each worker", format: nothing(count), x: time, empty: "No worker has told its speed yet." }),
    };
    parent.append(...Object.values(this.charts).map((chart) => chart.node));
    this.forget();
  }

  forget() {
    this.rounds = [];
    this.network = [];
    this.speeds = new Map();
  }

  /** Take what the dashboard sent; `origin` is the second of this page's clock that its times count from. */
  take(series, origin, isWhole) {
    if (isWhole) this.forget();
    this.rounds.push(...series.rounds);
    this.network.push(...series.network.map(([t, up, down]) => [origin + t, up, down]));
    for (const [name, points] of Object.entries(series.speeds)) {
      const kept = this.speeds.get(name) ?? [];
      kept.push(...points.map(([t, speed]) => [origin + t, speed]));
      kept.splice(0, kept.length - MOST);
      this.speeds.set(name, kept);
    }
    this.rounds.splice(0, this.rounds.length - MOST);
    this.network.splice(0, this.network.length - MOST);
    for (const name of this.speeds.keys()) {
      if (this.speeds.size <= MOST_WORKERS) break;
      this.speeds.delete(name);
    }
  }

  /** `now`: the second that "now" is; `marker`: {number, elapsed} of a recorded moment. */
  draw(now, marker = null) {
    const rounds = (column) => [{ name: "", points: this.rounds.map((point) => [point[1], point[column]]) }];
    const number_ = marker?.number ?? null;
    const at = marker?.elapsed ?? null;
    this.charts.loss.draw(rounds(4), number_);
    this.charts.seconds.draw(rounds(2), number_);
    this.charts.norm.draw(rounds(5), number_);
    const line = (name, column) => ({ name, points: this.network.map((point) => [point[0] - now, point[column]]) });
    this.charts.network.draw([line("up", 1), line("down", 2)], at);
    const speeds = [...this.speeds].sort(([a], [b]) => (a < b ? -1 : 1));
    this.charts.speeds.draw(speeds.map(([name, points]) => ({ name, points: points.map(([t, v]) => [t - now, v]) })), at);
  }
}
