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

const scheme = matchMedia('(prefers-color-scheme: dark)');
const colors = new Map(); // of the scheme that they were read under
let colorsDark = null;

/** A colour of the style sheet, as it is now (light or dark). Drawing asks for many in every frame. */
export function cssColor(name) {
  if (colorsDark !== scheme.matches) colors.clear();
  colorsDark = scheme.matches;
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
}

/** Calls back when the system changes between light and dark. */
export function onScheme(f) {
  scheme.addEventListener('change', f);
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

/** Layers of a program by number (recording.Layer): whose code a frame is. */
export const layers = [{name: 'your code', color: '--own'}, {name: 'libraries', color: '--library'},
  {name: 'PyTorch, CUDA and Python', color: '--framework'}];

const shortFrames = new Map();
const frameLayers = new Map();

/** Has shortFrame and layerOf know the frames of a page, of which Go made the short names. */
export function knowFrames(view) {
  shortFrames.clear();
  frameLayers.clear();
  view.frames.forEach((f, i) => {
    if (view.short_frames[i]) shortFrames.set(f, view.short_frames[i]);
    frameLayers.set(f, view.frame_layers[i]);
  });
}

/** The layer of a frame; undefined where it is none, but a size or a tag. */
export function layerOf(frame) {
  return frameLayers.get(frame);
}

/** A frame without parameters and long folders, for where there is little room. */
export function shortFrame(frame) {
  return shortFrames.get(frame) || frame;
}

/** The first frames of a stack in a tooltip; those of frameworks are left out, but for the innermost. */
export function topFrames(frames) {
  return h('ol', {class: 'frames'}, frames.filter((f, i) => i === 0 || layerOf(f) !== 2).slice(0, 6).map((f) => h('li', {}, shortFrame(f))));
}

/** What a stack is called, short; all of it where the pointer rests. */
export function who(called, ...more) {
  return h('span', {class: 'who', title: calledText(called)}, calledText(called, shortFrame), ...more);
}

/**
 * A table that becomes a list of labelled figures where the window is narrow.
 * @param head names of columns
 * @param numbers columns that are
 * @param rows [[cell]], or as row makes them; those beyond `most` are shown when a button asks for them
 */
export function table(head, numbers, rows, attributes = {}, most = Infinity) {
  const all = rows.map((r) => (r instanceof Node ? r : row(head, numbers, r)));
  const body = h('tbody', {}, all.slice(0, most));
  const left = all.slice(most);
  const more = left.length ? h('button', {type: 'button', class: 'more', onclick: () => {
    body.append(...left);
    more.remove();
  }}, `Show ${left.length} more`) : null;
  return h('div', {class: 'scroll'}, h('table', {...attributes, class: `grid stacked ${attributes.class || ''}`},
    head.some(Boolean) ? h('thead', {}, h('tr', {}, head.map((x, i) => h(x ? 'th' : 'td', {class: numbers.includes(i) ? 'n' : '', scope: x ? 'col' : null}, x)))) : null,
    body), more);
}

/** A row of such a table. */
export function row(head, numbers, cells, attributes = {}) {
  return h('tr', attributes, cells.map((c, i) => h('td', {class: numbers.includes(i) ? 'n' : '', 'data-label': i > 0 && head[i] ? head[i] : null}, c)));
}

/** How much of a long list is shown at first. */
export function few() {
  return innerWidth < 720 ? 5 : 10;
}

/** The first of many elements, and a button that shows the rest. */
export function first(all) {
  const n = few();
  if (all.length <= n + 2) return all;
  const more = h('button', {type: 'button', class: 'more', onclick: () => more.replaceWith(...all.slice(n))}, `Show ${all.length - n} more`);
  return [...all.slice(0, n), more];
}
