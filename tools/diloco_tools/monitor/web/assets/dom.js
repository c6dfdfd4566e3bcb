// Elements of the page. Text from workers is always set as text, never as markup.

/** Signs of the tones, as in the terminal. */
export const SIGNS = { good: "●", uneasy: "◐", bad: "○", quiet: "·" };

export const $ = (id) => document.getElementById(id);

/** Set the text of a node only if it differs, so that selections and screen readers are not disturbed. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** An element with properties and children; strings become text, never markup. */
export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** Show [label, [[text, tone], ...]] as pairs of a list; unchanged pairs are not touched. */
export function showRows(list, rows) {
  rows.forEach(([label, parts], index) => {
    const node = list.children[index] ?? list.appendChild(make("div", {}, make("dt"), make("dd")));
    say(node.firstChild, label);
    node.lastChild.dataset.row = label;
    const told = JSON.stringify(parts);
    if (node.told === told) return;
    node.told = told;
    const shown = parts.flatMap(([text, tone], place) => {
      const part = make("span", { textContent: tone ? `${SIGNS[tone]} ${text}` : text });
      part.dataset.tone = tone;
      return place ? [", ", part] : [part];
    });
    node.lastChild.replaceChildren(...shown);
  });
  while (list.children.length > rows.length) list.lastChild.remove();
}

/** Names stand at the left, figures at the right. */
const isLeft = (key, index) => index < 2 || key === "via";

/**
 * A table sorted by a click on a title. A row remains the same element while its id is there, so it keeps
 * the focus. `columns`: [{key, title, help}]; the first names the row.
 */
export class Table {
  constructor(parent, columns, onOrder = null) {
    Object.assign(this, { columns, onOrder, rows: new Map(), sortedBy: 0, direction: 1, isAllowed: false });
    const heads = columns.map(({ key, title, help }, index) => {
      const button = make("button", { type: "button", textContent: title, title: help ?? "", onclick: () => this.sortBy(index) });
      return make("th", { scope: "col", role: "columnheader", className: isLeft(key, index) ? "left" : "" }, button);
    });
    const last = onOrder ? [make("th", { scope: "col", role: "columnheader" }, make("span", { className: "unseen", textContent: "Actions" }))] : [];
    this.heads = heads;
    this.body = make("tbody", { role: "rowgroup" });
    parent.replaceChildren(make("table", { role: "table" }, make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads, ...last)), this.body));
    this.mark();
  }

  sortBy(index) {
    this.direction = this.sortedBy === index ? -this.direction : 1;
    this.sortedBy = index;
    this.mark();
    this.arrange();
  }

  mark() {
    this.heads.forEach((node, index) => node.setAttribute("aria-sort", index !== this.sortedBy ? "none" : this.direction > 0 ? "ascending" : "descending"));
  }

  /** `rows`: [{id, about, cells: [[text, tone, below], ...], sort, order}]. A column without any text is hidden. */
  show(rows) {
    const here = new Set(rows.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (here.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    for (const given of rows) {
      const row = this.rows.get(given.id) ?? this.add(given.id);
      row.given = given;
      row.cells[0].node.title = given.about ?? "";
      given.cells.forEach(([text, tone, below], index) => {
        const { node, main, more } = row.cells[index];
        node.dataset.tone = tone;
        say(main, tone ? `${SIGNS[tone]} ${text}` : text);
        say(more, below);
      });
    }
    this.heads.forEach((head, index) => {
      head.hidden = rows.every(({ cells }) => !cells[index][0]);
      for (const { cells } of this.rows.values()) cells[index].node.hidden = head.hidden;
    });
    this.body.parentElement.hidden = rows.length === 0;
    this.arrange();
  }

  add(id) {
    const cells = this.columns.map(({ key, title }, index) => {
      const [main, more] = ["main", "more"].map((className) => make("span", { className }));
      const node = make(index ? "td" : "th", { className: `${key}${isLeft(key, index) ? " left" : ""}`, role: index ? "cell" : "rowheader" }, main, more);
      if (!index) node.scope = "row";
      node.dataset.label = title;
      return { node, main, more };
    });
    const node = make("tr", { role: "row" }, ...cells.map((cell) => cell.node));
    const row = { node, cells };
    if (this.onOrder) {
      row.kick = make("button", { type: "button", className: "kick", textContent: "Kick", disabled: !this.isAllowed, ariaLabel: `Kick ${id}`, onclick: () => this.onOrder(row.given.order) });
      node.append(make("td", { className: "do", role: "cell" }, row.kick));
    }
    this.rows.set(id, row);
    this.body.append(node);
    return row;
  }

  allow(isAllowed) {
    this.isAllowed = isAllowed;
    if (this.onOrder) for (const { kick } of this.rows.values()) kick.disabled = !isAllowed;
  }

  arrange() {
    const before = ({ given: x }, { given: y }) => {
      const [one, other] = [x.sort[this.sortedBy], y.sort[this.sortedBy]];
      if ((one === null) !== (other === null)) return one === null ? 1 : -1; // unknown ones are last
      return (one < other ? -1 : one > other ? 1 : 0) * this.direction || (x.id < y.id ? -1 : 1);
    };
    const rows = [...this.rows.values()].sort(before);
    rows.forEach(({ node }, index) => {
      // Only rows that are out of place move: a moved element loses focus.
      if (this.body.children[index] !== node) this.body.insertBefore(node, this.body.children[index] ?? null);
    });
  }
}
