// The address map: every reserved byte at a moment, in address order, wrapped into rows like lines of text. Live
// blocks are coloured, what is free stays pale, segments are set apart by a gap.

import {bytes, count, hex} from './format.js';
import {calledText, cssColor, fill, h, onScheme, placeTip, shortFrame, topFrames} from './dom.js';
import {lastAtMost} from './series.js';

const rowHeight = 14;
const rowGap = 3;
const maxRows = 32;
const letter = 6; // pixels, about
const hues = 8; // --c0 to --c7 of the style sheet

/**
 * @param host element to fill
 * @param view {stackName(i), called(i): what a stack is called, streamName(i), poolName(i), topStacks: [i...], groups: what else blocks may be distinguished by, if anything,
 *     [{key, name, label(number), numbers: of each block, top: [numbers of those that hold most]}]}
 * @return {show(segments)}, of Lives.mapAt
 */
export function addressMap(host, view) {
  const groups = view.groups || [];
  const canvas = h('canvas', {class: 'map', role: 'img',
    'aria-label': 'Address map: live blocks and free ranges of every segment'});
  const tip = h('div', {class: 'tip', hidden: true});
  const by = h('select', {'aria-label': 'Colour', onchange: draw},
    h('option', {value: 'stack'}, 'colour by stack'), h('option', {value: 'stream'}, 'colour by stream'),
    h('option', {value: 'size'}, 'colour by size'), h('option', {value: 'pool'}, 'colour by pool'),
    groups.map((g) => h('option', {value: g.key}, `colour by ${g.name}`)));
  const legend = h('div', {class: 'legend'});
  host.append(h('div', {class: 'bar'}, legend, h('div', {class: 'tools'}, by)), canvas, tip);
  if (!view.topStacks.some((s) => s !== 0)) by.value = 'size'; // no stacks were recorded

  let segments = [];
  let total = 0;
  let starts = new Float64Array(0); // where each segment begins in the concatenation of all
  let perRow = 1;
  let width = 0;

  const rank = new Map(view.topStacks.map((s, i) => [s, i]));
  const ranks = new Map(groups.map((g) => [g.key, new Map(g.top.map((n, i) => [n, i]))]));
  const group = () => groups.find((g) => g.key === by.value);
  const last = (k) => (k === undefined || k >= hues - 1 ? hues - 1 : k); // which all that hold little share
  const sizeSteps = [64 << 10, 1 << 20, 10 << 20, 64 << 20, 256 << 20, 1 << 30];
  function hueOf(seg, b, i) {
    switch (by.value) {
      case 'stream': return b.stream[i] % hues;
      case 'pool': return seg.pool % hues;
      case 'size': {
        const k = sizeSteps.findIndex((s) => b.size[i] <= s);
        return k < 0 ? sizeSteps.length : k;
      }
      case 'stack': return last(rank.get(b.stack[i]));
      default: return last(ranks.get(by.value).get(group().numbers[b.index[i]]));
    }
  }

  function draw() {
    const ratio = devicePixelRatio || 1;
    width = Math.max(200, canvas.clientWidth);
    // As many rows as it takes for a row to hold no more than 256 KiB a pixel, within what fits a screen.
    const rows = Math.max(1, Math.min(maxRows, Math.ceil(total / (width * (256 << 10)))));
    perRow = Math.max(1, total / rows);
    const tall = rows * (rowHeight + rowGap);
    canvas.style.height = `${tall}px`;
    canvas.width = width * ratio;
    canvas.height = tall * ratio;
    const ctx = canvas.getContext('2d');
    ctx.scale(ratio, ratio);
    const colors = Array.from({length: hues}, (_, i) => cssColor(`--c${i}`));
    const free = cssColor('--free');
    const edge = cssColor('--panel');
    const names = []; // of what is wide enough: colours alone say too little
    const stripe = (from, size, color, label) => {
      let at = from;
      let left = size;
      ctx.fillStyle = color;
      while (left > 0) {
        const row = Math.min(rows - 1, Math.floor(at / perRow + 1e-12));
        const n = Math.max(Math.min(left, (row + 1) * perRow - at), Number.EPSILON * at);
        const [x, y, wide] = [((at - row * perRow) / perRow) * width, row * (rowHeight + rowGap), (n / perRow) * width];
        ctx.fillRect(x, y, wide, rowHeight);
        if (label && at === from && wide > 12 * letter) names.push([label(), x, y, wide]);
        at += n;
        left -= n;
        if (row === rows - 1) break;
      }
    };
    const shown = new Map();
    segments.forEach((seg, s) => {
      if (!(seg.flags & 2)) stripe(starts[s], seg.size, free);
      const b = seg.blocks;
      for (let i = 0; i < b.n; i++) {
        const hue = hueOf(seg, b, i);
        stripe(starts[s] + (b.addr[i] - seg.addr), b.size[i], colors[hue], () => `${bytes(b.request[i])} ${worded(labelOf(seg, b, i, hue), shortFrame)}`);
        const entry = shown.get(hue) || {bytes: 0, label: labelOf(seg, b, i, hue)};
        entry.bytes += b.request[i];
        shown.set(hue, entry);
      }
    });
    ctx.fillStyle = '#10141b';
    ctx.font = '11px system-ui, sans-serif';
    for (const [text, x, y, wide] of names) ctx.fillText(text.slice(0, Math.floor(wide / letter) - 1), x + 4, y + rowHeight - 3);
    ctx.fillStyle = edge;
    segments.forEach((seg, s) => {
      if (s === 0 || (seg.size / perRow) * width < 3) return;
      const row = Math.min(rows - 1, Math.floor(starts[s] / perRow + 1e-12));
      ctx.fillRect(((starts[s] - row * perRow) / perRow) * width - 0.5, row * (rowHeight + rowGap), 1, rowHeight);
    });
    fill(legend,
      ...[...shown.entries()].sort((a, b) => a[0] - b[0]).map(([hue, e]) => h('span', {title: worded(e.label)},
        h('i', {css: {'--key': `var(--c${hue})`}}), h('span', {class: 'clip'}, worded(e.label, shortFrame)), ' ',
        h('span', {class: 'muted'}, bytes(e.bytes)))),
      h('span', {}, h('i', {css: {'--key': 'var(--free)'}}), 'free'));
  }

  // A label is a text, or what a stack is called.
  function worded(label, frame) {
    return typeof label === 'string' ? label : calledText(label, frame);
  }

  function labelOf(seg, b, i, hue) {
    switch (by.value) {
      case 'stream': return `stream ${view.streamName(b.stream[i])}`;
      case 'pool': return `pool ${view.poolName(seg.pool)}`;
      case 'size':
        return hue < sizeSteps.length ? `up to ${bytes(sizeSteps[hue]).replace('.00', '')}` : 'over 1 GiB';
      case 'stack': return hue === hues - 1 ? 'all other stacks' : view.called(b.stack[i]);
      default: return hue === hues - 1 ? 'all others' : group().label(group().numbers[b.index[i]]);
    }
  }

  canvas.addEventListener('mouseleave', () => { tip.hidden = true; });
  canvas.addEventListener('mousemove', (e) => {
    const row = Math.floor(e.offsetY / (rowHeight + rowGap));
    const at = row * perRow + (e.offsetX / width) * perRow;
    const s = lastAtMost(starts, at);
    if (s < 0 || at >= total) {
      tip.hidden = true;
      return;
    }
    const seg = segments[s];
    const addr = seg.addr + (at - starts[s]);
    // A pixel holds many bytes: the nearest block within a pixel of the pointer is meant.
    const reach = perRow / width / 2;
    const b = seg.blocks;
    let i = lastAtMost(b.addr, addr + reach);
    if (i >= 0 && b.addr[i] + b.size[i] < addr - reach) i = -1;
    const line = (k, v) => h('tr', {}, h('td', {}, k), h('td', {class: 'n'}, v));
    const kind = seg.flags & 2 ? 'range of blocks (no segment in the file)'
      : seg.flags & 1 ? 'expandable segment' : 'segment';
    fill(tip,
      i >= 0 ? h('b', {}, 'block ', hex(b.addr[i])) : h('b', {}, 'free'),
      h('table', {},
        i >= 0 ? [h('tr', {'data-bytes': b.request[i]}, h('td', {}, 'requested'), h('td', {class: 'n'}, bytes(b.request[i]))), line('stream', view.streamName(b.stream[i])),
          ...groups.map((g) => line(g.name, g.label(g.numbers[b.index[i]]))),
          line('since', b.since[i] < 0 ? 'before the first event' : `event ${count(b.since[i])}`),
          b.pending[i] ? line('state', 'given back, still used by a stream') : null] : null,
        line(kind, `${hex(seg.addr)}, ${bytes(seg.size)}`),
        line('segment stream, pool', `${view.streamName(seg.stream)}, ${view.poolName(seg.pool)}`)),
      i >= 0 ? topFrames(view.stackName(b.stack[i])) : null);
    placeTip(tip, e.clientX, e.clientY);
  });

  let drawn = host.clientWidth;
  new ResizeObserver(() => {
    if (host.clientWidth === drawn || host.clientWidth === 0) return;
    drawn = host.clientWidth;
    draw();
  }).observe(host);
  onScheme(draw);
  return {
    show(all) {
      segments = all;
      total = all.reduce((sum, s) => sum + s.size, 0);
      starts = new Float64Array(all.length);
      for (let i = 1; i < all.length; i++) starts[i] = starts[i - 1] + all[i - 1].size;
      tip.hidden = true;
      draw();
    },
  };
}
