// Elements from plain values. Whatever comes from the API becomes text here, never markup.

/** An element. `on…` attributes are listeners; null and false leave an attribute or a child out. */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  fill(node, ...children);
  return node;
}

/** Replaces what is inside `node`. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

/** Sets text only where it differs, so that a selection survives an update. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Shows or hides. */
export function setShown(node, shown) {
  node.hidden = !shown;
}

/**
 * A list whose elements stay the same while their items do: focus and scroll position survive an update.
 * `create(item)` returns {node, update(item)}.
 */
export class KeyedList {
  #container;
  #key;
  #create;
  #entries = new Map();

  constructor(container, key, create) {
    this.#container = container;
    this.#key = key;
    this.#create = create;
  }

  update(items) {
    const before = this.#entries;
    this.#entries = new Map();
    for (const item of items) {
      const key = this.#key(item);
      const entry = before.get(key) ?? this.#create(item);
      before.delete(key);
      entry.update(item);
      this.#entries.set(key, entry);
    }
    for (const gone of before.values()) gone.node.remove();
    let place = this.#container.firstChild;
    for (const { node } of this.#entries.values()) {
      if (node === place) place = place.nextSibling;
      else this.#container.insertBefore(node, place);
    }
  }
}
