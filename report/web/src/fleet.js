// The page of a job: the rank that sets the limit, a heat map of ranks and steps, their envelope, and tables.

import uPlot from 'uplot';
import './fleet.css';
import {bytes, count, fixed, signed, unitFor} from './format.js';
import {cssColor, fill, h, onScheme, placeTip} from './dom.js';
import {mix, pixel} from './color.js';
import {section} from './sections.js';
import * as state from './state.js';

const causes = {used: 'used memory', fragmentation: 'fragmentation', cached: 'cached memory', outside: 'memory outside the allocator', growth: 'growth from step to step'};
const parts = [['used_bytes', 'used', '--c0'], ['split_bytes', 'fragmentation', '--c1'], ['cached_bytes', 'cached', '--c5'], ['outside_bytes', 'outside the allocator', '--c3'], ['free_bytes', 'free', '--free']];
const mostRanks = 50;
const mostHeight = 560;
const gutter = 76; // pixels left of the plot, and of the heat map, so that steps stand above each other
const increments = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500];

const decode = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

export function fleet(view, root) {
  const a = view.answer;
  const main = h('main', {class: 'fleet'});
  root.replaceChildren(h('header', {}, h('div', {}, h('span', {class: 'brand'}, 'Cistern'), h('h1', {}, `Job ${a.job || 'without a name'}`),
    h('span', {class: 'muted'}, facts(a)))), main);
  const rows = {reserved: view.reserved.map(decode), allocated: view.allocated.map(decode)};
  const one = h('div', {id: 'rank'});
  const show = {rank: -1, listeners: []};
  const choose = (i) => {
    show.rank = i;
    state.set({rank: a.ranks[i].identity.rank});
    fill(one, rankPanel(view, i));
    for (const f of show.listeners) f();
  };
  main.append(...[a.limit && limit(a), cards(a),
    section('findings', 'What stands out', '', h('div', {class: 'panel'}, a.findings.length
      ? h('ul', {class: 'found'}, a.findings.map((f) => h('li', {'data-kind': f.kind}, f.text)))
      : 'Ranks that make the same requests need the same memory.')),
    a.ranks.length && view.steps.length ? section('heat', 'Ranks and steps', 'A row is a rank, a column one or more steps; the colour is the share of its GPU. Click a rank for its figures.', heatMap(view, rows, show, choose)) : null,
    one, groups(a), ranksTable(a, show, choose)].filter(Boolean));
  const wanted = a.ranks.findIndex((r) => String(r.identity.rank) === state.get('rank'));
  if (wanted >= 0) choose(wanted);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

function facts(a) {
  const all = [`${count(a.ranks.length)} ranks on ${count(a.nodes)} nodes`, `${count(a.steps)} steps`, ...a.gpus, ...(a.pytorch || []).map((v) => `PyTorch ${v}`)];
  return all.join(', ');
}

const rankName = (r) => (r.identity.rank >= 0 ? `rank ${r.identity.rank}` : `process ${r.identity.pid}`);

const place = (r) => [`node ${r.identity.node}`, `GPU ${r.device}`, ...Object.entries(r.identity.coordinates || {}).map(([k, v]) => `${k} ${v}`)].join(', ');

function limit(a) {
  const r = a.limit;
  const f = r.failure;
  const why = r.cause === 'growth' ? `Its allocated memory grows by ${bytes(Math.round(r.growth_bytes_per_step))} a step.`
    : r.excess_bytes > 0 ? `The cause is ${causes[r.cause]}: ${bytes(r.excess_bytes)} more than its twins.`
      : `${r.twins ? 'It needs what its twins need; most' : 'Most'} is ${causes[r.cause]}.`;
  return h('section', {class: 'panel limit', 'aria-label': 'The limit'}, h('h2', {}, `${rankName(r)} sets the limit`), h('div', {class: 'muted'}, place(r)),
    h('p', {}, f ? `It ran out of memory at step ${count(f.step)}: it requested ${bytes(f.requested_bytes)} with ${bytes(f.free_bytes)} free of ${bytes(r.total_bytes)}. `
      : `It has least headroom, ${bytes(Math.max(0, r.headroom_bytes))} of ${bytes(r.total_bytes)}. `, why), partsBar(r));
}

function partsBar(r) {
  const total = Math.max(r.total_bytes, parts.reduce((sum, [key]) => sum + r.parts[key], 0)) || 1;
  return h('div', {}, h('div', {class: 'parts', role: 'img', 'aria-label': 'Parts of the memory of the GPU'}, parts.map(([key, , color]) => h('span', {css: {'--w': `${100 * r.parts[key] / total}%`, '--key': `var(${color})`}}))),
    h('div', {class: 'legend'}, parts.map(([key, name, color]) => h('span', {}, h('i', {css: {'--key': `var(${color})`}}), `${name} ${bytes(r.parts[key])}`))));
}

function cards(a) {
  const card = (name, value, note, tone) => h('div', {class: `card ${tone || ''}`}, h('div', {class: 'muted'}, name), h('b', {}, value), h('div', {class: 'muted'}, note));
  const gpu = (gb) => (gb ? `a GPU of ${gb} GB` : 'no common GPU has it');
  const failed = a.ranks.filter((r) => r.ooms > 0).length;
  return h('div', {class: 'cards'}, card('Needed as recorded', bytes(a.need.recorded_bytes), `rank ${a.need.recorded_rank}: ${gpu(a.need.recorded_gb)}`),
    card('Needed at least', bytes(a.need.least_bytes), `rank ${a.need.least_rank}: ${gpu(a.need.least_gb)}`),
    card('Ranks that failed', count(failed), `of ${count(a.ranks.length)}`, failed ? 'bad' : 'good'),
    card('Groups', count(a.groups.length), 'of ranks with equal requests'),
    ...(a.stages || []).length ? [card('Stages', `${bytes(Math.min(...a.stages.map((s) => s.peak_allocated_bytes)))} to ${bytes(Math.max(...a.stages.map((s) => s.peak_allocated_bytes)))}`,
      `peaks of ${count(a.stages.length)} pipeline stages`)] : []);
}

const orders = {
  rank: (a) => (x, y) => a.ranks[x].identity.rank - a.ranks[y].identity.rank,
  headroom: () => (x, y) => x - y,
  group: (a) => (x, y) => a.ranks[x].group - a.ranks[y].group || a.ranks[x].identity.rank - a.ranks[y].identity.rank,
};

function heatMap(view, rows, show, choose) {
  const a = view.answer;
  const canvas = h('canvas', {class: 'heat', role: 'img', 'aria-label': 'Heat map of ranks and steps; the tables below have the same ranks'});
  const tip = h('div', {class: 'tip', hidden: true});
  const values = h('select', {'aria-label': 'Value', onchange: () => draw()}, h('option', {value: 'reserved'}, 'reserved and outside'), h('option', {value: 'allocated'}, 'allocated'));
  const by = h('select', {'aria-label': 'Order', onchange: () => draw()}, Object.keys(orders).map((o) => h('option', {value: o}, `by ${o}`)));
  const plotHost = h('div', {class: 'envelope'});
  const ends = h('div', {class: 'rank-ends'});
  let order = [];
  let plot = null;
  const columns = view.steps.length;

  function draw() {
    order = a.ranks.map((_, i) => i).sort(orders[by.value](a));
    fill(ends, h('span', {}, rankName(a.ranks[order[0]])), h('span', {}, rankName(a.ranks[order[order.length - 1]])));
    const height = Math.max(60, Math.min(mostHeight, order.length * 12));
    const perPixel = order.length / Math.min(order.length, height); // ranks of a line, of which the highest counts
    const lines = Math.min(order.length, height);
    const low = cssColor('--grid');
    const middle = cssColor('--accent');
    const high = cssColor('--bad');
    const colors = Array.from({length: 256}, (_, v) => pixel(v < 204 ? mix(low, middle, v / 204) : mix(middle, high, (v - 204) / 51)));
    const none = pixel(cssColor('--panel').length === 7 ? cssColor('--panel') : '#ffffff');
    canvas.width = columns;
    canvas.height = lines;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext('2d');
    const image = context.createImageData(columns, lines);
    const pixels = new Uint32Array(image.data.buffer);
    const cells = rows[values.value];
    for (let line = 0; line < lines; line++) {
      const from = Math.floor(line * perPixel);
      const to = Math.max(from + 1, Math.floor((line + 1) * perPixel));
      for (let c = 0; c < columns; c++) {
        let v = 0;
        for (let i = from; i < to; i++) v = Math.max(v, cells[order[i]][c]);
        pixels[line * columns + c] = v ? colors[v] : none;
      }
    }
    context.putImageData(image, 0, 0);
    envelope();
  }

  const at = (e) => {
    const box = canvas.getBoundingClientRect();
    const i = Math.min(order.length - 1, Math.max(0, Math.floor((e.clientY - box.top) / box.height * order.length)));
    const c = Math.min(columns - 1, Math.max(0, Math.floor((e.clientX - box.left) / box.width * columns)));
    return [order[i], c];
  };
  canvas.addEventListener('mousemove', (e) => {
    const [i, c] = at(e);
    const r = a.ranks[i];
    const share = rows[values.value][i][c];
    fill(tip, h('b', {}, rankName(r)), h('div', {class: 'muted'}, place(r)), h('div', {}, `step ${count(view.steps[c])}: ${share ? `${fixed((share - 1) / 254 * 100, 0)}% of the GPU` : 'not reached'}`),
      r.failure ? h('div', {class: 'no'}, `out of memory at step ${count(r.failure.step)}`) : null);
    placeTip(tip, e.clientX, e.clientY);
  });
  canvas.addEventListener('mouseleave', () => { tip.hidden = true; });
  canvas.addEventListener('click', (e) => {
    choose(at(e)[0]);
    document.getElementById('rank').scrollIntoView({block: 'nearest'});
  });

  function envelope() {
    if (plot) plot.destroy();
    const axis = {stroke: cssColor('--muted'), grid: {stroke: cssColor('--grid'), width: 1}, ticks: {stroke: cssColor('--grid'), width: 1}, font: '12px system-ui, sans-serif'};
    const e = view.envelopes[values.value];
    const data = [view.steps, ...e.map((line) => line.map((v) => v || null))];
    const series = [{}, {label: 'highest', stroke: cssColor('--bad'), width: 1.5}, {label: 'median', stroke: cssColor('--accent'), width: 1.5},
      {label: 'lowest', stroke: cssColor('--muted'), width: 1, dash: [4, 4]}];
    if (show.rank >= 0) {
      const total = a.ranks[show.rank].total_bytes;
      data.push(Array.from(rows[values.value][show.rank], (v) => (v ? (v - 1) / 254 * total : null)));
      series.push({label: rankName(a.ranks[show.rank]), stroke: cssColor('--c1'), width: 2});
    }
    const unit = unitFor(Math.max(1, ...e[0]));
    for (const s of series.slice(1)) s.value = (u, v) => (v === null ? '' : bytes(Math.round(v)));
    plot = new uPlot({padding: [8, 0, 0, 0], width: Math.max(300, plotHost.clientWidth), height: 220, scales: {x: {time: false}, y: {range: (u, lo, hi) => [0, Math.max(1, hi || 0) * 1.05]}},
      axes: [{...axis, label: 'step', labelSize: 18}, {...axis, size: gutter, incrs: increments.map((n) => n * unit.scale), values: (u, list) => list.map((v) => `${+(v / unit.scale).toFixed(2)} ${v ? unit.name : ''}`)}], series}, data, plotHost);
  }

  requestAnimationFrame(draw);
  show.listeners.push(envelope);
  onScheme(draw);
  addEventListener('resize', envelope);
  return h('div', {class: 'panel'}, h('div', {class: 'bar'}, h('div', {class: 'legend'}, h('span', {}, '0%'), h('span', {class: 'scale'}), h('span', {}, '100% of the GPU')),
    h('div', {class: 'tools'}, values, by)), h('div', {class: 'heatmap', css: {'--gutter': `${gutter}px`}}, ends, canvas), plotHost, tip);
}

// shellWord quotes a word for a shell where it needs that.
function shellWord(w) {
  return /^[\w\-=+./:,@%]+$/.test(w) ? w : `'${w.replace(/'/g, `'\\''`)}'`;
}

function rankPanel(view, i) {
  const r = view.answer.ranks[i];
  const report = view.reports[i];
  const row = (key, value) => h('tr', {}, h('td', {class: 'key'}, key), h('td', {class: 'value'}, value));
  return section('chosen', rankName(r)[0].toUpperCase() + rankName(r).slice(1), place(r), h('div', {class: 'panel'}, partsBar(r), h('table', {class: 'grid'}, h('tbody', {},
    row('headroom', r.headroom_bytes < 0 ? `${signed(r.headroom_bytes)} (a request failed)` : bytes(r.headroom_bytes)),
    row('cause', causes[r.cause] + (r.excess_bytes > 0 ? `, ${signed(r.excess_bytes)} against its twins` : '')),
    row('peaks', `allocated ${bytes(r.peak_allocated_bytes)}, reserved ${bytes(r.peak_reserved_bytes)} at step ${count(r.peak_step)}, outside ${bytes(r.peak_outside_bytes)}`),
    r.growth_bytes_per_step > 0 ? row('growth', `${bytes(Math.round(r.growth_bytes_per_step))} a step`) : null,
    row('steps', `${count(r.steps)}${r.ended ? '' : ', without a last summary'}`),
    row('group', String(r.group + 1)),
    row('summary', r.file),
    report ? row('report', h('a', {href: report}, report)) : r.report ? row('for its report', `cistern report ${shellWord(r.report)} -o ${shellWord(`${r.report}.html`)}`) : row('report', (r.recordings || []).length ? 'its recordings are not beside its summary' : 'it has no recording')))));
}

function groups(a) {
  if (!a.groups.length) return null;
  const same = {sequence: 'the same requests in the same order', totals: 'requests of the same number and bytes in each step', counts: 'as many requests in each step', '': 'alone'};
  return section('groups', 'Groups', 'Ranks with equal requests.', h('div', {class: 'scroll'}, h('table', {class: 'grid'}, h('thead', {}, h('tr', {}, ['group', 'ranks', 'peak allocated', 'least headroom', 'most', 'what is equal'].map((t, i) => h('th', {scope: 'col', class: i && i < 5 ? 'n' : ''}, t)))),
    h('tbody', {}, a.groups.slice(0, mostRanks).map((g, i) => h('tr', {}, h('td', {}, String(i + 1)), h('td', {class: 'n'}, count(g.ranks.length)), h('td', {class: 'n'}, bytes(g.peak_allocated_bytes)),
      h('td', {class: 'n'}, signed(g.least_headroom_bytes)), h('td', {class: 'n'}, signed(g.most_headroom_bytes)), h('td', {}, same[g.same])))))));
}

function ranksTable(a, show, choose) {
  const body = h('tbody', {}, a.ranks.slice(0, mostRanks).map((r, i) => h('tr', {'data-rank': i}, h('td', {}, h('button', {type: 'button', onclick: () => {
    choose(i);
    document.getElementById('rank').scrollIntoView({block: 'nearest'});
  }}, rankName(r))), h('td', {class: 'n'}, signed(r.headroom_bytes)), parts.slice(0, 4).map(([key]) => h('td', {class: 'n'}, bytes(r.parts[key]))), h('td', {}, causes[r.cause]), h('td', {}, r.identity.node))));
  show.listeners.push(() => body.querySelectorAll('tr').forEach((tr) => { tr.toggleAttribute('data-chosen', Number(tr.dataset.rank) === show.rank); }));
  return section('ranks', 'Ranks with least headroom', a.ranks.length > mostRanks ? `The first ${mostRanks} of ${count(a.ranks.length)}.` : '', h('div', {class: 'scroll'}, h('table', {class: 'grid'},
    h('thead', {}, h('tr', {}, ['rank', 'headroom', 'used', 'fragmentation', 'cached', 'outside', 'cause', 'node'].map((t, i) => h('th', {scope: 'col', class: i && i < 6 ? 'n' : ''}, t)))), body)));
}
