// Colours that are computed.

/** One of n shades of a frame's layer, by the file that the frame is in. */
export function shadeOf(name, n) {
  const path = name.indexOf(' /'); // names of functions may have spaces too
  const space = path < 0 ? name.indexOf(' ') : path;
  const file = space < 0 ? name : name.slice(space + 1).replace(/:\d+$/, '');
  let hash = 0;
  for (let i = 0; i < file.length; i++) hash = (Math.imul(hash, 31) + file.charCodeAt(i)) >>> 0;
  return hash % n;
}

const part = (c, i) => parseInt(c.slice(1 + 2 * i, 3 + 2 * i), 16);

/** A colour between two of the form #rrggbb; share 0 is the first. */
export function mix(a, b, share) {
  return '#' + [0, 1, 2].map((i) => Math.round(part(a, i) + (part(b, i) - part(a, i)) * share)
    .toString(16).padStart(2, '0')).join('');
}

/** A colour as a pixel of an image: red is the lowest byte on every machine that browsers run on. */
export function pixel(c) {
  return (0xff000000 | (part(c, 2) << 16) | (part(c, 1) << 8) | part(c, 0)) >>> 0;
}
