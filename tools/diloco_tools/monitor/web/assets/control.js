// Controls: the buttons, why one is disabled, the question before each, and the broker's answer.

import { order as send } from "./api.js";
import { $, make, say } from "./dom.js";

/** Ask the order's question; resolves to its arguments, or to null. Some need typed text. */
function ask({ label, title, text, typed, setting, now, arguments: given, ...order }) {
  const dialog = $("ask");
  const isTyped = Boolean(typed || setting);
  say($("ask-title"), title);
  say($("ask-text"), text);
  say($("ask-yes"), setting ? "Set" : label);
  $("ask-yes").className = typed || order.action === "kick" ? "danger" : "primary";
  $("ask-name").hidden = !isTyped;
  $("ask-typed").value = "";
  if (setting) $("ask-label").replaceChildren(`${now} → `);
  else $("ask-label").replaceChildren("To confirm, type ", make("code", { textContent: typed }));
  const value = () => $("ask-typed").value.trim();
  const check = () => ($("ask-yes").disabled = setting ? !(Number(value()) > 0) || value() === now : value() !== typed);
  check();
  return new Promise((resolve) => {
    let answer = null;
    $("ask-typed").oninput = check;
    $("ask-no").onclick = () => dialog.close();
    $("ask-form").onsubmit = (event) => {
      event.preventDefault();
      if ($("ask-yes").disabled) return;
      answer = setting ? { [setting]: Number(value()) } : typed ? { confirm: typed } : given;
      dialog.close();
    };
    dialog.onclose = () => resolve(answer);
    dialog.showModal();
    (isTyped ? $("ask-typed") : $("ask-no")).focus();
  });
}

export class Control {
  constructor(onToken) {
    Object.assign(this, { session: null, orders: {}, silence: "", isBusy: false, buttons: new Map() });
    $("token-form").onsubmit = (event) => {
      event.preventDefault();
      if ($("token").value) onToken($("token").value);
      $("token").value = "";
    };
    $("result-close").onclick = () => ($("result").hidden = true);
  }

  get isAllowed() {
    return this.reason === "" && !this.isBusy;
  }

  /** Show which orders are possible; `silence` says why none is, or is "". */
  show(session, orders, silence) {
    Object.assign(this, { session, orders, silence });
    this.refresh();
  }

  refresh() {
    const { session } = this;
    this.reason = session.steering ? this.silence : session.reason ?? "";
    $("control-reason").hidden = this.reason === "";
    say($("control-reason"), this.reason);
    $("token-form").hidden = !session.needs_token;
    for (const [id, { label, title, off }] of Object.entries(this.orders)) {
      const { button, hint } = this.buttons.get(id) ?? this.add(id);
      say(button, title ? `${label} …` : label);
      button.disabled = !this.isAllowed || off !== "";
      say(hint, session.steering ? off : "");
    }
  }

  add(id) {
    const button = make("button", { type: "button", id, className: id === "shutdown" ? "danger" : "", onclick: () => this.propose(this.orders[id]) });
    const hint = make("p", { className: "hint", id: `${id}-reason` });
    $("order-buttons").append(make("div", { className: "order" }, button, hint));
    this.buttons.set(id, { button, hint });
    return { button, hint };
  }

  /** Ask for confirmation, send the order to the broker, and show its answer. */
  async propose(order) {
    if (!this.isAllowed) return;
    const values = order.title ? await ask(order) : order.arguments;
    if (values === null) return;
    this.isBusy = true;
    this.refresh();
    this.result("quiet", "…", "Asking the broker …");
    const answer = await send(order.action, values);
    this.isBusy = false;
    this.result(answer.ok ? "good" : "bad", answer.ok ? "✓" : "✗", answer.text);
    this.refresh();
  }

  result(tone, sign, text) {
    const box = $("result");
    box.dataset.tone = tone;
    box.hidden = false;
    say(box.querySelector(".sign"), sign);
    say($("result-text"), text);
  }
}
