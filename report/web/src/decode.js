// Reads the numbers that report/encode.go wrote: base64 of gzip of variable-length integers.

/** Unpacks a base64 gzip text. */
export async function unpack(text) {
  if (typeof DecompressionStream === 'undefined') throw new Error('it needs a browser of 2023 or newer');
  const raw = atob(text.trim());
  const packed = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) packed[i] = raw.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** A cursor over unpacked bytes. */
export class Reader {
  constructor(buf) {
    this.buf = buf;
    this.at = 0;
  }

  /** An unsigned integer below 2^53, seven bits a byte, low bits first. */
  uint() {
    const buf = this.buf;
    let b = buf[this.at++];
    if (b < 0x80) return b;
    let v = b & 0x7f;
    let scale = 128;
    do {
      if (this.at >= buf.length) throw new Error('the page is cut short');
      b = buf[this.at++];
      v += (b & 0x7f) * scale;
      scale *= 128;
    } while (b >= 0x80);
    return v;
  }

  /** A signed integer: even is positive. */
  int() {
    const v = this.uint();
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

  /** Segments with their live blocks. */
  map() {
    const segments = new Array(this.uint());
    let addr = 0;
    for (let s = 0; s < segments.length; s++) {
      addr += this.uint();
      const seg = {addr, size: this.uint(), stream: this.uint(), pool: this.uint(), flags: this.uint(), blocks: null};
      const n = this.uint();
      const blocks = {
        n, addr: new Float64Array(n), size: new Float64Array(n), request: new Float64Array(n),
        stack: new Uint32Array(n), stream: new Uint32Array(n), since: new Int32Array(n), pending: new Uint8Array(n),
      };
      let at = addr;
      for (let i = 0; i < n; i++) {
        at += this.int();
        blocks.addr[i] = at;
        const size = this.uint();
        blocks.size[i] = size;
        blocks.request[i] = size - this.uint();
        blocks.stack[i] = this.uint();
        blocks.stream[i] = this.uint();
        blocks.since[i] = this.int();
        blocks.pending[i] = this.uint();
        at += size;
      }
      seg.blocks = blocks;
      segments[s] = seg;
    }
    return segments;
  }
}
