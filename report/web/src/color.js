// Colours that are computed.

/** Colours of frames follow the file that a frame is in, so that layers of a program are distinguished. */
export function hueOf(name, hues) {
  const path = name.indexOf(' /'); // names of functions may have spaces too
  const space = path < 0 ? name.indexOf(' ') : path;
  const file = space < 0 ? name : name.slice(space + 1).replace(/:\d+$/, '');
  let hash = 0;
  for (let i = 0; i < file.length; i++) hash = (Math.imul(hash, 31) + file.charCodeAt(i)) >>> 0;
  return hash % hues;
}

/** A colour between two of the form #rrggbb; share 0 is the first. */
export function mix(a, b, share) {
  const part = (c, i) => parseInt(c.slice(1 + 2 * i, 3 + 2 * i), 16);
  return '#' + [0, 1, 2].map((i) => Math.round(part(a, i) + (part(b, i) - part(a, i)) * share)
    .toString(16).padStart(2, '0')).join('');
}
