// The worker table. A row stays the same element for as long as its worker is there, so focus stays too;
// it goes when the feed says so, and not because a button was pressed.

import { NONE, SIGNS, duration, healthTone, make, number, rate, say, scaled } from "./format.js";

const lost = (worker) => ["lost", "dead"].includes(worker.health); // their state is unknown

const HEARTBEAT_S = 30; // between two heartbeats, unless the broker tolerates less than three of these
const STANDS_OUT = 5; // times the usual norm of a push, after which the broker warns of it
const SLACK = 1.5; // intervals after which a worker is silent

/** Seconds without a report that are nothing to wonder at. */
export function usualSilence({ liveness }) {
  const tolerated = liveness?.heartbeat_timeout_s;
  return SLACK * (tolerated ? Math.min(HEARTBEAT_S, tolerated / 3) : HEARTBEAT_S);
}

/** Inner steps by now, by the worker's own pace; null where its report is all there is. As estimate.py. */
function innerStepNow(worker, elapsed, silence) {
  const { inner_age_s: told, steps_per_s: pace } = worker;
  if (typeof told !== "number" || !(pace > 0) || worker.health !== "ok" || worker.state !== "training") return null;
  const age = told + elapsed;
  if (!(age >= 0 && Math.max(age, worker.beat_age_s + elapsed) <= silence)) return null;
  const steps = Math.floor(Math.min(worker.inner_step + pace * age, worker.sync_every));
  return steps > worker.inner_step ? steps : null;
}

const flow = (value, direction) => (value === undefined ? (direction === "up" ? NONE : "") : `${rate(value)} ${direction}`);

function ofSeveral(worker) {
  const { processes, connections } = worker;
  if (!(processes > 1)) return "";
  return connections >= processes ? ` x${processes}` : ` x${connections}/${processes}`;
}

/** Those behind relays, each below its own, with what that has told of them. As tree.py. */
export function everyone(workers) {
  return workers.flatMap((worker) => [
    { ...worker, level: 0, under: [] },
    ...below(worker, worker.behind ?? []),
  ]);
}

function below(relay, behind) {
  const under = [relay.id];
  return behind.map((told) => {
    const level = told.level + 1;
    under.length = level;
    const path = [...under];
    under.push(told.worker_id);
    const health = relay.health === "lost" && told.health !== "dead" ? "unknown" : relay.health === null ? null : told.health;
    return { ...told, id: told.worker_id, level, under: path, health, beat_age_s: relay.health === null ? null : told.beat_age_s };
  });
}

function nameOf({ id, host, pid, under }) {
  const where = under.length ? `, behind ${under.join(", ")}` : "";
  return (host ? `${id} on ${host}${pid === undefined ? "" : `, process ${pid}`}` : id) + where;
}

const INDENT = "\u2003"; // of a worker below its relay: spaces that no page folds
const titleOf = (w) => INDENT.repeat(w.level) + w.id + ofSeveral(w) + (w.workers == null ? "" : ` (${w.workers})`);

const COLUMNS = [
  { title: "Worker", key: "id", left: true, text: titleOf, more: (w) => (w.host ? INDENT.repeat(w.level) + w.host : ""), sort: (w) => w.id },
  { title: "Health", key: "health", left: true, text: (w) => w.health, more: (w) => (lost(w) ? "" : w.state), sort: (w) => ({ good: 2, uneasy: 1, bad: 0 })[healthTone(w.health)] ?? 3 },
  { title: "Round", key: "round", text: (w) => (w.round === null ? NONE : String(w.round)), sort: (w) => w.round ?? -1 },
  { title: "Inner step", key: "inner", moves: true, text: (w) => (lost(w) ? NONE : `${w.inner_step}/${w.sync_every}`), sort: (w) => w.inner_step / (w.sync_every || 1) },
  { title: "Steps/s", key: "speed", text: (w) => (lost(w) ? NONE : scaled(w.steps_per_s)), sort: (w) => w.steps_per_s ?? -1 },
  { title: "Loss", key: "loss", text: (w) => (w.loss_is_finite ? number(w.loss) : "not finite"), more: (w) => (w.delta_norm == null ? "" : `norm ${number(w.delta_norm)}`), tone: (w) => (!w.loss_is_finite ? "bad" : w.times_usual > STANDS_OUT ? "uneasy" : ""), sort: (w) => w.loss ?? Infinity },
  { title: "Last sync", key: "sync", age: (w) => w.sync_age_s, sort: (w) => w.sync_age_s ?? Infinity },
  { title: "Heartbeat", key: "beat", age: (w) => w.beat_age_s, sort: (w) => w.beat_age_s ?? Infinity },
  { title: "Staleness", key: "staleness", text: (w) => String(w.staleness), sort: (w) => w.staleness },
  { title: "Network", key: "network", text: (w, rates) => flow(rates[w.id]?.[0], "up"), more: (w, rates) => flow(rates[w.id]?.[1], "down"), sort: (w, rates) => (rates[w.id] ?? [-1, 0]).reduce((a, b) => a + b) },
];

export class WorkerTable {
  constructor({ head, body, empty, onKick }) {
    Object.assign(this, { head, body, empty, onKick });
    this.rows = new Map(); // worker id -> {node, cells, worker}
    this.sortedBy = COLUMNS[0];
    this.direction = 1;
    this.last = { workers: [], rates: {} };
    for (const column of COLUMNS) {
      const button = make("button", { type: "button", textContent: column.title, title: `Sort by ${column.title.toLowerCase()}` });
      button.addEventListener("click", () => this.sortBy(column));
      column.cell = make("th", { scope: "col", className: column.left ? "left" : "" }, button);
      column.cell.setAttribute("role", "columnheader");
      head.append(column.cell);
    }
    const last = make("th", { scope: "col" }, make("span", { className: "unseen", textContent: "Actions" }));
    last.setAttribute("role", "columnheader");
    head.append(last);
    this.mark();
  }

  sortBy(column) {
    this.direction = this.sortedBy === column ? -this.direction : 1;
    this.sortedBy = column;
    this.mark();
    this.arrange();
  }

  mark() {
    for (const column of COLUMNS) {
      const sort = column === this.sortedBy ? (this.direction > 0 ? "ascending" : "descending") : "none";
      column.cell.setAttribute("aria-sort", sort);
    }
  }

  show(direct, rates) {
    const workers = everyone(direct);
    this.last = { workers, rates };
    const here = new Set(workers.map((worker) => worker.id));
    for (const [id, row] of this.rows) {
      if (!here.has(id)) {
        row.node.remove();
        this.rows.delete(id);
      }
    }
    for (const worker of workers) {
      const row = this.rows.get(worker.id) ?? this.add(worker.id);
      row.worker = worker;
      for (const column of COLUMNS) this.fill(row, column, rates);
    }
    this.empty.hidden = workers.length > 0;
    this.body.parentElement.hidden = workers.length === 0;
    this.arrange();
  }

  add(id) {
    const node = make("tr");
    node.setAttribute("role", "row");
    const cells = {};
    for (const column of COLUMNS) {
      const main = make("span", { className: "main" });
      const more = make("span", { className: "more" });
      const cell = make(column.key === "id" ? "th" : "td", { className: `${column.key}${column.left ? " left" : ""}` }, main);
      if (column.key === "id") cell.scope = "row";
      if (column.more) cell.append(more);
      cell.setAttribute("role", column.key === "id" ? "rowheader" : "cell");
      cell.dataset.label = column.title;
      node.append(cell);
      cells[column.key] = { cell, main, more };
    }
    const kick = make("button", { type: "button", className: "kick", textContent: "Kick" });
    kick.setAttribute("aria-label", `Kick ${id}`);
    kick.addEventListener("click", () => this.onKick(this.rows.get(id).worker));
    const last = make("td", { className: "do" }, kick);
    last.setAttribute("role", "cell");
    node.append(last);
    const row = { node, cells, kick, worker: null };
    this.rows.set(id, row);
    this.body.append(node);
    return row;
  }

  fill(row, column, rates) {
    const { cell, main, more } = row.cells[column.key];
    const { worker } = row;
    if (column.key === "health") {
      const tone = healthTone(worker.health);
      cell.dataset.tone = tone;
      say(main, worker.health === null ? NONE : `${SIGNS[tone]} ${worker.health}`);
    } else if (column.text && !column.moves) {
      say(main, column.text(worker, rates));
    }
    if (column.tone) cell.dataset.tone = column.tone(worker);
    if (column.more) say(more, column.more(worker, rates));
    if (column.key === "id") cell.title = nameOf(worker);
  }

  /**
   * Relative times go on counting: `elapsed` seconds since the snapshot was made; and inner steps, marked
   * with ~ since nobody has told them, of workers that are silent for at most `silence` seconds.
   */
  tick(elapsed, silence) {
    for (const row of this.rows.values()) {
      for (const column of COLUMNS) {
        if (column.moves) {
          const steps = innerStepNow(row.worker, elapsed, silence);
          const { main, cell } = row.cells[column.key];
          say(main, steps === null ? column.text(row.worker) : `~${steps}/${row.worker.sync_every}`);
          cell.title = steps === null ? "" : `By its pace; it told ${row.worker.inner_step}, ${duration(row.worker.inner_age_s + elapsed)} ago`;
        }
        if (!column.age) continue;
        const age = column.age(row.worker) ?? null;
        say(row.cells[column.key].main, age === null ? NONE : `${duration(age + elapsed)} ago`);
      }
    }
  }

  allow(isAllowed) {
    for (const { kick } of this.rows.values()) kick.disabled = !isAllowed;
  }

  arrange() {
    const { sort } = this.sortedBy;
    const keys = new Map(this.last.workers.map((worker) => [worker.id, sort(worker, this.last.rates)]));
    const before = (x, y) => (keys.get(x) < keys.get(y) ? -1 : keys.get(x) > keys.get(y) ? 1 : 0) * this.direction || (x < y ? -1 : 1);
    const rows = [...this.rows.values()];
    // Of two the branches are compared where they part, and a relay comes before those behind it.
    const path = ({ worker }) => [...worker.under, worker.id];
    rows.sort((one, other) => {
      const [x, y] = [path(one), path(other)];
      const parting = x.findIndex((id, place) => id !== y[place]);
      if (parting < 0) return -1;
      return parting < y.length ? before(x[parting], y[parting]) : 1;
    });
    rows.forEach(({ node }, index) => {
      // Only rows that are out of place move: a moved element loses focus.
      if (this.body.children[index] !== node) this.body.insertBefore(node, this.body.children[index] ?? null);
    });
  }
}
