// The page: reads what the Go package report embedded, and draws it. Nothing is fetched.

import 'uplot/dist/uPlot.min.css';
import './page.css';
import {Reader, unpack} from './decode.js';
import {Timeline} from './series.js';
import {memoryChart} from './chart.js';
import {addressMap} from './addrmap.js';
import {cards, comparison, facts, holders, oomList, policyColor, section, sizesAndStreams} from './sections.js';
import {bytes, count} from './format.js';
import {h} from './dom.js';

const data = JSON.parse(document.getElementById('cistern-data').textContent);
const root = document.getElementById('cistern-page');

async function show(index) {
  const t = data.traces[index];
  const body = h('main', {});
  root.replaceChildren(header(index), body);
  body.append(cards(t));
  if (t.results.length) {
    body.append(section('comparison', 'Allocators compared',
      'The same run under each policy. Ratio is peak reserved over peak live; driver time is modelled from calls '
      + 'measured on an H200.', comparison(t)));
  }
  const charts = h('div', {class: 'panel', id: 'chart'});
  body.append(section('time', 'Memory over time',
    'Drag to zoom, scroll to zoom in and out, double-click for the whole run.', charts));
  if (t.ooms.length) {
    body.append(section('oom', 'Out of memory, explained', '', oomList(t)));
  }
  const reader = new Reader(await unpack(document.getElementById(`cistern-series-${index}`).textContent));
  const times = reader.times();
  const curves = t.lines.map(() => reader.curve());
  const segments = reader.map();
  const lines = t.lines.map((l) => ({
    name: l.name, shown: !l.hidden,
    color: l.kind === 'policy' ? policyColor(l.policy) : `--${l.kind}`,
    fill: l.kind === 'live' ? '--live-fill' : undefined,
    dash: l.kind === 'recorded' ? [6, 4] : undefined,
  }));
  const timeline = new Timeline(times, curves, t.inspection.events, t.lines.map((l) => l.until));
  if (t.inspection.events > 0) {
    memoryChart(charts, timeline, lines, t.ooms.slice(0, 20).map((o) => ({event: o.event, label: `${o.source}: OOM`})),
      t.inspection.peak.event);
  }
  const peak = t.inspection.peak;
  const map = h('div', {class: 'panel', id: 'map'});
  body.append(section('addresses', 'Addresses at the peak', peak.reserved_bytes
    ? `As recorded, after event ${count(peak.event)}: ${bytes(peak.live_bytes)} live in ${count(peak.blocks)} blocks, `
      + `${bytes(peak.reserved_bytes)} reserved in ${count(peak.segments)} segments, ${bytes(peak.free_bytes)} free in `
      + `${count(peak.free_pieces)} pieces, the largest ${bytes(peak.largest_free_bytes)}.`
    : `After event ${count(peak.event)}: ${bytes(peak.live_bytes)} live in ${count(peak.blocks)} blocks. The file does `
      + 'not tell segments.', map));
  const stackName = (i) => (t.stacks[i] || []).map((f) => t.frames[f]);
  addressMap(map, segments, {
    stackName, streamName: (i) => t.stream_names[i] || '?', poolName: (i) => t.pool_names[i] || '0,0',
    topStacks: t.top_stacks,
  });
  body.append(section('holders', 'Who held it at the peak', '', sizesAndStreams(t),
    h('h3', {}, 'By stack'), holders(t)),
  section('facts', 'Settings and notes', '', facts(t)));
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

function header(index) {
  const t = data.traces[index];
  return h('header', {},
    h('div', {}, h('span', {class: 'brand'}, 'Cistern'), h('h1', {}, t.name)),
    data.traces.length > 1
      ? h('select', {'aria-label': 'Trace', onchange: (e) => run(Number(e.target.value))},
        data.traces.map((x, i) => h('option', {value: i, selected: i === index}, x.name)))
      : null);
}

function run(index) {
  show(index).catch((e) => {
    root.append(h('p', {class: 'error', role: 'alert'}, `This page could not be drawn: ${e.message}`));
    throw e;
  });
}

run(0);
