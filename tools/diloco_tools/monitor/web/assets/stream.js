// Talking to the dashboard program. Events come by fetch and not by EventSource: that one can send no
// token, and does not say why it was refused.

const KEY = "diloco-token";
const SILENCE_MS = 10_000; // pulses come each second: after this the connection is dead
const LONGEST_MESSAGE = 64 << 20; // characters

/** The token: once from the address, then of this tab alone; never in a cookie. */
export function takeToken() {
  const address = new URL(location.href);
  const given = address.searchParams.get("token");
  if (given !== null) {
    keepToken(given);
    address.searchParams.delete("token");
    history.replaceState(null, "", address.pathname + address.search + address.hash);
  }
}

export const keepToken = (token) => sessionStorage.setItem(KEY, token.trim());

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  // A header holds Latin-1 only; any other token is wrong anyway.
  return token && /^[\x21-\x7e]+$/.test(token) ? { ...more, Authorization: `Bearer ${token}` } : more;
}

export class Refused extends Error {}

export async function get(path, signal) {
  const response = await fetch(path, { headers: headers(), cache: "no-store", signal });
  return answerOf(response);
}

async function answerOf(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    throw new Refused(`The dashboard program answered with status ${response.status} and no reason.`);
  }
  if (!response.ok) throw new Refused(body.text ?? `Status ${response.status}.`);
  return body;
}

/** Ask the broker for something; always resolves to {ok, text}. */
export async function order(action, values = {}) {
  try {
    const response = await fetch("/api/control", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify({ action, ...values }),
      signal: AbortSignal.timeout(15_000),
    });
    const body = await response.json();
    return { ok: body.ok === true, text: String(body.text) };
  } catch {
    return { ok: false, text: "The dashboard program does not answer; whether this was done is unknown." };
  }
}

/** Events from the dashboard, again and again until `stop`. */
export class Stream {
  constructor({ onState, onPulse, onLoss }) {
    this.handlers = { state: onState, pulse: onPulse };
    this.onLoss = onLoss;
    this.abort = null;
    this.life = 0;
  }

  start(everyS) {
    this.stop();
    this.run(everyS, ++this.life);
  }

  stop() {
    this.life++;
    this.abort?.abort();
  }

  async run(everyS, life) {
    for (let waitMs = 500; life === this.life; waitMs = Math.min(2 * waitMs, 5000)) {
      const abort = (this.abort = new AbortController());
      let reason = "The dashboard program does not answer.";
      try {
        await this.follow(`/api/events?every=${everyS}`, abort, () => (waitMs = 500));
      } catch (error) {
        if (error instanceof Refused) reason = error.message;
        else if (!abort.signal.aborted) console.error(error);
      }
      if (life !== this.life) return;
      this.onLoss(reason);
      await new Promise((resolve) => setTimeout(resolve, waitMs));
    }
  }

  async follow(path, abort, onMessage) {
    let watch = 0;
    const rewind = () => {
      clearTimeout(watch);
      watch = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    rewind();
    try {
      const response = await fetch(path, { headers: headers(), cache: "no-store", signal: abort.signal });
      if (!response.ok) await answerOf(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let held = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        rewind();
        held += value;
        if (held.length > LONGEST_MESSAGE) throw new Error("no message is that long");
        const parts = held.split("\n\n");
        held = parts.pop();
        for (const part of parts) this.dispatch(part);
        if (parts.length) onMessage();
      }
    } finally {
      clearTimeout(watch);
      abort.abort();
    }
  }

  dispatch(part) {
    const lines = part.split("\n");
    const after = (start) => lines.find((line) => line.startsWith(start))?.slice(start.length);
    const data = after("data: ");
    if (data !== undefined) this.handlers[after("event: ")]?.(JSON.parse(data));
  }
}
