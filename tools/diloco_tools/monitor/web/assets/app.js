// The page: messages of the dashboard program go to the parts that show them, and once a second all ages go
// on. Text of workers is only ever set as text.

import { Control, UNHEARD } from "./control.js";
import { SIGNS, duration, make, plural, say } from "./format.js";
import { History } from "./history.js";
import { Log, Rows } from "./panels.js";
import { Stream, get, keepToken, takeToken } from "./stream.js";
import { WorkerTable } from "./workers.js";

const $ = (id) => document.getElementById(id);
const seconds = () => performance.now() / 1000;
const TONES = { LIVE: "good", LATE: "uneasy", STALE: "bad", REPLAY: "quiet" };
const VERDICTS = { ended: "ENDED", waiting: "WAITING" };
const REFRESH_KEY = "diloco-refresh";

const view = {
  session: null,
  snapshot: null,
  pulse: { missed: 0, restarts: 0, malformed: 0, problem: null, refusal: "" },
  verdict: "healthy",
  reasons: [],
  madeAt: null, // second of this page's clock at which the snapshot shown left the broker
  heardAt: null, // the same of the newest snapshot
  loss: "", // why the dashboard program is not heard
  word: "",
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
const server = new Rows($("metrics"));
const events = new Log($("event-list"));
const rejections = new Log($("rejection-list"));
let history = null;

const stream = new Stream({
  onState: (state) => {
    const now = seconds();
    heard(state, now);
    if (state.picture) {
      Object.assign(view, { snapshot: state.picture.snapshot, verdict: state.verdict, reasons: state.reasons, madeAt: view.heardAt });
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
  if (pulse.words) shows(pulse.words);
}

/** What the server says in words, of the moment at which it was sent. */
function shows({ header, counts, rows, workers }) {
  const { arrived, ...texts } = header;
  for (const [id, text] of Object.entries(texts)) say($(id), text);
  say($("counts"), counts);
  $("arrived").hidden = arrived[1] === 0;
  $("arrived").max = Math.max(1, arrived[1]);
  $("arrived").value = arrived[0];
  server.show(rows);
  table.show(workers);
}

function freshness() {
  if (view.session?.mode === "replay") return ["REPLAY", null];
  if (view.heardAt === null) return ["STALE", null];
  const age = seconds() - view.heardAt;
  const { live_below_s: live, stale_above_s: stale } = view.session;
  return [age < live ? "LIVE" : age <= stale ? "LATE" : "STALE", age];
}

/** Everything that a new snapshot changes, but for its words. */
function render() {
  const { snapshot } = view;
  if (!snapshot) return tick();
  const isRecorded = view.session.mode === "replay";
  say($("no-workers"), snapshot.ended ? "All workers have left." : "No workers yet.");
  const at = isRecorded ? view.shownAt : view.madeAt;
  events.show(snapshot.events.map((event) => ({ ...event, key: `${snapshot.epoch} ${event.sequence}` })), at, { keep: !isRecorded });
  $("no-events").hidden = events.rows.size > 0;
  const refused = snapshot.rejections.map(({ age_s, worker, code, text }, key) => ({ key, age_s, level: "warning", text: `${worker}: ${code}: ${text}` }));
  rejections.show(refused, at, { keep: false });
  $("rejections").hidden = refused.length === 0;
  $("insecure").hidden = snapshot.security !== "INSECURE";
  say($("epoch"), `broker ${snapshot.version}, incarnation ${snapshot.epoch.slice(0, 8)}`);
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
  const { snapshot } = view;
  const round = snapshot ? ` ${$("round-title").textContent.toLowerCase()} ${$("round").textContent}` : "";
  document.title = `${word}${round} – DiLoCo`;
  for (const log of [events, rejections]) log.tick(isRecorded ? view.shownAt : seconds());
  const stale = word === "STALE" ? "The broker is silent; nothing can be changed." : view.loss;
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
    if (age !== null) sentences.push(`The broker has sent nothing for ${duration(age)}. The page shows its last snapshot.`);
    else if (!refusal) sentences.push(`No snapshot from ${view.session.feed} yet; check that this is the feed of a running diloco-broker.`);
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
  if (!history) table.begin(view.session.columns);
  history ??= new History($("plot-list"), isRecorded);
  $("refresh-label").hidden = isRecorded;
  if (isRecorded) {
    const { replay } = await import("./replay.js");
    await replay(history, ({ words, picture }) => {
      Object.assign(view, { snapshot: picture.snapshot, shownAt: seconds() });
      shows(words);
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
// A hidden page gives up its stream: a browser has few connections to one address.
document.addEventListener("visibilitychange", () => {
  if (view.session?.mode !== "live") return;
  if (document.hidden) stream.stop();
  else stream.start(every());
});
setInterval(tick, 1000);
begin();
