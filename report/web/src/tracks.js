// Two tracks below the chart, on its x axis: live bytes in bands (by pool, stream, library, size or stack), and the calls by
// which the recorded program got memory from the driver and gave it back, with the time each took where that is known.

import {bytes, count, duration, hex} from './format.js';
import {cssColor, fill, h, onScheme, placeTip, shortFrame} from './dom.js';
import {bands, groupsOf} from './lives.js';
import {callTotals, callsByColumn, columnsOf} from './columns.js';

const bandHeight = 96;
const callHeight = 44;
const timeHeight = 26;
const mostBands = 7; // one hue each, --c0 to --c6; all the rest share --c7

/**
 * @param lives Lives
 * @param peak event at which most was live: the bands are those that held most then
 * @param by how bands may be distinguished: [{key, name, label(number)}]
 * @param chart as memoryChart returns it
 * @return {draw()} to call when what the chart shows has changed
 */
export function bandTrack(bar, timeline, lives, peak, by, chart) {
  const canvas = h('canvas', {class: 'track', height: bandHeight, role: 'img', 'aria-label': 'Live bytes over time, in bands'});
  const tip = h('div', {class: 'tip', hidden: true});
  const legend = h('div', {class: 'legend'});
  const chosen = h('select', {'aria-label': 'Bands', onchange: choose}, by.map((x) => h('option', {value: x.key}, `bands by ${x.name}`)));
  bar.append(h('div', {class: 'bar bands'}, legend, h('div', {class: 'tools'}, chosen)));
  chart.tracks.append(canvas, tip);
  let kind = by[0];
  let order = [];
  let groups = null; // of each block
  let shown = null; // what the last drawing was made of

  function choose() {
    kind = by.find((x) => x.key === chosen.value);
    order = [...lives.sums(peak, kind.key)].sort((a, b) => b[1].bytes - a[1].bytes).slice(0, mostBands).map(([k]) => k);
    groups = groupsOf(lives.keys(kind.key), order);
    draw();
  }

  const name = (g) => (g < order.length ? kind.label(order[g]) : 'all others');
  const short = (g) => (g < order.length && kind.short ? kind.short(order[g]) : name(g));

  function draw() {
    const {min, max, width} = chart.shown();
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = bandHeight * ratio;
    const {peaks} = columnsOf(timeline, min, max, width);
    const values = bands(lives.blocks, groups, order.length + 1, peaks);
    const ctx = canvas.getContext('2d');
    ctx.scale(ratio, ratio);
    const total = new Float64Array(width);
    for (const band of values) for (let k = 0; k < width; k++) total[k] += band[k];
    let top = 1;
    for (let k = 0; k < width; k++) if (total[k] > top) top = total[k];
    const below = new Float64Array(width);
    const drawn = [];
    values.forEach((band, g) => {
      if (!band.some((v) => v > 0)) return;
      drawn.push(g);
      ctx.fillStyle = cssColor(`--c${g < order.length ? g : mostBands}`);
      for (let k = 0; k < width; k++) {
        if (band[k] <= 0) continue;
        const from = (below[k] / top) * (bandHeight - 2);
        below[k] += band[k];
        ctx.fillRect(k, bandHeight - (below[k] / top) * (bandHeight - 2), 1.02, (below[k] / top) * (bandHeight - 2) - from);
      }
    });
    shown = {peaks, values, drawn};
    fill(legend, drawn.map((g) => h('span', {title: name(g)}, h('i', {css: {'--key': `var(--c${g < order.length ? g : mostBands})`}}),
      h('span', {class: 'clip'}, short(g)))));
  }

  canvas.addEventListener('mouseleave', () => { tip.hidden = true; });
  canvas.addEventListener('mousemove', (e) => {
    const k = Math.floor(e.offsetX);
    if (!shown || k < 0 || k >= shown.peaks.length) return;
    fill(tip, h('b', {}, `event ${count(shown.peaks[k])}`), h('table', {}, shown.drawn.map((g) => h('tr',
      {'data-band': name(g), 'data-bytes': shown.values[g][k]},
      h('td', {}, h('i', {css: {'--key': `var(--c${g < order.length ? g : mostBands})`}}), short(g)),
      h('td', {class: 'n'}, bytes(shown.values[g][k]))))));
    placeTip(tip, e.clientX, e.clientY);
  });
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
export function callTrack(bar, timeline, lives, kinds, stackName, chart) {
  const {calls} = lives;
  const totals = callTotals(calls, kinds);
  const timed = totals.some((x) => x.took > 0);
  if (timed) totals.sort((a, b) => b.took - a.took); // what cost most comes first
  const height = callHeight + (timed ? timeHeight : 0);
  const canvas = h('canvas', {class: 'track', height, role: 'img', 'aria-label': 'Driver calls over time'});
  const tip = h('div', {class: 'tip', hidden: true});
  const arrow = (x) => (x.does > 0 ? '\u2191 ' : x.does < 0 ? '\u2193 ' : '');
  bar.append(h('div', {class: 'legend calls', id: 'calls'}, h('span', {class: 'muted'}, timed
    ? `Driver calls, ${duration(totals.reduce((a, x) => a + x.took, 0) / 1e3)} in all:` : 'Driver calls of the record:'),
  totals.map((x) => h('span', {'data-kind': x.name, 'data-calls': x.calls, 'data-bytes': x.bytes, 'data-took': x.took},
    h('i', {css: {'--key': `var(${x.does > 0 ? '--c0' : x.does < 0 ? '--c1' : '--c7'})`}}),
    `${arrow(x)}${x.name} ${count(x.calls)}${x.does ? `, ${bytes(x.bytes)}` : ''}${timed ? `, ${duration(x.took / 1e3)}` : ''}`)),
  timed ? h('span', {}, h('i', {css: {'--key': 'var(--c3)'}}), 'time in them') : null));
  chart.tracks.append(canvas, tip);
  let by = null;
  const half = callHeight / 2;

  function draw() {
    const {min, max, width} = chart.shown();
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const {edges} = columnsOf(timeline, min, max, width);
    by = callsByColumn(calls, kinds, edges, timeline.stride);
    const ctx = canvas.getContext('2d');
    ctx.scale(ratio, ratio);
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

  canvas.addEventListener('mouseleave', () => { tip.hidden = true; });
  canvas.addEventListener('mousemove', (e) => {
    if (!by) return;
    // The nearest column with a call within a few pixels.
    let k = -1;
    for (let d = 0; d < 5 && k < 0; d++) {
      k = [Math.floor(e.offsetX) - d, Math.floor(e.offsetX) + d].find((x) => by.number[x] > 0) ?? -1;
    }
    if (k < 0) {
      tip.hidden = true;
      return;
    }
    const i = by.first[k];
    const row = (a, b) => h('tr', {}, h('td', {}, a), h('td', {class: 'n'}, b));
    const one = by.number[k] === 1;
    fill(tip, h('b', {}, one ? kinds[calls.kind[i]].name : `${count(by.number[k])} driver calls`),
      h('table', {}, by.got[k] ? row('got', bytes(by.got[k])) : null, by.gave[k] ? row('gave back', bytes(by.gave[k])) : null,
        by.took[k] ? row('took', duration(by.took[k] / 1e3)) : null,
        calls.event[i] < 0 ? row('before', 'the first event') : row(one ? 'event' : 'from event', count(calls.event[i])),
        one ? row('address', hex(calls.addr[i])) : null),
      h('ol', {class: 'frames'}, one ? stackName(calls.stack[i]).slice(0, 6).map((f) => h('li', {}, shortFrame(f))) : []));
    placeTip(tip, e.clientX, e.clientY);
  });
  draw();
  onScheme(draw);
  return {draw};
}
