// Steering: what may be pressed now and why not, what it will do, and what came of it.

import { make, say, setting } from "./format.js";
import { order } from "./stream.js";

const $ = (id) => document.getElementById(id);

/** A question that states the consequence; resolves to true or false. */
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

/** Where it is steered is known from its feed. */
export const UNHEARD = "The broker has not been heard yet.";

export class Control {
  constructor({ onToken }) {
    this.session = null;
    this.snapshot = null;
    this.isBusy = false;
    this.silence = UNHEARD;
    $("save").onclick = () => this.send("save", {}, "Asking the broker to save …");
    $("pause").onclick = () => this.pause();
    $("shutdown").onclick = () => this.shutdown();
    this.form("optimizer-form", () => this.optimizer());
    this.form("workers-form", () => this.workers());
    this.form("token-form", () => {
      if ($("token").value) onToken($("token").value);
      $("token").value = "";
    });
    for (const id of ["outer-lr", "outer-momentum", "workers-wanted"]) $(id).oninput = () => this.refresh();
    $("result-close").onclick = () => ($("result").hidden = true);
    this.refresh();
  }

  form(id, action) {
    $(id).onsubmit = (event) => {
      event.preventDefault();
      action();
    };
  }

  /** Why nothing may be changed now, or "". */
  get reason() {
    if (!this.session) return "The dashboard program has not answered yet.";
    if (!this.session.steering) return this.session.reason ?? "";
    return this.silence;
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
    const may = (id, because = "") => {
      $(id).disabled = !this.isAllowed || because !== "";
      say($(`${id}-reason`), this.session?.mode === "live" ? because : "");
    };
    may("save", !snapshot ? "" : snapshot.checkpoint ? (snapshot.run ? "" : "There is nothing to save yet.") : "The broker has no save folder; start it with --save-dir DIR.");
    say($("pause"), snapshot?.state === "paused" ? "Resume" : "Pause");
    may("pause", snapshot?.state === "stopping" ? "The broker is stopping." : "");
    may("shutdown", snapshot?.state === "stopping" ? "The broker is stopping." : "");
    const outer = snapshot?.outer ?? { lr: null, momentum: null };
    const own = snapshot && outer.lr === null ? "This optimizer's settings are its own." : "";
    this.field("outer-lr", outer.lr, own);
    this.field("outer-momentum", outer.momentum, own || (snapshot && outer.momentum === null ? "no momentum" : ""));
    say($("optimizer-reason"), own);
    $("set-optimizer").disabled = !this.isAllowed || !this.optimizerChanges().length;
    this.field("workers-wanted", snapshot?.workers_wanted ?? null, "");
    $("set-workers").disabled = !this.isAllowed || !this.workersChange();
  }

  field(id, value, because) {
    $(id).placeholder = value === null || value === undefined ? "" : setting(value);
    $(id).disabled = !this.isAllowed || because !== "";
  }

  changed(id, name, title, before) {
    const text = $(id).value;
    const after = Number(text);
    return text !== "" && Number.isFinite(after) && after !== before ? [{ name, title, before, after }] : [];
  }

  optimizerChanges() {
    const outer = this.snapshot?.outer ?? {};
    return [
      ...this.changed("outer-lr", "outer_lr", "Outer learning rate", outer.lr),
      ...this.changed("outer-momentum", "outer_momentum", "Outer momentum", outer.momentum),
    ];
  }

  workersChange() {
    const [change] = this.changed("workers-wanted", "workers", "Workers wanted", this.snapshot?.workers_wanted);
    return change && Number.isInteger(change.after) && change.after >= 1 ? change : null;
  }

  async optimizer() {
    const changes = this.optimizerChanges();
    if (!changes.length || !this.isAllowed) return;
    await this.set(changes, "It holds from the next version on, for every worker.");
  }

  async workers() {
    const change = this.workersChange();
    if (!change || !this.isAllowed) return;
    await this.set([change], "It is what round one waits for, and nobody is sent away.");
  }

  async set(changes, consequence) {
    const words = changes.map(({ title, before, after }) => `${title} ${setting(before)} → ${setting(after)}.`);
    const agreed = await ask({ title: "Change settings?", text: `${words.join(" ")} ${consequence}`, yes: "Change" });
    if (!agreed) return;
    const values = Object.fromEntries(changes.map(({ name, after }) => [name, after]));
    const done = await this.send("set", values, "Asking the broker …");
    if (done) {
      for (const id of ["outer-lr", "outer-momentum", "workers-wanted"]) {
        if (changes.some(({ name }) => name === { "outer-lr": "outer_lr", "outer-momentum": "outer_momentum", "workers-wanted": "workers" }[id])) $(id).value = "";
      }
      this.refresh();
    }
  }

  async kick(worker) {
    if (!this.isAllowed) return;
    if (worker.workers != null) {
      await this.kickRelay(worker);
      return;
    }
    const isDead = worker.health === "dead";
    const rounds = this.snapshot?.mode === "async" ? "the others go on" : "rounds go on without it";
    const agreed = await ask({
      title: `Kick ${worker.id}?`,
      text: isDead ? `${worker.id} is dead. The run no longer counts on it, and it leaves the table.` : `${worker.id} is removed from the run and told so; ${rounds}. What it has not sent by then is not counted. It does not come back by itself, only when it is started anew.`,
      yes: "Kick",
      isDangerous: true,
    });
    if (agreed) await this.send("kick", { worker: worker.id }, `Asking the broker to kick ${worker.id} …`);
  }

  async kickRelay({ id, workers }) {
    const agreed = await ask({
      title: `Kick relay ${id}?`,
      text: `Relay ${id} is told to end, and no round waits for it. Workers behind it, ${workers} now, wait until a relay is started there again.`,
      yes: "Kick",
      isDangerous: true,
    });
    if (agreed) await this.send("kick", { worker: id }, `Asking the broker to kick ${id} …`);
  }

  async pause() {
    if (this.snapshot?.state === "paused") {
      await this.send("resume", {}, "Asking the broker to go on …");
      return;
    }
    const agreed = await ask({
      title: "Pause the run?",
      text: "No further round closes: workers train to their next boundary and wait there until somebody resumes the run.",
      yes: "Pause",
    });
    if (agreed) await this.send("pause", {}, "Asking the broker to pause …");
  }

  async shutdown() {
    const name = this.snapshot?.run ? this.snapshot.run.slice(0, 8) : "shutdown";
    const saves = this.snapshot?.checkpoint ? `It saves to ${this.snapshot.checkpoint.folder} first.` : "It has no save folder: what it holds is lost.";
    const agreed = await ask({
      title: "End the run?",
      text: `The run ends for all ${this.snapshot?.counts.alive ?? ""} workers; their scripts are told to stop. ${saves} To have the broker back soon: diloco-broker shutdown --restarting`,
      yes: "Shut down",
      isDangerous: true,
      typed: name,
    });
    if (agreed) await this.send("shutdown", { confirm: name }, "Asking the broker to stop …");
  }

  /** Have it done; the sentence that comes back is shown. True if it was done. */
  async send(action, values, waiting) {
    this.isBusy = true;
    this.refresh();
    this.result("quiet", "…", waiting);
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
