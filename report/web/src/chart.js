// Memory over time: uPlot draws, Timeline says what.

import uPlot from 'uplot';
import {bytes, count, duration, timeLabels, unitFor} from './format.js';
import {cssColor, fill, h, onScheme, placeTip} from './dom.js';
import {overview} from './overview.js';
import * as state from './state.js';

const height = 300;
const stepped = uPlot.paths.stepped({align: 1});

/**
 * @param host element to fill
 * @param timeline Timeline
 * @param lines [{name, color (of the style sheet), fill, dash, shown}] in the order of the timeline's series
 * @param marks [{event, label}] events to mark with a vertical line
 * @param peakEvent where most was live
 * @param on {pick(event): a moment was chosen by a click, range(): what is shown has changed, timeOnly: events have no
 *     numbers that mean something, over: the text where a line has ended, thinned: refine will be called}
 * @return {tracks: element below the plot for what shares its x axis, shown(): {min, max, width of it in pixels},
 *     moments(list of {event, label, color}), refine(times, curves) with all points}
 */
export function memoryChart(host, timeline, lines, marks, peakEvent, on = {}) {
  let plot = null;
  const tip = h('div', {class: 'tip', hidden: true});
  const canvasHost = h('div', {class: 'plot'});
  const tracks = h('div', {class: 'tracks'});
  let moments = [];
  let {thinned} = on; // lines are near enough to be drawn, but have not the values of every event
  const small = overview(timeline, lines, {range: setRange, center: (x) => zoomTo(x, range[1] - range[0])});
  const panes = h('div', {class: 'panes', tabindex: '0', role: 'group', 'aria-label':
    'Memory over time. Left and right move, plus and minus zoom, Home and End go to the ends, Escape shows the whole run.'},
  canvasHost, small.element, tracks);
  const status = h('span', {class: 'muted range', 'aria-live': 'polite'});
  const xMode = h('select', {'aria-label': 'Horizontal axis', onchange: () => {
    const [a, b] = range.map((x) => timeline.eventAt(x));
    timeline.byEvent = xMode.value === 'event';
    setRange(...(timeline.byEvent ? [a, b] : [timeline.us[timeline.entryOf(a)], timeline.us[timeline.entryOf(b)]]));
    small.draw();
  }}, h('option', {value: 'time'}, 'by time'), h('option', {value: 'event', selected: state.get('x') === 'event'}, 'by event'));
  timeline.byEvent = !on.timeOnly && xMode.value === 'event';
  const [begin, end] = timeline.extent();
  let range = [state.number('from', begin, end, begin), state.number('to', begin, end, end)];
  if (range[0] >= range[1]) range = [begin, end];
  const button = (text, title, f) => h('button', {type: 'button', title, onclick: f}, text);
  const legend = h('div', {class: 'legend'}, lines.map((l, i) => {
    const key = h('button', {type: 'button', 'aria-pressed': String(l.shown), onclick: () => {
      l.shown = !l.shown;
      key.setAttribute('aria-pressed', String(l.shown));
      draw(); // before uPlot shows it: what is not shown has no values
      plot.setSeries(i + 1, {show: l.shown});
      small.draw();
    }}, lineKey(l), l.name);
    return key;
  }));
  host.append(
    h('div', {class: 'bar'}, legend, h('div', {class: 'tools'}, status, on.timeOnly ? null : xMode,
      peakEvent === null ? null : button('Peak', 'Go to the moment when most was live', () => {
        const x = timeline.byEvent ? peakEvent : timeline.us[timeline.entryOf(peakEvent)];
        const [from, to] = timeline.extent();
        zoomTo(x, Math.min(range[1] - range[0], (to - from) / 20));
      }),
      button('+', 'Zoom in', () => zoomBy(0.5, (range[0] + range[1]) / 2)),
      button('\u2212', 'Zoom out', () => zoomBy(2, (range[0] + range[1]) / 2)),
      button('All', 'Show the whole run', () => setRange(...timeline.extent())))),
    panes, tip);

  function zoomTo(x, width) {
    setRange(x - width / 2, x + width / 2);
  }

  function zoomBy(factor, x) {
    setRange(x - (x - range[0]) * factor, x + (range[1] - x) * factor);
  }

  function setRange(a, b) {
    const [from, to] = timeline.extent();
    const least = timeline.byEvent ? 4 : Math.min(4, to - from); // microseconds, or events
    const width = Math.min(Math.max(b - a, least), to - from);
    const start = Math.min(Math.max(a, from), to - width);
    range = [start, start + width];
    draw();
    small.select(range);
  }

  function draw() {
    if (!plot) return;
    const columns = Math.max(200, Math.round(plot.bbox.width / devicePixelRatio) || 800);
    const data = timeline.data(range[0], range[1], columns, lines.map((l) => l.shown));
    plot.batch(() => {
      plot.setData(data, false);
      plot.setScale('x', {min: range[0], max: range[1]});
    });
    status.textContent = timeline.byEvent
      ? `events ${count(Math.round(range[0]))} to ${count(Math.round(range[1]))}`
      : `${duration(range[0])} to ${duration(range[1])}`;
    const [from, to] = timeline.extent();
    const whole = range[0] <= from && range[1] >= to;
    state.set({from: whole ? null : range[0], to: whole ? null : range[1], x: timeline.byEvent ? 'event' : null});
    host.dataset.min = String(range[0]);
    host.dataset.max = String(range[1]);
    if (on.range) on.range();
  }

  function build() {
    const axis = {stroke: cssColor('--muted'), grid: {stroke: cssColor('--grid'), width: 1},
      ticks: {stroke: cssColor('--grid'), width: 1}, font: '12px system-ui, sans-serif'};
    if (plot) plot.destroy();
    const top = Math.max(1, ...timeline.series.map((s) => {
      const out = {low: 0, high: 0};
      s.range(0, timeline.us.length, out);
      return out.high;
    }));
    const unit = unitFor(top);
    plot = new uPlot({
      width: Math.max(300, canvasHost.clientWidth), height, pxAlign: 1,
      legend: {show: false},
      cursor: {drag: {x: true, y: false, setScale: false}, points: {show: false}},
      scales: {
        x: {time: false, auto: false, range: () => range},
        y: {auto: true, range: (u, low, high) => [0, Math.max(high || 0, 1) * 1.05]},
      },
      axes: [
        {...axis, space: 90, values: (u, at) => (timeline.byEvent ? at.map(count) : timeLabels(at))},
        {...axis, size: gutter(), incrs: increments(unit.scale),
          values: (u, at) => at.map((v) => `${+(v / unit.scale).toFixed(2)} ${v ? unit.name : ''}`)},
      ],
      series: [{}, ...lines.map((l) => ({
        label: l.name, show: l.shown, stroke: cssColor(l.color), width: l.fill ? 1 : 1.75, dash: l.dash,
        fill: l.fill ? cssColor(l.fill) : undefined, paths: stepped, points: {show: false},
      }))],
      hooks: {
        setSelect: [(u) => {
          if (u.select.width < 3) return;
          const a = u.posToVal(u.select.left, 'x');
          const b = u.posToVal(u.select.left + u.select.width, 'x');
          u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
          setRange(a, b);
        }],
        setCursor: [hover],
        ready: [alignOverview],
        setSize: [alignOverview],
        draw: [drawMarks],
      },
    }, timeline.data(range[0], range[1], 800, lines.map((l) => l.shown)), canvasHost);
    // A click that is no drag and no double-click chooses a moment.
    let pressed = 0;
    let waiting = 0;
    plot.over.addEventListener('mousedown', (e) => {
      pressed = e.clientX;
      panes.focus({preventScroll: true}); // for the keys
    });
    plot.over.addEventListener('click', (e) => {
      clearTimeout(waiting);
      if (!on.pick || e.detail > 1 || Math.abs(e.clientX - pressed) > 2) return;
      const event = timeline.eventAt(plot.posToVal(e.offsetX, 'x'));
      waiting = setTimeout(() => on.pick(event), 250);
    });
    plot.over.addEventListener('dblclick', () => setRange(...timeline.extent()));
    plot.over.addEventListener('mouseleave', () => { tip.hidden = true; });
    draw();
    small.select(range);
    small.draw();
  }

  function drawMarks(u) {
    const ctx = u.ctx;
    ctx.save();
    ctx.textAlign = 'left';
    ctx.textBaseline = 'alphabetic';
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    const rows = []; // where the labels of each row are, so that none covers another
    for (const m of [...marks, ...moments].sort((a, b) => a.event - b.event)) {
      ctx.fillStyle = ctx.strokeStyle = cssColor(m.color || '--bad');
      const x = timeline.byEvent ? m.event : timeline.us[timeline.entryOf(m.event)];
      if (x < range[0] || x > range[1]) continue;
      const px = Math.round(u.valToPos(x, 'x', true)) + 0.5;
      ctx.setLineDash([4, 3]);
      ctx.beginPath();
      ctx.moveTo(px, u.bbox.top);
      ctx.lineTo(px, u.bbox.top + u.bbox.height);
      ctx.stroke();
      const w = ctx.measureText(m.label).width;
      const from = px + 4 + w > u.bbox.left + u.bbox.width ? px - 4 - w : px + 4;
      let row = rows.findIndex((taken) => taken.every(([a, b]) => b < from || a > from + w));
      if (row < 0) row = rows.push([]) - 1;
      rows[row].push([from, from + w]);
      if (row < 8) ctx.fillText(m.label, from, u.bbox.top + (12 + 14 * row) * devicePixelRatio);
    }
    ctx.restore();
  }

  function hover(u) {
    if (thinned || u.cursor.left < 0 || u.cursor.left === null || u.cursor.left === undefined) {
      tip.hidden = true;
      return;
    }
    const x = u.posToVal(u.cursor.left, 'x');
    const found = timeline.under(x, (range[1] - range[0]) / u.over.clientWidth, lines.map((l) => l.shown));
    fill(tip,
      h('b', {}, duration(found.us), on.timeOnly ? '' : ` \u00b7 event ${count(found.event)}`),
      found.events > 1 && !on.timeOnly ? h('div', {class: 'muted'}, `highest of about ${count(found.events)} events here`) : null,
      h('table', {}, lines.map((l, i) => (l.shown ? h('tr', {'data-series': l.name, 'data-bytes': found.values[i]},
        h('td', {}, lineKey(l), l.name),
        h('td', {class: 'n'}, found.values[i] === null ? on.over || 'out of memory' : bytes(found.values[i]))) : null))));
    const r = u.over.getBoundingClientRect();
    placeTip(tip, r.left + u.cursor.left, r.top + u.cursor.top);
  }

  // The overview lies under the plot's own area.
  function alignOverview(u) {
    const r = devicePixelRatio || 1;
    for (const el of [small.element, tracks]) {
      el.style.marginLeft = `${u.bbox.left / r}px`;
      el.style.width = `${u.bbox.width / r}px`;
    }
  }

  function pan(share) {
    const by = share * (range[1] - range[0]);
    setRange(range[0] + by, range[1] + by);
  }

  // The wheel alone scrolls the page; with a key held it zooms.
  panes.addEventListener('wheel', (e) => {
    const width = plot.over.clientWidth;
    if (e.ctrlKey || e.metaKey) {
      const x = e.clientX - plot.over.getBoundingClientRect().left;
      zoomBy(Math.exp(Math.max(-1, Math.min(1, e.deltaY / 300))), plot.posToVal(Math.max(0, Math.min(width, x)), 'x'));
    } else if (Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey) pan((e.deltaX || e.deltaY) / width);
    else return;
    e.preventDefault();
  }, {passive: false});
  panes.addEventListener('keydown', (e) => {
    if (e.target !== panes || e.ctrlKey || e.metaKey || e.altKey) return;
    const middle = (range[0] + range[1]) / 2;
    const width = range[1] - range[0];
    const [from, to] = timeline.extent();
    const act = {ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), '+': () => zoomBy(0.7, middle), '=': () => zoomBy(0.7, middle),
      '-': () => zoomBy(1 / 0.7, middle), Home: () => setRange(from, from + width), End: () => setRange(to - width, to),
      Escape: () => setRange(from, to)}[e.key];
    if (!act) return;
    act();
    e.preventDefault();
  });

  build();
  let width = canvasHost.clientWidth;
  new ResizeObserver(() => {
    if (canvasHost.clientWidth === width || canvasHost.clientWidth === 0) return;
    width = canvasHost.clientWidth;
    plot.setSize({width: Math.max(300, width), height});
    draw();
    small.draw();
  }).observe(canvasHost);
  onScheme(build);
  return {
    tracks,
    shown: () => ({min: range[0], max: range[1], width: Math.max(1, Math.round(tracks.clientWidth))}),
    refine(times, curves) {
      timeline.read(times, curves);
      thinned = false;
      draw();
      small.draw();
    },
    moments(list) {
      moments = list;
      plot.redraw(false, false);
    },
  };
}

/** How wide the axis of sizes is. */
function gutter() {
  return innerWidth < 600 ? 60 : 76;
}

/** What a line looks like: its colour, and its dashes, by which lines are told apart without colours. */
function lineKey(l) {
  const parts = [];
  let at = 0;
  (l.dash || []).forEach((n, i) => { parts.push(`${i % 2 ? 'transparent' : 'var(--key)'} ${at}px ${at += n}px`); });
  return h('i', {class: l.fill ? '' : 'line', css: {'--key': `var(${l.color})`,
    '--line-image': l.dash ? `repeating-linear-gradient(90deg, ${parts.join(', ')})` : 'linear-gradient(var(--key), var(--key))'}});
}

/** Steps of an axis of sizes: powers of two of its unit, so that labels are round. */
function increments(scale) {
  const steps = [];
  for (let s = scale / 64; s <= scale * 1024; s *= 2) if (s >= 1) steps.push(s);
  return steps;
}
