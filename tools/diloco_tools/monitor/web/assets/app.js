// The page: what comes from the dashboard program goes to the parts that show it, and once a second all
// ages go on. Text of workers is only ever set as text.

import { Control, UNHEARD } from "./control.js";
import { SIGNS, duration, make, plural, say } from "./format.js";
import { History } from "./history.js";
import { Log, Metrics, facts, metrics, recordedMetrics } from "./server.js";
import { Stream, get, keepToken, takeToken } from "./stream.js";
import { WorkerTable, usualSilence } from "./workers.js";

const $ = (id) => document.getElementById(id);
const seconds = () => performance.now() / 1000;
const TONES = { LIVE: "good", LATE: "uneasy", STALE: "bad", REPLAY: "quiet" };
const VERDICTS = { ended: "ENDED", waiting: "WAITING" };
const REFRESH_KEY = "diloco-refresh";

const view = {
  session: null,
  picture: null, // {snapshot, rates}
  pulse: { missed: 0, restarts: 0, malformed: 0, problem: null, refusal: "" },
  verdict: "healthy",
  reasons: [],
  madeAt: null, // second of this page's clock at which the snapshot shown left the broker
  heardAt: null, // the same of the newest snapshot
  loss: "", // why the dashboard program is not heard
  word: "",
  cpu: null, // {epoch, uptime, cpu_s, share}
};

takeToken();

const control = new Control({
  onToken: async (token) => {
    keepToken(token);
    await begin();
  },
});
const table = new WorkerTable({
  head: $("worker-head"),
  body: $("worker-rows"),
  empty: $("no-workers"),
  onKick: (worker) => control.kick(worker),
});
const server = new Metrics($("metrics"));
const events = new Log($("event-list"));
const rejections = new Log($("rejection-list"));
let history = null;

const stream = new Stream({
  onState: (state) => {
    const now = seconds();
    heard(state, now);
    if (state.picture) {
      view.picture = state.picture;
      view.verdict = state.verdict;
      view.reasons = state.reasons;
      view.madeAt = view.heardAt;
      note(state.picture.snapshot);
      history.take(state.series, now, state.whole);
    }
    render();
    history.draw(now);
  },
  onPulse: (pulse) => {
    heard(pulse, seconds());
    tick();
  },
  onLoss: (reason) => {
    view.loss = reason;
    tick();
  },
});

function heard(pulse, now) {
  view.loss = "";
  view.pulse = pulse;
  view.heardAt = pulse.age_s === null ? null : now - pulse.age_s;
}

/** The broker tells how much CPU it has used so far: what it uses now is the difference. */
function note({ epoch, uptime_s, loop }) {
  const last = view.cpu;
  if (loop.cpu_s === null || last?.uptime_s === uptime_s) return;
  const share = last && last.epoch === epoch && uptime_s > last.uptime_s ? (loop.cpu_s - last.cpu_s) / (uptime_s - last.uptime_s) : null;
  view.cpu = { epoch, uptime_s, cpu_s: loop.cpu_s, share };
}

function freshness() {
  if (view.session?.mode === "replay") return ["REPLAY", null];
  if (view.heardAt === null) return ["STALE", null];
  const age = seconds() - view.heardAt;
  const { live_below_s: live, stale_above_s: stale } = view.session;
  return [age < live ? "LIVE" : age <= stale ? "LATE" : "STALE", age];
}

/** Everything that a new snapshot changes. */
function render() {
  if (!view.picture) return tick();
  const { snapshot, rates } = view.picture;
  const isRecorded = view.session.mode === "replay";
  // A history has no health and no heartbeats.
  const workers = isRecorded ? snapshot.workers.map((worker) => ({ ...worker, health: null, beat_age_s: null })) : [...snapshot.workers, ...(snapshot.dead ?? [])];
  table.show(workers, rates);
  say($("no-workers"), snapshot.ended ? "All workers have left." : "No workers yet.");
  const now = seconds();
  const keyed = snapshot.events.map((event) => ({ ...event, key: `${snapshot.epoch} ${event.sequence}` }));
  events.show(keyed, isRecorded ? now : view.madeAt, { keep: !isRecorded });
  $("no-events").hidden = events.rows.size > 0;
  const refused = (snapshot.rejections ?? []).map(({ age_s, worker, code, text }, index) => ({
    // Nothing numbers them, so the moment at which each happened has to.
    key: `${snapshot.epoch} ${worker} ${code} ${isRecorded ? index : (snapshot.uptime_s - age_s).toFixed(1)} ${text}`,
    age_s,
    level: "warning",
    text: `${worker}: ${code}: ${text}`,
  }));
  rejections.show(refused, isRecorded ? now : view.madeAt, { keep: false });
  $("rejections").hidden = refused.length === 0;
  const { round } = snapshot;
  $("arrived").hidden = snapshot.mode === "async" || !round?.expected.length;
  $("arrived").max = Math.max(1, round?.expected.length ?? 1);
  $("arrived").value = round?.arrived.length ?? 0;
  $("insecure").hidden = snapshot.security !== "INSECURE";
  say($("epoch"), `broker ${snapshot.version}, life ${snapshot.epoch.slice(0, 8)}`);
  return tick();
}

/** Everything that time alone changes. */
function tick() {
  if (!view.session) return;
  const isRecorded = view.session.mode === "replay";
  const [word, age] = freshness();
  const tone = TONES[word];
  $("freshness").dataset.tone = tone;
  say(document.querySelector("#freshness .sign"), isRecorded ? "▶" : SIGNS[tone]);
  say($("fresh-word"), word);
  say($("fresh-age"), age === null ? (isRecorded ? "" : "nothing heard yet") : duration(age));
  document.body.dataset.fresh = word.toLowerCase();
  if (word !== view.word) {
    if (view.word) say($("announce"), `The feed is ${word.toLowerCase()}.`);
    view.word = word;
  }
  const { missed, restarts, malformed } = view.pulse;
  say($("missed"), isRecorded ? "—" : [String(missed), restarts ? plural(restarts, "restart") : "", malformed ? `${malformed} unreadable` : ""].filter(Boolean).join(", "));
  const snapshot = view.picture?.snapshot ?? null;
  const elapsed = isRecorded || view.madeAt === null ? 0 : seconds() - view.madeAt;
  if (snapshot) {
    const shown = facts(snapshot, elapsed, word !== "STALE");
    for (const [id, text] of Object.entries(shown)) say($(id), text);
    document.title = `${word} ${shown["round-title"].toLowerCase()} ${shown.round} – DiLoCo`;
    server.show(isRecorded ? recordedMetrics(snapshot) : metrics(snapshot, elapsed, view.cpu?.share ?? null));
    table.tick(elapsed, isRecorded || word === "STALE" ? -1 : usualSilence(snapshot));
    if (isRecorded) rejections.tick(view.shownAt);
    else rejections.tick(seconds());
    events.tick(isRecorded ? view.shownAt : seconds());
  } else {
    document.title = `${word} – DiLoCo`;
  }
  const stale = word === "STALE" ? "The broker is silent, so it cannot be asked for anything." : view.loss;
  const silence = view.pulse.refusal || (snapshot ? stale : view.loss || UNHEARD);
  control.show(view.session, snapshot, isRecorded ? "" : silence);
  table.allow(control.isAllowed);
  notice(word, age);
}

function notice(word, age) {
  const sentences = [];
  if (view.loss) sentences.push(`${view.loss} Trying again.`);
  const { problem, refusal } = view.pulse;
  if (refusal && !view.loss) sentences.push(refusal);
  if (word === "STALE" && !view.loss) {
    if (age !== null) sentences.push(`The broker has sent nothing for ${duration(age)}. This is how things were then.`);
    else if (!refusal) sentences.push(`No snapshot has come from ${view.session.feed} yet; is this the feed of a diloco-broker that runs?`);
  }
  if (problem && word !== "LIVE") sentences.push(problem);
  const reasons = view.reasons.filter((reason) => reason !== refusal);
  if (!view.loss) sentences.push(...reasons.slice(0, 6));
  if (reasons.length > 6) sentences.push(`and ${reasons.length - 6} more`);
  const box = $("notice");
  box.hidden = sentences.length === 0;
  const isSilent = word === "STALE" || Boolean(view.loss);
  const tone = isSilent || refusal ? "bad" : view.verdict === "ended" ? "good" : "uneasy";
  box.dataset.tone = tone;
  say(box.querySelector(".sign"), SIGNS[tone]);
  say($("notice-word"), view.loss ? "NO ANSWER" : refusal ? "REFUSED" : word === "STALE" ? "STALE" : VERDICTS[view.verdict] ?? "DEGRADED");
  const list = $("reasons");
  sentences.forEach((sentence, index) => {
    if (!list.children[index]) list.append(make("li"));
    say(list.children[index], sentence); // not capitalised: it may begin with the name of a worker
  });
  while (list.children.length > sentences.length) list.lastChild.remove();
}

function every() {
  const kept = Number(localStorage.getItem(REFRESH_KEY));
  return [...$("refresh").options].some((option) => Number(option.value) === kept) ? kept : 1;
}

/** Ask what this dashboard is, until it answers, and then show it. */
async function begin() {
  stream.stop();
  try {
    view.session = await get("/api/session");
  } catch {
    setTimeout(begin, 2000);
    return;
  }
  if (!view.session.reading) {
    control.show({ ...view.session, steering: false }, null, "");
    view.session = null;
    return;
  }
  const isRecorded = view.session.mode === "replay";
  history ??= new History($("plot-list"), isRecorded);
  $("refresh-label").hidden = isRecorded;
  if (isRecorded) {
    const { replay } = await import("./replay.js");
    await replay(history, (picture) => {
      Object.assign(view, { picture, shownAt: seconds() });
      events.clear();
      rejections.clear();
      render();
    });
  } else {
    say($("feed"), `Feed ${view.session.feed}`);
    tick();
    stream.start(every());
  }
}

$("refresh").value = String(every());
$("refresh").onchange = () => {
  localStorage.setItem(REFRESH_KEY, $("refresh").value);
  stream.start(every());
};
// A page that nobody sees gives its place away, and a browser has few connections to one address.
document.addEventListener("visibilitychange", () => {
  if (view.session?.mode !== "live") return;
  if (document.hidden) stream.stop();
  else stream.start(every());
});
setInterval(tick, 1000);
begin();
