// Makes and fills elements. Text is always set as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function make(name, { text, ...attributes } = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

/** Sets the text, if it has changed: what a screen reader or a selection is at stays as it is. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets an attribute, if it has changed; removes it if the value is null. */
export function mark(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Fills a <dl> with [name, text] pairs, keeping the elements that are there. */
export function define(list, pairs) {
  while (list.children.length > pairs.length) list.lastElementChild.remove();
  pairs.forEach(([name, text], i) => {
    if (!list.children[i]) list.append(make("div", {}, make("dt"), make("dd")));
    const [term, value] = list.children[i].children;
    say(term, name);
    say(value, text);
  });
}
