// Two lists of the page: rows of figures, which the server words, and logs whose ages go on.

import { SIGNS, duration, levelTone, make, say } from "./format.js";

const MOST_EVENTS = 200;

export class Rows {
  constructor(parent) {
    this.parent = parent;
    this.rows = new Map(); // label -> {node, value, told}
  }

  /** `rows`: [[label, [[text, tone], ...]], ...]. */
  show(rows) {
    const here = new Set(rows.map(([label]) => label));
    for (const [label, { node }] of this.rows) {
      if (here.has(label)) continue;
      node.remove();
      this.rows.delete(label);
    }
    rows.forEach(([label, parts], index) => {
      if (!this.rows.has(label)) {
        const value = make("dd");
        const node = make("div", {}, make("dt", { textContent: label[0].toUpperCase() + label.slice(1) }), value);
        this.parent.insertBefore(node, this.parent.children[index] ?? null);
        this.rows.set(label, { node, value, told: "" });
      }
      const row = this.rows.get(label);
      const told = JSON.stringify(parts);
      if (row.told === told) return; // a selection in it stays
      row.told = told;
      row.value.replaceChildren(
        ...parts.flatMap(([text, tone], place) => {
          const part = make("span", { textContent: tone ? `${SIGNS[tone]} ${text}` : text });
          part.dataset.tone = tone;
          return place ? [", ", part] : [part];
        }),
      );
    });
  }
}

/** A list of {key, age_s, level, text}, newest first; rows are made once and their ages go on. */
export class Log {
  constructor(parent) {
    this.parent = parent;
    this.rows = new Map(); // key -> {node, age, at: the second of this page's clock at which it happened}
  }

  /** `entries`: oldest first; `now`: seconds of this page's clock; `keep`: those before stay. */
  show(entries, now, { keep }) {
    if (!keep) this.clear();
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
    for (const key of [...this.rows.keys()].slice(0, -MOST_EVENTS)) this.drop(key);
  }

  drop(key) {
    this.rows.get(key).node.remove();
    this.rows.delete(key);
  }

  clear() {
    for (const key of [...this.rows.keys()]) this.drop(key);
  }

  tick(now) {
    for (const { age, at } of this.rows.values()) say(age, `${duration(now - at)} ago`);
  }
}
