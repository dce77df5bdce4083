// Which blocks are live in the columns of a chart, and how many bytes of each group. A chart asks in every frame, so that
// no pass over all blocks is made: a million of them are summed up ahead, in steps. Pure.

const step = 64; // blocks, or changes, that are summed up together

/** The group of every block: the place of its key in `order`, for those that are not there the one behind the last. */
export function groupsOf(keys, order) {
  const group = new Map(order.map((k, i) => [k, i]));
  const all = new Uint8Array(keys.length);
  for (let i = 0; i < keys.length; i++) all[i] = group.get(keys[i]) ?? order.length;
  return all;
}

/** Live bytes at any event, and the blocks that hold most of them. */
export class ColumnLives {
  /**
   * @param blocks of Lives, in the order of their beginnings
   * @param events number of events
   */
  constructor(blocks, events) {
    this.blocks = blocks;
    this.#sortChanges(events);
    this.#sumUpChunks();
  }

  /** Sorts beginnings (block i as i) and ends (as ~i) by event: the first until[e + 1] are those up to event e. */
  #sortChanges(events) {
    const {n, from, to} = this.blocks;
    const until = new Int32Array(events + 2);
    const slot = (e) => Math.min(e, events) + 1; // what ends behind the last event never does
    for (let i = 0; i < n; i++) {
      until[slot(from[i])]++;
      until[slot(to[i])]++;
    }
    for (let e = 0, sum = 0; e < until.length; e++) {
      const here = until[e];
      until[e] = sum; // where the changes of this event begin, and, once they are placed, end
      sum += here;
    }
    this.change = new Int32Array(2 * n);
    for (let i = 0; i < n; i++) {
      this.change[until[slot(from[i])]++] = i;
      this.change[until[slot(to[i])]++] = ~i;
    }
    this.until = until;
  }

  /** Of each chunk of blocks how large the largest is, and when the last ends. */
  #sumUpChunks() {
    const {n, to, size} = this.blocks;
    const chunks = Math.ceil(n / step);
    this.largest = new Float64Array(chunks);
    this.last = new Int32Array(chunks).fill(-1);
    for (let i = 0; i < n; i++) {
      const c = Math.floor(i / step);
      if (size[i] > this.largest[c]) this.largest[c] = size[i];
      if (to[i] > this.last[c]) this.last[c] = to[i];
    }
  }

  /**
   * Divides the blocks into groups, for bands.
   * @param groups of each block, below n
   */
  group(groups, n) {
    const {change, blocks: {size}} = this;
    this.groups = groups;
    this.n = n;
    this.sums = new Float64Array(Math.ceil(change.length / step) * n); // of each group before every step-th change
    const now = new Float64Array(n);
    for (let k = 0; k < change.length; k++) {
      if (k % step === 0) this.sums.set(now, (k / step) * n);
      const c = change[k];
      if (c >= 0) now[groups[c]] += size[c];
      else now[groups[~c]] -= size[~c];
    }
  }

  /**
   * Live bytes of each group at some events: an array for each.
   * @param at rising events
   */
  bands(at) {
    const {change, until, groups, n, sums, blocks: {size}} = this;
    const out = Array.from({length: n}, () => new Float64Array(at.length));
    const now = new Float64Array(n);
    let k = 0;
    at.forEach((e, column) => {
      const end = until[e + 1];
      if (end - k > step) { // on from the last sums before it
        const s = Math.floor((end - 1) / step);
        now.set(sums.subarray(s * n, (s + 1) * n));
        k = s * step;
      }
      for (; k < end; k++) {
        const c = change[k];
        if (c >= 0) now[groups[c]] += size[c];
        else now[groups[~c]] -= size[~c];
      }
      for (let g = 0; g < n; g++) out[g][column] = now[g];
    });
    return out;
  }

  /**
   * The blocks of at least some bytes that are live at some events, oldest first: those of column k are
   * block[start[k]] to block[start[k + 1] - 1]. Their number is bounded by the bytes that are live, not by the blocks.
   * @param at rising events
   */
  large(at, least) {
    const {to} = this.blocks;
    const start = new Int32Array(at.length + 1);
    const block = [];
    const {found, begin} = this.#largeIn(at, least);
    let live = [];
    for (let k = 0, next = 0; k < at.length; k++) {
      live = live.filter((i) => to[i] > at[k]);
      while (next < found.length && begin[next] <= k) live.push(found[next++]);
      for (const i of live) block.push(i);
      start[k + 1] = block.length;
    }
    return {start, block};
  }

  /** Blocks of at least some bytes that are live at some of these events, and the first column of each. */
  #largeIn(at, least) {
    const {blocks: {n, from, to, size}, largest, last} = this;
    const found = [];
    const begin = [];
    const end = at.length ? at[at.length - 1] : -2;
    let a = 0;
    for (let i = 0; i < n && from[i] <= end; i++) {
      while (at[a] < from[i]) a++; // blocks are in the order of their beginnings
      if (i % step === 0) { // what ends before the next column is in none, and so are all that begin after it
        const c = i / step;
        if (largest[c] < least || last[c] <= at[a]) {
          i += step - 1;
          continue;
        }
      }
      if (size[i] < least || to[i] <= at[a]) continue;
      found.push(i);
      begin.push(a);
    }
    return {found, begin};
  }
}
