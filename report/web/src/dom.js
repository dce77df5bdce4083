// Builds elements. Text is always set as text, never as markup: stack and file names come from untrusted files.

/** h('td', {class: 'n'}, 'text', child) */
export function h(tag, attributes, ...children) {
  const el = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes || {})) {
    if (v === false || v === null || v === undefined) continue;
    if (k.startsWith('on')) el.addEventListener(k.slice(2), v);
    else if (k === 'css') for (const [p, s] of Object.entries(v)) el.style.setProperty(p, s);
    else el.setAttribute(k, v === true ? '' : v);
  }
  for (const c of children.flat()) if (c !== null && c !== undefined && c !== false) el.append(c);
  return el;
}

/** Replaces what an element holds; parts that are null are left out. */
export function fill(el, ...children) {
  el.replaceChildren(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
}

/** A colour of the style sheet, as it is now (light or dark). */
export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Calls back when the system changes between light and dark. */
export function onScheme(f) {
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', f);
}

/** Places a tooltip beside a point of the window, inside it. */
export function placeTip(tip, x, y) {
  tip.hidden = false;
  const r = tip.getBoundingClientRect();
  const left = x + 16 + r.width > innerWidth ? x - 16 - r.width : x + 16;
  const top = Math.max(4, Math.min(y + 12, innerHeight - r.height - 4));
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${top}px`;
}

/** What a stack is called, {name, through, from}: a frame, and what else it takes to know which. */
export function calledText(called, frame = (x) => x) {
  return `${frame(called.name)}${called.through ? `, through ${frame(called.through)}` : ''}${called.from ? `, from ${frame(called.from)}` : ''}`;
}

const shortFrames = new Map();

/** Has shortFrame know the frames of a page, of which Go made the short names. */
export function knowFrames(frames, short) {
  shortFrames.clear();
  frames.forEach((f, i) => { if (short[i]) shortFrames.set(f, short[i]); });
}

/** A frame without parameters and long folders, for where there is little room. */
export function shortFrame(frame) {
  return shortFrames.get(frame) || frame;
}

/** What a stack is called, short; all of it where the pointer rests. */
export function who(called, ...more) {
  return h('span', {class: 'who', title: calledText(called)}, calledText(called, shortFrame), ...more);
}
