// Controls: which are enabled now and why not, the question before each, and the broker's answer.

import { make, say, setting } from "./format.js";
import { order } from "./stream.js";

const $ = (id) => document.getElementById(id);
const SETTINGS = {
  "outer-lr": { name: "outer_lr", title: "Outer learning rate", now: (snapshot) => snapshot.outer.lr },
  "outer-momentum": { name: "outer_momentum", title: "Outer momentum", now: (snapshot) => snapshot.outer.momentum },
  "workers-wanted": { name: "workers", title: "Workers wanted", now: (snapshot) => snapshot.workers_wanted, isCount: true },
};
const OPTIMIZER = ["outer-lr", "outer-momentum"];

/** Why nothing can be changed before the first snapshot: the control address comes from the feed. */
export const UNHEARD = "No snapshot from the broker yet.";

/** A question that states the consequence; resolves to true or false. `typed` has to be typed first. */
function ask({ title, text, yes, isDangerous = false, typed = null }) {
  const dialog = $("ask");
  say($("ask-title"), title);
  say($("ask-text"), text);
  say($("ask-yes"), yes);
  $("ask-yes").className = isDangerous ? "danger" : "primary";
  $("ask-name").hidden = typed === null;
  $("ask-typed").value = "";
  if (typed !== null) $("ask-label").replaceChildren("To confirm, type ", make("code", { textContent: typed }));
  const check = () => ($("ask-yes").disabled = typed !== null && $("ask-typed").value.trim() !== typed);
  check();
  return new Promise((resolve) => {
    let answer = false;
    $("ask-typed").oninput = check;
    $("ask-no").onclick = () => dialog.close();
    $("ask-form").onsubmit = (event) => {
      event.preventDefault();
      if ($("ask-yes").disabled) return;
      answer = true;
      dialog.close();
    };
    dialog.onclose = () => resolve(answer);
    dialog.showModal();
    (typed === null ? $("ask-no") : $("ask-typed")).focus();
  });
}

export class Control {
  constructor({ onToken }) {
    this.session = null;
    this.snapshot = null;
    this.isBusy = false;
    this.silence = UNHEARD;
    $("save").onclick = () => this.send("save", {});
    $("pause").onclick = () => this.pause();
    $("shutdown").onclick = () => this.shutdown();
    const form = (id, action) => {
      $(id).onsubmit = (event) => {
        event.preventDefault();
        action();
      };
    };
    form("optimizer-form", () => this.set(OPTIMIZER, "It applies from the next version on, for every worker."));
    form("workers-form", () => this.set(["workers-wanted"], "Round one waits for this many. No worker is removed."));
    form("token-form", () => {
      if ($("token").value) onToken($("token").value);
      $("token").value = "";
    });
    for (const id of Object.keys(SETTINGS)) $(id).oninput = () => this.refresh();
    $("result-close").onclick = () => ($("result").hidden = true);
    this.refresh();
  }

  /** Why nothing may be changed now, or "". */
  get reason() {
    if (!this.session) return "The dashboard program has not answered yet.";
    return this.session.steering ? this.silence : this.session.reason ?? "";
  }

  get isAllowed() {
    return this.reason === "" && !this.isBusy;
  }

  /** Show what may be done with this snapshot; `silence` says why the broker cannot be asked, or is "". */
  show(session, snapshot, silence) {
    Object.assign(this, { session, snapshot, silence });
    this.refresh();
  }

  refresh() {
    const { snapshot } = this;
    $("control-reason").hidden = this.reason === "";
    say($("control-reason"), this.reason);
    $("token-form").hidden = !this.session?.needs_token;
    const may = (id, because) => {
      $(id).disabled = !this.isAllowed || because !== "";
      say($(`${id}-reason`), this.session?.mode === "live" ? because : "");
    };
    const stopping = snapshot?.state === "stopping" ? "The broker is stopping." : "";
    const unsaved = snapshot?.run ? "" : "There is nothing to save yet.";
    may("save", !snapshot ? "" : snapshot.checkpoint ? unsaved : "The broker has no save folder; start it with --save-dir DIR.");
    may("pause", stopping);
    may("shutdown", stopping);
    say($("pause"), snapshot?.state === "paused" ? "Resume" : "Pause");
    for (const [id, { now }] of Object.entries(SETTINGS)) {
      const value = snapshot ? now(snapshot) : null;
      $(id).placeholder = value === null ? "" : setting(value);
      $(id).disabled = !this.isAllowed || (value === null && OPTIMIZER.includes(id));
    }
    say($("optimizer-reason"), snapshot && snapshot.outer.lr === null ? "This optimizer's settings cannot be changed from here." : "");
    $("set-optimizer").disabled = !this.isAllowed || !this.changes(OPTIMIZER).length;
    $("set-workers").disabled = !this.isAllowed || !this.changes(["workers-wanted"]).length;
  }

  /** What is typed in these fields and differs from what holds. */
  changes(ids) {
    return ids.flatMap((id) => {
      const { name, title, now, isCount } = SETTINGS[id];
      const [text, before] = [$(id).value, this.snapshot ? now(this.snapshot) : null];
      const after = Number(text);
      const isValid = text !== "" && (isCount ? Number.isInteger(after) && after >= 1 : Number.isFinite(after));
      return isValid && after !== before ? [{ id, name, after, words: `${title} ${setting(before)} → ${setting(after)}.` }] : [];
    });
  }

  async set(ids, consequence) {
    const changes = this.changes(ids);
    if (!changes.length || !this.isAllowed) return;
    const text = [...changes.map(({ words }) => words), consequence].join(" ");
    if (!(await ask({ title: "Change settings?", text, yes: "Change" }))) return;
    if (!(await this.send("set", Object.fromEntries(changes.map(({ name, after }) => [name, after]))))) return;
    for (const { id } of changes) $(id).value = "";
    this.refresh();
  }

  async kick({ id, health, workers }) {
    if (!this.isAllowed) return;
    const rounds = this.snapshot?.mode === "async" ? "the others continue" : "rounds continue without it";
    let text = `${id} is removed from the run; ${rounds}. Work that it has not sent is lost. It rejoins only when it is restarted.`;
    if (health === "dead") text = `${id} is dead. The run no longer waits for it, and it leaves the table.`;
    if (workers !== null) text = `Relay ${id} stops, and no round waits for it. The ${workers} workers downstream of it wait until a relay is started there again.`;
    const title = workers === null ? `Kick ${id}?` : `Kick relay ${id}?`;
    if (await ask({ title, text, yes: "Kick", isDangerous: true })) await this.send("kick", { worker: id });
  }

  async pause() {
    if (this.snapshot?.state === "paused") return this.send("resume", {});
    const text = "No further round closes: workers train to their next boundary and wait there until the run is resumed.";
    return (await ask({ title: "Pause the run?", text, yes: "Pause" })) && this.send("pause", {});
  }

  async shutdown() {
    const { run, checkpoint, counts } = this.snapshot ?? {};
    const typed = run ? run.slice(0, 8) : "shutdown";
    const saves = checkpoint ? `The broker saves to ${checkpoint.folder} first.` : "The broker has no save folder: its parameters are lost.";
    const text = `The run ends for all ${counts?.alive ?? ""} workers; their scripts stop. ${saves} To restart the broker instead: diloco-broker shutdown --restarting`;
    if (await ask({ title: "End the run?", text, yes: "Shut down", isDangerous: true, typed })) await this.send("shutdown", { confirm: typed });
  }

  /** Ask the broker, and show its answer. True if it was done. */
  async send(action, values) {
    this.isBusy = true;
    this.refresh();
    this.result("quiet", "…", "Asking the broker …");
    const answer = await order(action, values);
    this.isBusy = false;
    this.result(answer.ok ? "good" : "bad", answer.ok ? "✓" : "✗", answer.text);
    this.refresh();
    return answer.ok;
  }

  result(tone, sign, text) {
    const box = $("result");
    box.dataset.tone = tone;
    box.hidden = false;
    say(box.querySelector(".sign"), sign);
    say($("result-text"), text);
  }
}
