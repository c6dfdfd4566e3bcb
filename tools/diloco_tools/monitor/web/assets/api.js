// Requests to the dashboard program; a report contains its answers.

import { $ } from "./dom.js";

const KEY = "diloco-token";
const SILENCE_MS = 10_000;
const GONE = "The dashboard program does not answer.";
const inlined = JSON.parse($("data")?.textContent ?? "null");

/** Take the token from the address; then only this tab has it, never a cookie. */
export function takeToken() {
  if (inlined) return;
  const address = new URL(location.href);
  const given = address.searchParams.get("token");
  if (given === null) return;
  keepToken(given);
  address.searchParams.delete("token");
  history.replaceState(null, "", address.pathname + address.search + address.hash);
}

export const keepToken = (token) => sessionStorage.setItem(KEY, token.trim());

async function request(path, options, headers = {}) {
  const token = sessionStorage.getItem(KEY);
  // A header is Latin-1 only; any other token is wrong.
  if (token && /^[\x21-\x7e]+$/.test(token)) headers.Authorization = `Bearer ${token}`;
  return fetch(path, { cache: "no-store", headers, ...options });
}

/** The answer to a request; throws an Error whose message is a sentence. */
export async function get(path) {
  if (inlined) return inlined[path];
  const response = await request(path, { signal: AbortSignal.timeout(SILENCE_MS) }).catch(() => {
    throw new Error(GONE);
  });
  const body = await response.json().catch(() => null);
  if (body === null) throw new Error(`The dashboard program answered with status ${response.status} and no reason.`);
  if (!response.ok) throw new Error(body.text ?? `Status ${response.status}.`);
  return body;
}

/** Ask the broker for something; always resolves to {ok, text}. */
export async function order(action, values) {
  try {
    const body = JSON.stringify({ action, ...values });
    const response = await request("/api/control", { method: "POST", body, signal: AbortSignal.timeout(15_000) }, { "Content-Type": "application/json" });
    const answer = await response.json();
    return { ok: answer.ok === true, text: String(answer.text) };
  } catch {
    return { ok: false, text: `${GONE} The order may or may not have been carried out.` };
  }
}
