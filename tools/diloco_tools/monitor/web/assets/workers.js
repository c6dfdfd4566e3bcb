// The table of workers, in words of the server. A row stays the same element for as long as its worker is
// there, so focus stays too; it goes when the feed says so, and not because a button was pressed.

import { SIGNS, make, say } from "./format.js";

export class WorkerTable {
  constructor({ head, body, empty, onKick }) {
    Object.assign(this, { head, body, empty, onKick });
    this.columns = [];
    this.rows = new Map(); // worker id -> {node, cells, kick, worker}
    this.sortedBy = 0;
    this.direction = 1;
  }

  /** `columns`: [{key, title, help}], of which the first is the worker's id. */
  begin(columns) {
    this.columns = columns;
    const cell = (child) => {
      const node = make("th", { scope: "col" }, child);
      node.setAttribute("role", "columnheader");
      return node;
    };
    const heads = columns.map(({ title, help }, index) => {
      const button = make("button", { type: "button", textContent: title, title: help });
      button.addEventListener("click", () => this.sortBy(index));
      return cell(button);
    });
    heads.slice(0, 2).forEach((node) => (node.className = "left"));
    this.head.replaceChildren(...heads, cell(make("span", { className: "unseen", textContent: "Actions" })));
    this.mark();
  }

  sortBy(index) {
    this.direction = this.sortedBy === index ? -this.direction : 1;
    this.sortedBy = index;
    this.mark();
    this.arrange();
  }

  mark() {
    [...this.head.children].slice(0, this.columns.length).forEach((node, index) => {
      node.setAttribute("aria-sort", index !== this.sortedBy ? "none" : this.direction > 0 ? "ascending" : "descending");
    });
  }

  show(workers) {
    const here = new Set(workers.map((worker) => worker.id));
    for (const [id, row] of this.rows) {
      if (here.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    for (const worker of workers) {
      const row = this.rows.get(worker.id) ?? this.add(worker.id);
      row.worker = worker;
      row.cells[0].node.title = worker.about;
      worker.cells.forEach(([text, tone, below], index) => {
        const { node, main, more } = row.cells[index];
        node.dataset.tone = tone;
        say(main, tone ? `${SIGNS[tone]} ${text}` : text);
        say(more, below);
      });
    }
    this.empty.hidden = workers.length > 0;
    this.body.parentElement.hidden = workers.length === 0;
    this.arrange();
  }

  add(id) {
    const node = make("tr");
    node.setAttribute("role", "row");
    const cells = this.columns.map(({ key, title }, index) => {
      const main = make("span", { className: "main" });
      const more = make("span", { className: "more" });
      const cell = make(index ? "td" : "th", { className: `${key}${index < 2 ? " left" : ""}` }, main, more);
      if (!index) cell.scope = "row";
      cell.setAttribute("role", index ? "cell" : "rowheader");
      cell.dataset.label = title;
      return { node: cell, main, more };
    });
    const kick = make("button", { type: "button", className: "kick", textContent: "Kick" });
    kick.setAttribute("aria-label", `Kick ${id}`);
    kick.addEventListener("click", () => this.onKick(this.rows.get(id).worker));
    const last = make("td", { className: "do" }, kick);
    last.setAttribute("role", "cell");
    node.append(...cells.map((cell) => cell.node), last);
    const row = { node, cells, kick, worker: null };
    this.rows.set(id, row);
    this.body.append(node);
    return row;
  }

  allow(isAllowed) {
    for (const { kick } of this.rows.values()) kick.disabled = !isAllowed;
  }

  arrange() {
    const keys = new Map([...this.rows].map(([id, { worker }]) => [id, worker.sort[this.sortedBy]]));
    const before = (x, y) => {
      const [one, other] = [keys.get(x), keys.get(y)];
      if ((one === null) !== (other === null)) return one === null ? 1 : -1; // unknown ones are last
      return (one < other ? -1 : one > other ? 1 : 0) * this.direction || (x < y ? -1 : 1);
    };
    const rows = [...this.rows.values()];
    // Of two the branches are compared where they part, and a relay comes before those downstream of it.
    rows.sort(({ worker: { path: x } }, { worker: { path: y } }) => {
      const parting = x.findIndex((id, place) => id !== y[place]);
      if (parting < 0) return -1;
      return parting < y.length ? before(x[parting], y[parting]) : 1;
    });
    rows.forEach(({ node }, index) => {
      // Only rows that are out of place move: a moved element loses focus.
      if (this.body.children[index] !== node) this.body.insertBefore(node, this.body.children[index] ?? null);
    });
  }
}
