// The page: asks the dashboard program once a second and shows the answer. A report is the same page, with
// one answer in it.

import { get, keepToken, takeToken } from "./api.js";
import { Plots } from "./charts.js";
import { Control } from "./control.js";
import { $, SIGNS, Table, make, say, showRows } from "./dom.js";

const EVERY_MS = 1000;

let session = null;
let plots = null;
let workers = null;
let words = { orders: {} }; // the newest
let clock = 0; // of the dashboard program, at its last answer
let timer = 0;
let freshness = "";

const control = new Control(async (token) => {
  keepToken(token);
  await begin();
});

/** Show text in a tone, with the sign of that tone. */
function tell(node, [tone, word, more]) {
  node.dataset.tone = tone;
  say(node.querySelector(".sign"), SIGNS[tone]);
  say(node.querySelector("b"), word);
  say(node.querySelector(".more"), more);
}

function show(given) {
  words = given;
  if (words.run) {
    say($("run"), words.run);
    for (const id of ["rows", "events", "rejections"]) showRows($(`${id}-list`), words[id]);
    say($("counts"), words.counts);
    workers.show(words.workers);
    say($("no-workers"), words.empty);
    $("no-workers").hidden = words.workers.length > 0;
    $("no-events").hidden = words.events.length > 0;
    $("rejections").hidden = words.rejections.length === 0;
    $("insecure").hidden = !words.insecure;
    say($("about"), words.about);
  }
  showRows($("facts"), words.facts);
  state(words.badge, words.notice, words.silence ?? "");
  document.title = words.title;
}

/** Show how fresh the page is, the problems, and why nothing can be changed. */
function state(badge, notice, silence) {
  tell($("freshness"), badge);
  document.body.dataset.fresh = badge[1].toLowerCase();
  if (freshness && freshness !== badge[1]) say($("announce"), `The feed is ${badge[1].toLowerCase()}.`);
  freshness = badge[1];
  $("notice").hidden = !notice;
  if (notice) {
    tell($("notice"), [notice[0], notice[1], ""]);
    const told = notice[2].map((sentence) => make("li", { textContent: sentence }));
    if ($("reasons").textContent !== notice[2].join("")) $("reasons").replaceChildren(...told);
  }
  control.show(session, words.orders ?? {}, silence);
  workers.allow(control.isAllowed);
}

async function poll() {
  clearTimeout(timer);
  const after = clock;
  const answer = await get(`/api/state?after=${after}`).catch(({ message }) => {
    state(["bad", "STALE", ""], ["bad", "NO ANSWER", [`${message} Trying again.`]], message);
  });
  if (answer && after === clock) {
    clock = answer.clock;
    plots.take(answer.series, answer.origin ?? Date.now() / 1000, answer.whole);
    show(answer.words);
    plots.draw();
  }
  // A hidden page does not ask; it catches up as soon as it is visible.
  if (session.mode === "live" && !document.hidden) timer = setTimeout(poll, EVERY_MS);
}

/** Add the panels that only a report has: more tables, and lists of values. */
function addPanels() {
  for (const { id, title, note, empty, columns, rows, values } of words.panels ?? []) {
    const body = make(values ? "dl" : "div", { className: values ? "metrics wide" : "scroll", id: `${id}-list` });
    const told = make("p", { className: "empty", textContent: empty, hidden: (values ?? rows).length > 0 });
    const head = make("div", { className: "head" }, make("h2", { textContent: title }), make("p", { className: "dim", textContent: note }));
    $("panels").append(make("section", { className: "panel", id }, head, body, told));
    if (values) showRows(body, values);
    else new Table(body, columns).show(rows);
  }
}

/** Show the moment of a recorded run that the slider selects. */
async function replay() {
  const outline = await get("/api/replay");
  const slider = $("moment");
  const go = async () => {
    const index = slider.value;
    const moment = await get(`/api/replay/${index}`).catch(({ message }) => say($("moment-at"), message));
    if (!moment || slider.value !== index) return;
    say($("moment-at"), moment.when);
    slider.setAttribute("aria-valuetext", moment.when);
    show(moment.words);
    plots.draw(moment.marker);
  };
  plots.take(outline.series, outline.first_at, true);
  if (outline.skipped) say($("plots-note"), `${outline.skipped} damaged lines were skipped`);
  $("replay").hidden = false;
  slider.max = outline.moments - 1;
  slider.value = slider.max;
  slider.oninput = go;
  await go();
}

/** Ask for the session until the program answers, and then show it. */
async function begin() {
  try {
    session = await get("/api/session");
  } catch {
    setTimeout(begin, 2 * EVERY_MS);
    return;
  }
  const isLive = session.mode === "live";
  if (!session.reading) return control.show({ ...session, steering: false }, {}, "");
  document.body.dataset.mode = session.mode;
  workers ??= new Table($("worker-box"), session.columns, session.mode === "report" ? null : (order) => control.propose(order));
  plots ??= new Plots($("plot-list"));
  if (isLive) say($("feed"), `Feed ${session.feed}`);
  if (session.mode === "replay") return replay();
  await poll();
  addPanels();
}

takeToken();
document.addEventListener("visibilitychange", () => session?.mode === "live" && !document.hidden && poll());
begin();
