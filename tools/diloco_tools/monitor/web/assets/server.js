// The server's figures, the header's facts and the event log: words for each, from a snapshot.

import { NONE, SIGNS, bytes, clock, duration, levelTone, make, names, plural, say, scaled, setting } from "./format.js";

const MOST_EVENTS = 200;
const MOST_DATA_SETS = 6;
// Rows of the server panel of which the history of a run says nothing.
const UNRECORDED = new Set(["Deaths", "Rejected", "Malformed messages", "Checkpoint", "Fragment submissions"]);

const SECURITY = {
  keys: "keys",
  loopback: "loopback only",
  INSECURE: "INSECURE: whoever reaches the broker may train, steer and read; serve --keys DIR asks for keys",
};

/** The same for a moment of a recorded run: what nobody wrote down is not shown as nothing. */
export function recordedMetrics(snapshot) {
  return metrics(snapshot, 0, null).filter(([title]) => !UNRECORDED.has(title));
}

/** Rows of the server panel as [title, text, tone]; `elapsed` seconds since the snapshot was made. */
export function metrics(snapshot, elapsed, cpuShare) {
  const { outer, totals, counts, loop, checkpoint, reducer } = snapshot;
  const refused = Object.entries(totals.refused ?? {}).map(([code, count]) => `${code} ${count}`).join(", ");
  const turn = snapshot.fragments.find((part) => part.fragment === snapshot.round?.fragment);
  const scheduled = (now, given) => (typeof now === "number" && now !== given ? `${Number(now.toPrecision(3))} of ${setting(given)}` : setting(given));
  const isOdd = (count) => (count ? "uneasy" : "");
  return [
    ...ends(snapshot.end),
    ...asked(snapshot.orders ?? []),
    ...data(snapshot.data_sets ?? []),
    ["Outer learning rate", outer.lr === null ? "the optimizer's own" : scheduled(turn?.lr, outer.lr)],
    ["Outer momentum", outer.momentum === null ? "none of its own" : `${scheduled(turn?.momentum, outer.momentum)}${outer.nesterov ? ", Nesterov" : ""}`],
    ["Outer optimizer", [outer.optimizer, outer.variant].filter(Boolean).join(" ") || NONE],
    ["Pending submissions", pending(snapshot)],
    ["DN buffer", outer.buffer > 1 ? `${snapshot.fragments.map((part) => `${part.buffered}/${outer.buffer}`).join(", ") || `0/${outer.buffer}`} gradients` : "none"],
    ["Steps to a boundary (H)", dylu(snapshot)],
    ...(snapshot.security ? [["Security", SECURITY[snapshot.security] ?? snapshot.security, snapshot.security === "INSECURE" ? "bad" : ""]] : []),
    ["Workers", `${counts.alive} alive, ${counts.participating} participating, ${counts.averaged} averaged`],
    ["Deaths", String(totals.deaths), totals.deaths ? "bad" : ""],
    ["Fragment submissions", fragments(snapshot)],
    ["Total submissions", `${totals.contributions ?? NONE} counted${totals.pushes ? `, ${plural(totals.pushes, "push", "pushes")}` : ""}`],
    ["Rejected", `${totals.rejected}${refused ? `: ${refused}` : ""}`, isOdd(totals.rejected)],
    ["Malformed messages", String(totals.malformed), isOdd(totals.malformed)],
    ...(snapshot.sites_away ?? []).map(({ name, workers, away_s: away }) => ["Site missing", `${name} (${workers}), for ${duration(away + elapsed)}`, "bad"]),
    ...(snapshot.parent ? parentOf(snapshot.parent, elapsed) : [["Checkpoint", saved(checkpoint, elapsed), checkpoint?.error ? "bad" : ""]]),
    ["Traffic", `${bytes(totals.bytes_up)} up, ${bytes(totals.bytes_down)} down`],
    ["CPU", cpu(loop.cpu_s, cpuShare)],
    ["Memory (RSS)", loop.rss_bytes === null ? NONE : bytes(loop.rss_bytes)],
    ["Longest turn", loop.longest_turn_ms === null ? NONE : `${scaled(loop.longest_turn_ms)} ms`],
    ...told(snapshot),
    ...(reducer.quorum === null ? [] : [["Quorum", `${reducer.quorum}, grace ${setting(reducer.grace_s)} s, late work: ${reducer.late}`]]),
  ];
}

/** The end that the run was given, and how far it is. */
function ends(end) {
  if (!end) return [];
  const { max_rounds: rounds, token_budget: tokens, max_time_s: limit } = end;
  const parts = [
    typeof rounds === "number" ? `${end.rounds} of ${plural(rounds, "round")}` : "",
    typeof tokens === "number" ? `${scaled(end.tokens)} of ${scaled(tokens)} tokens` : "",
    typeof limit === "number" ? `${duration(end.seconds)} of ${duration(limit)}` : "",
    end.is_over ? "the run is over" : "",
  ];
  return [["Ends", parts.filter(Boolean).join(", ")]];
}

/** Of a relay: whose run its workers take part in, and how it stands with that. */
function parentOf(parent, elapsed) {
  if (!parent) return [];
  const { address, name, lost_s: lost, offered_s: offered } = parent;
  const parts = [
    `${address} as ${name}`,
    lost === null ? "there" : `not there for ${duration(lost + elapsed)}`,
    offered === null ? "" : `the site's push waits for ${duration(offered + elapsed)}`,
  ];
  return [["Parent", parts.filter(Boolean).join(", "), lost === null ? "" : "bad"]];
}

/** What an operator has asked all workers to do, and who has not answered. */
function asked(orders) {
  return orders.map(({ action, waiting, saved: done, left }) => {
    const parts = [waiting.length ? `no answer from ${names(waiting)}` : "", done ? `${done} saved` : "", left ? `${left} left` : ""];
    return [`Asked to ${action === "save_all" ? "save" : action === "stop_all" ? "stop" : action}`, parts.filter(Boolean).join(", "), "uneasy"];
  });
}

/** How far the work queue is with each data set. */
function data(sets) {
  const rows = sets.slice(0, MOST_DATA_SETS).map(({ name, size, epochs, epoch, counted, held }) => {
    const whole = size * epochs;
    if (whole && counted >= whole) return [`Data set ${name}`, `all ${scaled(whole)} units counted`];
    const parts = [
      `epoch ${epoch + 1}${whole ? ` of ${epochs}` : ""}`,
      `${scaled(counted)} ${whole ? `of ${scaled(whole)} ` : ""}units counted`,
      held ? `${scaled(held)} handed out` : "",
      whole ? `${scaled(Math.max(0, whole - counted - held))} left` : "",
    ];
    return [`Data set ${name}`, parts.filter(Boolean).join(", ")];
  });
  const more = sets.length - MOST_DATA_SETS;
  return more > 0 ? [...rows, ["Data sets", `and ${more} more`]] : rows;
}

/** What the run was told, where the broker says so; a limit of 0 is none. */
function told(snapshot) {
  const { liveness, asynchronous, fragments: parts } = snapshot;
  const limit = (title, value, suffix, none) => (typeof value === "number" ? [[title, value ? `${setting(value)} s${suffix}` : none]] : []);
  const rows = [
    ...limit("Dead after", liveness?.heartbeat_timeout_s, " of silence", "never for its silence"),
    ...limit("Stalled after", liveness?.stall_timeout_s, " without a step", "never"),
    ...limit("Time to reconnect", liveness?.disconnect_grace_s, "", "none"),
  ];
  if (asynchronous) {
    const { dylu: isOn, dylu_min_steps: least, max_staleness: most, staleness_weight: weight, slots, deadline_s: deadline } = asynchronous;
    rows.push(["DyLU", isOn ? `on, at least ${plural(least, "step")}` : "off"]);
    rows.push(["Staleness", `${most === null ? "any" : `up to ${plural(most, "version")}`}, ${weight === "none" ? "not weighed" : `weight ${weight}`}`]);
    rows.push(["Slots", `${slots}, ${setting(deadline)} s without progress`]);
  }
  if (parts.length > 1) rows.push(["Fragments", `${parts.length} ${snapshot.fragment_pattern ?? ""}`.trim()], ["Merging", merging(snapshot)]);
  return rows;
}

function merging({ fragment_delay_auto: isAuto, fragment_sync_delay: delay, fragment_max_delay: most, fragment_merge: merge, fragment_update_alpha: alpha, workers }) {
  const delays = workers.map((worker) => worker.merge_delay).filter((steps) => typeof steps === "number");
  const last = isAuto && delays.length ? `, last after ${Math.min(...delays)} to ${Math.max(...delays)} steps` : "";
  const when = isAuto ? `when the reply is here${last}` : `after ${plural(delay, "step")}`;
  const limit = typeof most === "number" && (isAuto || most !== delay) ? `, at most ${most}` : "";
  return `${when}${limit}, ${merge === "alpha" ? `alpha ${setting(alpha)}` : merge}`;
}

/** Ids of those that the round waits for: those that train towards their push, and the others. As feed.py. */
function awaited(round, workers) {
  const well = new Set(workers.filter(({ health, state }) => health === "ok" && state === "training").map(({ id }) => id));
  return { training: round.missing.filter((id) => well.has(id)), missing: round.missing.filter((id) => !well.has(id)) };
}

function pending({ mode, round, reducer, workers }) {
  if (mode === "async") return `${reducer.submissions} under way, ${reducer.waiting} waiting for a slot`;
  if (!round || (!round.number && !round.expected.length)) return "no round yet";
  const { training, missing } = awaited(round, workers);
  const parts = [`${round.arrived.length} of ${round.expected.length} arrived`];
  if (missing.length) parts.push(`missing ${names(missing)}`);
  if (training.length) parts.push(`training: ${names(training)}`);
  return parts.join("; ");
}

function dylu({ workers, sync_every }) {
  const steps = workers.map((worker) => worker.sync_every).filter((count) => count > 0);
  if (!steps.length) return sync_every === null ? NONE : `${sync_every} for all`;
  const [low, high] = [Math.min(...steps), Math.max(...steps)];
  return low === high ? `${low} for all` : `${low} to ${high}`;
}

function fragments({ fragments: parts }) {
  if (!parts.length) return NONE;
  const counts = parts.map((part) => part.contributions ?? 0);
  const sum = counts.reduce((a, b) => a + b, 0);
  return parts.length === 1 ? String(sum) : `${sum}: ${counts.join(", ")}`;
}

function saved(checkpoint, elapsed) {
  if (!checkpoint) return "no save folder";
  if (checkpoint.error) return checkpoint.error;
  if (checkpoint.age_s === null) return "none yet";
  return `round ${checkpoint.round ?? NONE}, ${duration(checkpoint.age_s + elapsed)} ago`;
}

function cpu(seconds, share) {
  if (seconds === null) return NONE;
  return share === null ? `${duration(seconds)} in all` : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}% of a core, ${duration(seconds)} in all`;
}

export class Metrics {
  constructor(parent) {
    this.parent = parent;
    this.rows = new Map();
  }

  show(rows) {
    const here = new Set(rows.map(([title]) => title));
    for (const [title, { node }] of this.rows) {
      if (!here.has(title)) {
        node.remove();
        this.rows.delete(title);
      }
    }
    for (const [index, [title, text, tone = ""]] of rows.entries()) {
      if (!this.rows.has(title)) {
        const value = make("dd");
        const node = make("div", {}, make("dt", { textContent: title }), value);
        this.parent.insertBefore(node, this.parent.children[index] ?? null);
        this.rows.set(title, { node, value });
      }
      const { value } = this.rows.get(title);
      value.dataset.tone = tone;
      say(value, tone ? `${SIGNS[tone]} ${text}` : text);
    }
  }
}

/** What the header says of the run, by the id of its element. */
export function facts(snapshot, elapsed, isFresh) {
  const { mode, round, model, uptime_s, paused_for_s } = snapshot;
  const state = snapshot.ended && snapshot.state === "waiting" ? "ended" : snapshot.state;
  const hasRound = round && (round.number || round.expected.length);
  const versions = snapshot.fragments.map((part) => part.version);
  return {
    run: snapshot.run ? `run ${snapshot.run.slice(0, 8)}` : "no run yet",
    mode: snapshot.fragments.length > 1 ? `${mode}, ${snapshot.fragments.length} fragments` : mode || NONE,
    condition: state === "paused" && typeof paused_for_s === "number" ? `paused for ${duration(paused_for_s + elapsed)}` : state || NONE,
    "round-title": mode === "async" ? "Version" : "Round",
    round: mode === "async" ? String(Math.max(0, ...versions)) : hasRound ? String(round.number) : NONE,
    "round-more": mode === "async" || !hasRound ? "" : `${round.arrived.length}/${round.expected.length} arrived, ${round.phase} for ${duration(round.age_s + elapsed)}`,
    // Nobody knows whether a broker that says nothing is still up.
    uptime: clock(uptime_s + (isFresh ? elapsed : 0)),
    model: model ? `${scaled(model.parameters)} parameters, ${bytes(model.bytes)}` : "not known yet",
    counts: `${snapshot.counts.alive} alive · ${snapshot.counts.participating} participating · ${snapshot.counts.averaged} averaged${snapshot.workers_wanted === null ? "" : ` · ${snapshot.workers_wanted} wanted`}`,
  };
}

/** A list of {age, level, text}, newest first; rows are made once and their ages go on. */
export class Log {
  constructor(parent) {
    this.parent = parent;
    this.rows = new Map(); // key -> {age node, second of this page's clock at which it happened}
  }

  /** `entries`: [{key, age_s, level, text}], oldest first; `now`: seconds of this page's clock. */
  show(entries, now, { keep }) {
    if (!keep) {
      const here = new Set(entries.map((entry) => entry.key));
      for (const [key, row] of this.rows) {
        if (!here.has(key)) this.drop(key, row);
      }
    }
    for (const entry of entries) {
      if (this.rows.has(entry.key)) continue;
      const age = make("span", { className: "age" });
      const tone = levelTone(entry.level);
      const level = entry.level === "info" ? [] : [make("span", { className: "level", textContent: `${SIGNS[tone]} ${entry.level}: ` })];
      const node = make("li", {}, age, make("span", {}, ...level, entry.text));
      node.dataset.tone = tone;
      this.parent.prepend(node);
      this.rows.set(entry.key, { node, age, at: now - entry.age_s });
    }
    if (!keep) {
      [...entries].reverse().forEach(({ key }, index) => {
        const { node } = this.rows.get(key);
        if (this.parent.children[index] !== node) this.parent.insertBefore(node, this.parent.children[index] ?? null);
      });
    }
    for (const [key, row] of this.rows) {
      if (this.rows.size <= MOST_EVENTS) break;
      this.drop(key, row);
    }
  }

  drop(key, row) {
    row.node.remove();
    this.rows.delete(key);
  }

  clear() {
    for (const [key, row] of [...this.rows]) this.drop(key, row);
  }

  tick(now) {
    for (const { age, at } of this.rows.values()) say(age, `${duration(now - at)} ago`);
  }
}
