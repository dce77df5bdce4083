// Tracks below the chart, on its x axis: live bytes in bands (by pool, stream, library, size or stack), single allocations,
// and the calls by which the recorded program got memory from the driver and gave it back.

import {mix, pixel} from './color.js';
import {bytes, count, duration, hex} from './format.js';
import {cssColor, fill, h, onScheme, placeTip, topFrames} from './dom.js';
import {ColumnLives, groupsOf} from './columnlives.js';
import {callTotals, callsByColumn, columnsOf} from './columns.js';
import * as state from './state.js';

const bandHeight = 96;
const blockHeight = 220;
const callHeight = 44;
const timeHeight = 26;
const mostBands = 7; // one hue each, --c0 to --c6; all the rest share --c7

/**
 * A canvas as wide as the plot, with a title above and the ends of its axis on the left.
 * @param tools behind the title
 * @param hover(column, y) the elements of a tooltip, or null
 */
function track(chart, title, height, tools, hover) {
  const canvas = h('canvas', {class: 'track', height, role: 'img', 'aria-label': title, css: {'--tall': `${height}px`}});
  const tip = h('div', {class: 'tip', hidden: true});
  const axis = h('div', {class: 'axis', 'aria-hidden': 'true', css: {'--tall': `${height}px`}});
  let ends = '';
  chart.tracks.append(h('div', {class: 'bar track-title'}, h('h3', {}, title), ...tools), h('div', {class: 'strip'}, axis, canvas), tip);
  canvas.addEventListener('mouseleave', () => {
    tip.hidden = true;
    hover(-1, 0);
  });
  canvas.addEventListener('mousemove', (e) => {
    const found = hover(Math.floor(e.offsetX), e.offsetY);
    tip.hidden = !found;
    if (!found) return;
    fill(tip, ...found);
    placeTip(tip, e.clientX, e.clientY);
  });
  return {
    /** The context of the canvas, empty, for this many columns. */
    context(width) {
      const ratio = devicePixelRatio || 1;
      const ctx = canvas.getContext('2d');
      const [wide, tall] = [Math.floor(width * ratio), Math.floor(height * ratio)];
      if (canvas.width !== wide || canvas.height !== tall) {
        canvas.width = wide; // another size takes new memory
        canvas.height = tall;
      }
      ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
      ctx.clearRect(0, 0, width + 1, height + 1);
      return ctx;
    },
    ends(...labels) { // top to bottom
      if (labels.join('\n') === ends) return;
      ends = labels.join('\n');
      fill(axis, ...labels.map((x) => h('span', {}, x)));
    },
    canvas,
  };
}

/**
 * @param lives Lives
 * @param peak event at which most was live: the bands are those that held most then
 * @param by how bands may be distinguished: [{key, name, label(number)}]
 * @param chart as memoryChart returns it
 * @param said what a block is beside its size and its life: (index) => {rows: [[key, value]], frames}
 * @return {draw()} to call when what the chart shows has changed
 */
export function liveTracks(timeline, lives, peak, by, chart, said) {
  const legend = h('div', {class: 'legend'});
  const chosen = h('select', {'aria-label': 'Bands', onchange: choose},
    by.map((x) => h('option', {value: x.key, selected: x.key === state.get('bands')}, `by ${x.name}`)));
  const banded = track(chart, 'Live bytes', bandHeight, [h('div', {class: 'tools'}, chosen)], overBands);
  banded.canvas.parentElement.after(legend);
  const note = h('span', {class: 'muted range'});
  const single = track(chart, 'Single allocations', blockHeight, [note], overBlocks);
  let kind = by[0];
  let order = [];
  const columns = new ColumnLives(lives.blocks, lives.events);
  let shown = null; // what the last drawing was made of
  let keyed = ''; // the bands that the legend has
  let pointed = -1; // block under the pointer

  function choose() {
    kind = by.find((x) => x.key === chosen.value);
    state.set({bands: kind === by[0] ? null : kind.key});
    order = [...lives.sums(peak, kind.key)].sort((a, b) => b[1].bytes - a[1].bytes).slice(0, mostBands).map(([k]) => k);
    keyed = '';
    columns.group(groupsOf(lives.keys(kind.key), order), order.length + 1);
    draw();
  }

  const name = (g) => (g < order.length ? kind.label(order[g]) : 'all others');
  const short = (g) => (g < order.length && kind.short ? kind.short(order[g]) : name(g));
  const color = (g) => `--c${g < order.length ? g : mostBands}`;

  function draw() {
    const {min, max, width} = chart.shown();
    const {peaks} = columnsOf(timeline, min, max, width);
    const values = columns.bands(peaks);
    const total = new Float64Array(width);
    for (const band of values) for (let k = 0; k < width; k++) total[k] += band[k];
    const top = total.reduce((a, b) => Math.max(a, b), 1);
    shown = {width, peaks, values, total, top, drawn: values.map((_, g) => g).filter((g) => values[g].some((v) => v > 0))};
    drawBands();
    layOut();
    drawBlocks();
  }

  function drawBands() {
    const {width, values, top, drawn} = shown;
    const ctx = banded.context(width);
    const below = new Float64Array(width);
    const tall = bandHeight - 2;
    ctx.font = '11px system-ui, sans-serif';
    for (const g of drawn) {
      const band = values[g];
      ctx.fillStyle = cssColor(color(g));
      const broad = (k) => Math.min(band[Math.max(0, k - 25)], band[k], band[Math.min(width - 1, k + 25)]);
      let widest = 0;
      const y = (k) => bandHeight - (below[k] / top) * tall;
      ctx.beginPath(); // along its lower edge and back along the upper
      for (let k = 0; k < width; k++) {
        ctx.lineTo(k, y(k));
        ctx.lineTo(k + 1, y(k));
      }
      for (let k = width - 1; k >= 0; k--) {
        below[k] += band[k];
        ctx.lineTo(k + 1, y(k));
        ctx.lineTo(k, y(k));
      }
      ctx.fill();
      for (let k = 0; k < width; k++) if (broad(k) > broad(widest)) widest = k;
      let end = widest;
      while (end < width - 1 && broad(end + 1) >= 0.95 * broad(widest)) end++;
      label(ctx, short(g), (widest + end) / 2, bandHeight - ((below[widest] - band[widest] / 2) / top) * tall, (broad(widest) / top) * tall);
    }
    banded.ends(bytes(top), '0');
    if (drawn.join() === keyed) return;
    keyed = drawn.join();
    fill(legend, drawn.map((g) => h('span', {title: name(g)}, h('i', {css: {'--key': `var(${color(g)})`}}),
      h('span', {class: 'clip'}, short(g)))));
  }

  /** A name in the thickest place of its band, where that has room for it. */
  function label(ctx, text, k, y, thick) {
    const cut = text.length > 40 ? `${text.slice(0, 39)}\u2026` : text;
    const half = ctx.measureText(cut).width / 2 + 4;
    if (thick < 14 || 2 * half > shown.width) return;
    const x = Math.max(half, Math.min(shown.width - half, k));
    ctx.fillStyle = cssColor('--panel');
    ctx.globalAlpha = 0.85;
    ctx.fillRect(x - half, y - 7, 2 * half, 14);
    ctx.globalAlpha = 1;
    ctx.fillStyle = cssColor('--text');
    ctx.fillText(cut, x - half + 4, y + 4);
  }

  /** Which blocks are at least a quarter of a pixel high; those below are one band under all others. */
  function layOut() {
    const {peaks, top, total, width} = shown;
    const least = top / (blockHeight * 4);
    const {start, block} = columns.large(peaks, least);
    const rest = Float64Array.from(total);
    for (let k = 0; k < width; k++) for (let i = start[k]; i < start[k + 1]; i++) rest[k] -= lives.blocks.size[block[i]];
    Object.assign(shown, {start, block, rest, least});
    single.ends(bytes(top), '0');
    note.textContent = rest.some((v) => v > 0) ? `each at its age, the oldest below; those under ${bytes(Math.ceil(least))} are grey`
      : 'each at its age, the oldest below';
  }

  // Drawn pixel by pixel: as fast for a hundred thousand blocks as for ten.
  function drawBlocks() {
    const {width, start, block, rest, top} = shown;
    const ctx = single.context(width);
    const ratio = single.canvas.height / blockHeight;
    const wide = single.canvas.width;
    const tall = single.canvas.height;
    const image = ctx.createImageData(wide, tall);
    const out = new Uint32Array(image.data.buffer);
    const panel = cssColor('--panel');
    const hues = [...order.keys(), mostBands].map((g) => cssColor(`--c${g}`));
    if (order.length < mostBands) hues[order.length] = cssColor(`--c${mostBands}`);
    const shades = hues.map((c) => [0, 0.16, 0.32].map((x) => pixel(mix(c, panel, x))));
    const edges = hues.map((c) => pixel(mix(c, panel, 0.7)));
    const [hit, small] = [pixel(cssColor('--hit')), pixel(mix(cssColor('--c7'), panel, 0.5))];
    const {size} = lives.blocks;
    for (let x = 0; x < wide; x++) {
      const k = Math.min(width - 1, Math.floor(x / ratio));
      let sum = rest[k];
      let y = tall - Math.round((sum / top) * tall);
      for (let p = y; p < tall; p++) out[p * wide + x] = small;
      for (let i = start[k]; i < start[k + 1]; i++) {
        const b = block[i];
        sum += size[b];
        const end = tall - Math.round((sum / top) * tall);
        const c = b === pointed ? hit : shades[columns.groups[b]][b % 3];
        for (let p = end; p < y; p++) out[p * wide + x] = c;
        if (y - end > 2) out[end * wide + x] = edges[columns.groups[b]];
        y = end;
      }
    }
    ctx.putImageData(image, 0, 0);
  }

  function overBands(k) {
    if (!shown || k < 0 || k >= shown.width) return null;
    return [h('b', {}, `event ${count(shown.peaks[k])}`), h('table', {}, [...shown.drawn].reverse().map((g) => h('tr',
      {'data-band': name(g), 'data-bytes': shown.values[g][k]},
      h('td', {}, h('i', {css: {'--key': `var(${color(g)})`}}), short(g)),
      h('td', {class: 'n'}, bytes(shown.values[g][k])))))];
  }

  function blockAt(k, y) {
    let sum = shown.rest[k];
    const at = (1 - y / blockHeight) * shown.top;
    if (at < sum) return -2;
    for (let i = shown.start[k]; i < shown.start[k + 1]; i++) {
      sum += lives.blocks.size[shown.block[i]];
      if (at < sum) return shown.block[i];
    }
    return -1;
  }

  function overBlocks(k, y) {
    const b = shown && k >= 0 && k < shown.width ? blockAt(k, y) : -1;
    if (b !== pointed) {
      pointed = b;
      if (shown) drawBlocks();
    }
    if (b === -1) return null;
    if (b === -2) return [h('b', {}, `${bytes(shown.rest[k])} in allocations under ${bytes(Math.ceil(shown.least))} each`)];
    const {size, from, to} = lives.blocks;
    const more = said(b);
    const at = (e) => `event ${count(e)}, ${duration(timeline.us[timeline.entryOf(e)])}`;
    const rows = [['allocated', from[b] < 0 ? 'before the first event' : at(from[b])], ['freed', to[b] >= lives.events ? 'never' : at(to[b])],
      ...more.rows];
    return [h('b', {'data-bytes': size[b]}, bytes(size[b])), h('table', {}, rows.map(([a, v]) => h('tr', {}, h('td', {}, a), h('td', {class: 'n'}, v)))),
      topFrames(more.frames)];
  }

  choose();
  onScheme(draw);
  return {draw};
}

/**
 * Driver calls: got upwards, given back downwards, by the logarithm of their bytes, as they reach from 2 MiB to all; and
 * below, where the file says how long they took, the time spent in them, by its logarithm from a microsecond to ten seconds.
 * @param kinds of calls by number
 * @param stackName frames of a stack
 */
export function callTrack(timeline, lives, kinds, stackName, chart) {
  const {calls} = lives;
  const totals = callTotals(calls, kinds);
  const timed = totals.some((x) => x.took > 0);
  if (timed) totals.sort((a, b) => b.took - a.took); // what cost most comes first
  const height = callHeight + (timed ? timeHeight : 0);
  const arrow = (x) => (x.does > 0 ? '\u2191 ' : x.does < 0 ? '\u2193 ' : '');
  const legend = h('div', {class: 'legend calls', id: 'calls'},
    timed ? h('span', {class: 'muted'}, `${duration(totals.reduce((a, x) => a + x.took, 0) / 1e3)} in all:`) : null,
    totals.map((x) => h('span', {'data-kind': x.name, 'data-calls': x.calls, 'data-bytes': x.bytes, 'data-took': x.took},
      h('i', {css: {'--key': `var(${x.does > 0 ? '--c0' : x.does < 0 ? '--c1' : '--c7'})`}}),
      `${arrow(x)}${x.name} ${count(x.calls)}${x.does ? `, ${bytes(x.bytes)}` : ''}${timed ? `, ${duration(x.took / 1e3)}` : ''}`)),
    timed ? h('span', {}, h('i', {css: {'--key': 'var(--c3)'}}), 'time in them') : null);
  const strip = track(chart, timed ? 'Driver calls' : 'Driver calls of the record', height, [], over);
  strip.ends('got', 'gave back', ...(timed ? ['time'] : []));
  strip.canvas.parentElement.after(legend);
  let by = null;
  const half = callHeight / 2;

  function draw() {
    const {min, max, width} = chart.shown();
    const {edges} = columnsOf(timeline, min, max, width);
    by = callsByColumn(calls, kinds, edges, timeline.stride);
    const ctx = strip.context(width);
    ctx.fillStyle = cssColor('--grid');
    ctx.fillRect(0, half - 0.5, width, 1);
    const tall = (n) => Math.max(3, (Math.min(1, Math.max(0, Math.log2(n / 2 ** 20) + 1) / 18)) * (half - 2));
    const long = (ns) => Math.max(2, Math.min(1, Math.max(0, Math.log10(ns / 1e3)) / 7) * (timeHeight - 4));
    for (let k = 0; k < width; k++) {
      for (const [n, color, up] of [[by.got[k], '--c0', true], [by.gave[k], '--c1', false]]) {
        if (n === 0) continue;
        ctx.fillStyle = cssColor(color);
        ctx.fillRect(k - 0.5, up ? half - tall(n) : half, 2, tall(n));
      }
      if (by.took[k] > 0) {
        ctx.fillStyle = cssColor('--c3');
        ctx.fillRect(k - 0.5, height - long(by.took[k]), 2, long(by.took[k]));
      }
    }
  }

  function over(x) {
    if (!by || x < 0) return null;
    // The nearest column with a call within a few pixels.
    let k = -1;
    for (let d = 0; d < 5 && k < 0; d++) k = [x - d, x + d].find((c) => by.number[c] > 0) ?? -1;
    if (k < 0) return null;
    const i = by.first[k];
    const row = (a, b) => h('tr', {}, h('td', {}, a), h('td', {class: 'n'}, b));
    const one = by.number[k] === 1;
    return [h('b', {}, one ? kinds[calls.kind[i]].name : `${count(by.number[k])} driver calls`),
      h('table', {}, by.got[k] ? row('got', bytes(by.got[k])) : null, by.gave[k] ? row('gave back', bytes(by.gave[k])) : null,
        by.took[k] ? row('took', duration(by.took[k] / 1e3)) : null,
        calls.event[i] < 0 ? row('before', 'the first event') : row(one ? 'event' : 'from event', count(calls.event[i])),
        one ? row('address', hex(calls.addr[i])) : null),
      topFrames(one ? stackName(calls.stack[i]) : [])];
  }

  draw();
  onScheme(draw);
  return {draw};
}
