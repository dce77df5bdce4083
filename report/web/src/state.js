// What is shown, in the URL's hash: a link to the page shows the same trace, section, part of the run and moment.

let params = new URLSearchParams();
let waiting = 0;

/** Reads the hash. One without keys names a section. */
export function read() {
  const text = location.hash.slice(1);
  params = new URLSearchParams(text.includes('=') ? text : text && {go: text});
}

export function get(key) {
  return params.get(key);
}

/** A number of the hash between two others, else one that stands for it. */
export function number(key, low, high, otherwise) {
  const n = params.has(key) ? Number(params.get(key)) : NaN;
  return n >= low && n <= high ? n : otherwise;
}

/** Notes values; null takes a key away. Browsers bound how often the URL may change. */
export function set(values) {
  for (const [k, v] of Object.entries(values)) {
    if (v === null || v === false) params.delete(k);
    else params.set(k, v);
  }
  clearTimeout(waiting);
  waiting = setTimeout(() => history.replaceState(null, '', `#${params}`), 200);
}

/** Forgets all but some keys. */
export function keep(...keys) {
  set(Object.fromEntries([...params.keys()].filter((k) => !keys.includes(k)).map((k) => [k, null])));
}

/** The hash of this view at a section. */
export function linkTo(section) {
  const to = new URLSearchParams(params);
  to.set('go', section);
  return `#${to}`;
}

read();
