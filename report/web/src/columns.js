// What the tracks below the chart draw: numbers for each column of pixels of the part of the run that is shown. Pure.

/**
 * The columns of a range of x. An event belongs to the column that its x is in.
 * @param timeline Timeline
 * @return {edges: first entry of each column and one beyond, peaks: in each column the event at which series 0 is
 *     highest, where no event is in it the one that still holds}
 */
export function columnsOf(timeline, min, max, n) {
  const edges = new Int32Array(n + 1);
  const peaks = new Int32Array(n);
  const step = (max - min) / n;
  for (let k = 0; k <= n; k++) {
    const x = min + k * step;
    // The first entry at or behind x; the last column takes what lies on its right edge too.
    let p = timeline.entry(x);
    if (timeline.x(p) < x || (k === n && timeline.x(p) <= x)) p++;
    else if (k < n) while (p > 0 && timeline.x(p - 1) >= x) p--;
    edges[k] = Math.max(k === 0 ? 0 : edges[k - 1], Math.min(timeline.us.length, p));
  }
  for (let k = 0; k < n; k++) {
    const best = edges[k] < edges[k + 1] ? timeline.series[0].highest(edges[k], edges[k + 1]) : Math.max(0, edges[k] - 1);
    peaks[k] = Math.min(best * timeline.stride, Math.max(0, timeline.events - 1));
  }
  return {edges, peaks};
}

/**
 * Driver calls by column: how many there are, the bytes got and given back, the time they took, and the first of them.
 * @param calls as decoded
 * @param kinds of calls by number: {name, does: 1 gets memory, -1 gives it back}
 * @param edges of columnsOf
 */
export function callsByColumn(calls, kinds, edges, stride) {
  const n = edges.length - 1;
  const got = new Float64Array(n);
  const gave = new Float64Array(n);
  const took = new Float64Array(n);
  const number = new Uint32Array(n);
  const first = new Int32Array(n).fill(-1); // index of the first call of a column
  let k = 0;
  for (let i = 0; i < calls.n; i++) {
    const entry = Math.max(0, Math.floor(calls.event[i] / stride)); // before the first event is at it
    if (entry < edges[0]) continue;
    while (k < n && entry >= edges[k + 1]) k++;
    if (k === n) break;
    const {does} = kinds[calls.kind[i]];
    if (does > 0) got[k] += calls.size[i];
    else if (does < 0) gave[k] += calls.size[i];
    took[k] += calls.took[i];
    if (number[k]++ === 0) first[k] = i;
  }
  return {got, gave, took, number, first};
}

/** Calls, bytes and time by kind, of those that there are. */
export function callTotals(calls, kinds) {
  const all = kinds.map(({name, does}) => ({name, does, calls: 0, bytes: 0, took: 0}));
  for (let i = 0; i < calls.n; i++) {
    const at = all[calls.kind[i]];
    at.calls++;
    at.bytes += calls.size[i];
    at.took += calls.took[i];
  }
  return all.filter((x) => x.calls > 0);
}
