// Reads the numbers that report/encode.go wrote: base64 of gzip of variable-length integers.

/** The event at which something ends that was still there after the last one. */
export const never = 0x7fffffff;

/** Unpacks a base64 gzip text. */
export async function unpack(text) {
  if (typeof DecompressionStream === 'undefined') throw new Error('it needs a browser of 2023 or newer');
  const stream = new Blob([fromBase64(text)]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const all = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) all[i] = raw.charCodeAt(i);
  return all;
}

/** A cursor over unpacked bytes. */
export class Reader {
  constructor(buf) {
    this.buf = buf;
    this.at = 0;
  }

  /** An unsigned integer below 2^53, seven bits a byte, low bits first. */
  uint() {
    const b = this.buf[this.at++];
    return b < 0x80 ? b : this.#long(b & 0x7f);
  }

  /** One of several bytes: without floating point as long as it fits. */
  #long(low) {
    const {buf} = this;
    let {at} = this;
    let v = low;
    let b = 0x80;
    for (let shift = 7; shift < 28 && b >= 0x80; shift += 7) {
      b = buf[at++];
      v |= (b & 0x7f) << shift;
    }
    for (let scale = 2 ** 28; b >= 0x80; scale *= 128) {
      b = buf[at++];
      v += (b & 0x7f) * scale;
    }
    if (at > buf.length) throw new Error('the page is cut short');
    this.at = at;
    return v;
  }

  /** A signed integer: even is positive. */
  int() {
    const v = this.uint();
    if (v < 2 ** 31) return v & 1 ? ~(v >> 1) : v >> 1;
    return v % 2 === 0 ? v / 2 : -(v + 1) / 2;
  }

  /** Times of every stride-th event, in microseconds. */
  times() {
    const stride = this.uint();
    const n = this.uint();
    const us = new Float64Array(n);
    let t = 0;
    for (let i = 0; i < n; i++) us[i] = t += this.int();
    return {stride, us};
  }

  /** A step function: value[i] holds from event[i] on. */
  curve() {
    const n = this.uint();
    const event = new Int32Array(n);
    const value = new Float64Array(n);
    let e = -1;
    let v = 0;
    for (let i = 0; i < n; i++) {
      event[i] = e += this.uint();
      value[i] = v += this.int();
    }
    return {event, value};
  }

  /** n numbers into an array. */
  column(array) {
    for (let i = 0; i < array.length; i++) array[i] = this.uint();
    return array;
  }

  addresses(n) {
    const scale = 2 ** this.uint();
    const addr = new Float64Array(n);
    let a = 0;
    for (let i = 0; i < n; i++) addr[i] = (a += this.int()) * scale;
    return addr;
  }

  /** From which event to which n things were there. */
  ends(n) {
    const from = new Int32Array(n);
    const to = new Int32Array(n);
    let last = 0;
    for (let i = 0; i < n; i++) from[i] = (last += this.uint()) - 1;
    for (let i = 0; i < n; i++) {
      const lasted = this.uint();
      to[i] = lasted === 0 ? never : from[i] + lasted;
    }
    return {from, to};
  }

  /** The tree of stacks: the parent and the frame of every node; node 0 is the empty stack, its own parent. */
  stacks() {
    const n = this.uint() + 1;
    const parent = new Uint32Array(n);
    const frame = new Uint32Array(n);
    for (let i = 1; i < n; i++) parent[i] = i - this.uint();
    for (let i = 1; i < n; i++) frame[i] = this.uint();
    return {n, parent, frame};
  }

  /** Blocks by the event that handed them out. */
  blocks() {
    const n = this.uint();
    const {from, to} = this.ends(n);
    const freed = new Int32Array(n);
    for (let i = 0; i < n; i++) {
      const v = this.uint();
      if (v === 0) freed[i] = never;
      else freed[i] = to[i] === never ? from[i] + v - 1 : to[i] - v;
    }
    const blocks = {n, from, to, freed, addr: this.addresses(n), size: this.column(new Float64Array(n)),
      stream: this.column(new Uint32Array(n)), pool: this.column(new Uint32Array(n)),
      stack: this.column(new Uint32Array(n))};
    // Labels, of which a column is only there where some block has one.
    const has = this.uint();
    ['tag', 'library', 'thread'].forEach((name, bit) => {
      blocks[name] = has & (1 << bit) ? this.column(new Uint32Array(n)) : new Uint32Array(n);
    });
    return blocks;
  }

  /** Ranges of reserved addresses. */
  segments() {
    const n = this.uint();
    const {from, to} = this.ends(n);
    return {n, from, to, addr: this.addresses(n), size: this.column(new Float64Array(n)),
      stream: this.column(new Uint32Array(n)), pool: this.column(new Uint32Array(n)),
      flags: this.column(new Uint8Array(n))};
  }

  /** Calls by which memory was got from the driver and given back. */
  calls() {
    const n = this.uint();
    const event = new Int32Array(n);
    let e = 0;
    for (let i = 0; i < n; i++) event[i] = e += this.int();
    return {n, event, kind: this.column(new Uint8Array(n)), addr: this.addresses(n),
      size: this.column(new Float64Array(n)), took: this.column(new Float64Array(n)), // ns, 0 where it is not known
      stack: this.column(new Uint32Array(n))};
  }

  /** What stacks are called that blocks have: of a node the frame that says most, and those that it is through and from, -1 for none. */
  stackNames(n) {
    const name = new Int32Array(n).fill(-1);
    const through = new Int32Array(n).fill(-1);
    const from = new Int32Array(n).fill(-1);
    const nodes = this.column(new Uint32Array(this.uint()));
    for (let i = 1; i < nodes.length; i++) nodes[i] += nodes[i - 1];
    for (const node of nodes) name[node] = this.uint();
    for (const node of nodes) through[node] = this.uint() - 1;
    for (const node of nodes) from[node] = this.uint() - 1;
    return {name, through, from};
  }

  /** What every stack held in two runs; size is that of blocks without a stack. */
  changes() {
    const n = this.uint();
    const column = () => this.column(new Float64Array(n));
    const [stack, size, before, after, blocksBefore, blocks] = [column(), column(), column(), column(), column(), column()];
    return Array.from({length: n}, (_, i) => ({stack: stack[i], size: size[i], before: before[i], after: after[i],
      blocksBefore: blocksBefore[i], blocks: blocks[i]}));
  }
}
