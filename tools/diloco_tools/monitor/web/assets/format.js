// How quantities are written, as diloco_protocol.quantities does.

export const NONE = "—";
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** 0.4 s, 41 s, 12 min, 3 h, 4 d. */
export function duration(seconds) {
  if (!known(seconds) || seconds < -0.05) return NONE;
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  for (const [size, unit, below] of [[1, "s", 99.5], [60, "min", 99.5], [3600, "h", 99.5]]) {
    if (seconds / size < below) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(seconds / 86400)} d`;
}

/** 0.41, 1.5k, 38M; with unit "B" 1.5 kB, 38 MB. Decimal prefixes. */
export function scaled(value, unit = "") {
  if (!known(value)) return NONE;
  const space = unit ? " " : "";
  const size = Math.abs(value);
  if (size > 0 && size < 0.995) return `${Number(value.toPrecision(2))}${space}${unit}`;
  let rest = value;
  for (const prefix of ["", "k", "M", "G", "T", "P"]) {
    if (Math.abs(rest) < 9.95 && (prefix || rest !== Math.trunc(rest))) return `${rest.toFixed(1)}${space}${prefix}${unit}`;
    if (Math.abs(rest) < 999.5) return `${rest.toFixed(0)}${space}${prefix}${unit}`;
    rest /= 1000;
  }
  return `${rest.toPrecision(3)}${space}E${unit}`;
}

export const rate = (value) => (known(value) ? scaled(value, "B/s") : NONE);

/** A loss, or a dash: three decimals where they mean something, else an exponent. */
export function number(value) {
  if (!known(value)) return NONE;
  if (value && !(Math.abs(value) >= 0.001 && Math.abs(value) < 1000)) return value.toExponential(2);
  return value.toFixed(3);
}

/** A setting as it was given: 0.7, not 0.700. */
export const setting = (value) => (known(value) ? String(Number(value.toPrecision(12))) : NONE);

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

/** Signs beside every colour: filled, half, empty, as in the terminal. */
export const SIGNS = { good: "●", uneasy: "◐", bad: "○", quiet: "·" };

export const levelTone = (level) => ({ info: "quiet", warning: "uneasy", error: "bad" })[level] ?? "uneasy";

/** Set the text of a node only where it differs: selections and screen readers are left in peace. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** An element with properties and children; strings become text, never markup. */
export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}
