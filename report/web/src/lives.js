// Any moment of a run, from when each block and each reserved range was there. A moment is the state after an event;
// -1 is before the first. Pure functions over typed arrays: one pass over a million blocks takes milliseconds, so
// nothing is indexed ahead, but for what a chart asks in every frame (columnlives.js).

import {lastAtMost} from './series.js';

const grain = 512; // PyTorch's rounding of a block
const gapOfRanges = 2 << 20; // blocks outside every known segment further apart than this are shown as two ranges

/** Where ranges of sizes end, in bytes asked for; the last has no end. As analyze's. */
export const sizeSteps = [4 << 10, 64 << 10, 1 << 20, 10 << 20, 64 << 20, 256 << 20, 1 << 30];

export function sizeRange(bytes) {
  let k = 0;
  while (k < sizeSteps.length && bytes > sizeSteps[k]) k++;
  return k;
}

export class Lives {
  /**
   * @param stacks, blocks, segments, calls as decoded
   * @param events number of events
   * @param libraryOfFrame of each frame the number of its library, -1 where it has none
   */
  constructor(stacks, blocks, segments, calls, events, libraryOfFrame = []) {
    Object.assign(this, {stacks, blocks, segments, calls, events, libraryOfFrame});
  }

  /** Calls f(i) for every block that is live after an event. */
  eachLive(event, f) {
    const {from, to} = this.blocks;
    for (let i = 0, end = lastAtMost(from, event); i <= end; i++) if (to[i] > event) f(i);
  }

  /**
   * The number that blocks are distinguished by: of their 'stack', 'range' of sizes, 'size', 'pool', 'stream', 'tag',
   * 'thread', or the 'library' that allocated them, plus 1: the one that said so, else that of the innermost frame that has
   * one; 0 where none has.
   */
  keys(by) {
    const b = this.blocks;
    if (by === 'library') {
      if (!this.libraries) {
        const {n, parent, frame} = this.stacks;
        const of = new Uint32Array(n); // parents come before their children
        for (let i = 1; i < n; i++) of[i] = this.libraryOfFrame[frame[i]] >= 0 ? this.libraryOfFrame[frame[i]] + 1 : of[parent[i]];
        this.libraries = Uint32Array.from(b.stack, (s, i) => (b.library && b.library[i]) || of[s]);
      }
      return this.libraries;
    }
    if (by !== 'range') return b[by];
    if (!this.ranges) {
      this.ranges = new Uint8Array(b.n);
      for (let i = 0; i < b.n; i++) this.ranges[i] = sizeRange(b.size[i]);
    }
    return this.ranges;
  }

  /** What is live after an event by key: Map of key to {bytes, blocks}. */
  sums(event, by) {
    const keys = this.keys(by);
    const {size} = this.blocks;
    const all = new Map();
    this.eachLive(event, (i) => {
      const at = all.get(keys[i]);
      if (at) {
        at.bytes += size[i];
        at.blocks++;
      } else all.set(keys[i], {bytes: size[i], blocks: 1});
    });
    return all;
  }

  /**
   * What grew from one moment to another, by key, most first: bytes and blocks live at both, the difference, and how
   * much of what was handed out in between is still live at the second.
   */
  growth(first, second, by) {
    const keys = this.keys(by);
    const {size, from} = this.blocks;
    const all = new Map();
    const of = (key) => {
      let at = all.get(key);
      if (!at) {
        at = {key, before: 0, after: 0, blocksBefore: 0, blocksAfter: 0, kept: 0, keptBlocks: 0};
        all.set(key, at);
      }
      return at;
    };
    this.eachLive(first, (i) => {
      const at = of(keys[i]);
      at.before += size[i];
      at.blocksBefore++;
    });
    this.eachLive(second, (i) => {
      const at = of(keys[i]);
      at.after += size[i];
      at.blocksAfter++;
      if (from[i] > first) {
        at.kept += size[i];
        at.keptBlocks++;
      }
    });
    const rows = [...all.values()];
    for (const r of rows) r.grew = r.after - r.before;
    return rows.sort((x, y) => y.grew - x.grew || y.after - x.after || x.key - y.key);
  }

  /** The address map after an event: segments in address order, each with its live blocks. */
  mapAt(event) {
    const g = this.segments;
    const known = [];
    for (let i = 0, end = lastAtMost(g.from, event); i <= end; i++) {
      if (g.to[i] > event) {
        known.push({addr: g.addr[i], size: g.size[i], stream: g.stream[i], pool: g.pool[i], flags: g.flags[i], of: []});
      }
    }
    known.sort((a, b) => a.addr - b.addr);
    const starts = Float64Array.from(known, (s) => s.addr);
    const b = this.blocks;
    const live = [];
    this.eachLive(event, (i) => live.push(i));
    live.sort((x, y) => b.addr[x] - b.addr[y]);
    const loose = [];
    for (const i of live) {
      const addr = b.addr[i];
      const end = addr + rounded(b.size[i]);
      const s = lastAtMost(starts, addr);
      if (s >= 0 && addr < known[s].addr + known[s].size) {
        known[s].of.push(i);
        continue;
      }
      const last = loose[loose.length - 1];
      if (last && addr - (last.addr + last.size) < gapOfRanges) {
        last.size = Math.max(last.size, end - last.addr);
        last.of.push(i);
      } else loose.push({addr, size: end - addr, stream: b.stream[i], pool: b.pool[i], flags: 2, of: [i]});
    }
    const all = loose.length ? known.concat(loose).sort((x, y) => x.addr - y.addr) : known;
    for (const s of all) {
      const n = s.of.length;
      const blocks = {n, addr: new Float64Array(n), size: new Float64Array(n), request: new Float64Array(n),
        stack: new Uint32Array(n), stream: new Uint32Array(n), since: new Int32Array(n), pending: new Uint8Array(n),
        index: new Uint32Array(n)};
      s.of.forEach((i, k) => {
        blocks.addr[k] = b.addr[i];
        blocks.size[k] = rounded(b.size[i]);
        blocks.request[k] = b.size[i];
        blocks.stack[k] = b.stack[i];
        blocks.stream[k] = b.stream[i];
        blocks.since[k] = b.from[i];
        blocks.index[k] = i; // what keys tells of it
        blocks.pending[k] = b.freed[i] <= event ? 1 : 0;
      });
      s.blocks = blocks;
      delete s.of;
    }
    return all;
  }

  /** The frames of a stack, innermost first, as numbers. */
  framesOf(stack) {
    const {parent, frame} = this.stacks;
    const all = [];
    for (let n = stack; n !== 0; n = parent[n]) all.push(frame[n]);
    return all;
  }
}

function rounded(bytes) {
  return Math.max(grain, Math.ceil(bytes / grain) * grain);
}

/** What a map adds up to. Free are the bytes of known segments that no live block covers. */
export function measure(segments) {
  const m = {live: 0, blocks: 0, reserved: 0, segments: 0, free: 0, pieces: 0, largest: 0};
  const gap = (n) => {
    if (n <= 0) return;
    m.free += n;
    m.pieces++;
    m.largest = Math.max(m.largest, n);
  };
  for (const s of segments) {
    const b = s.blocks;
    for (let i = 0; i < b.n; i++) m.live += b.request[i];
    m.blocks += b.n;
    if (s.flags & 2) continue;
    m.segments++;
    m.reserved += s.size;
    let at = s.addr;
    for (let i = 0; i < b.n; i++) {
      gap(b.addr[i] - at);
      at = Math.max(at, b.addr[i] + b.size[i]);
    }
    gap(s.addr + s.size - at);
  }
  return m;
}
