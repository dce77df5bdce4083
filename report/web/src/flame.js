// The flame graph: d3-flame-graph draws, outermost frame on top; here are its colours, its tooltip, the search and
// the keys. What it shows is a tree of tree.js.

import flamegraph from 'd3-flame-graph';
import {select} from 'd3-selection';
import {mix, shadeOf} from './color.js';
import {bytes, count, fixed, signed} from './format.js';
import {cssColor, fill, h, layerOf, layers, onScheme, placeTip, shortFrame} from './dom.js';

const cell = 19;
const shades = 5;

/**
 * @param host element to fill
 * @param label what is shown, for readers that do not see it
 * @param compared {before, after}: names of two moments, whose difference colours the frames; null where there is one
 * @param tools what chooses how frames are arranged
 * @return {show(tree)}
 */
export function flame(host, label, compared = null, tools = []) {
  const tip = h('div', {class: 'tip', hidden: true});
  const found = h('span', {class: 'muted range', 'aria-live': 'polite'});
  const said = h('div', {class: 'muted said', 'aria-live': 'polite'});
  const term = h('input', {type: 'search', placeholder: 'Search frames', 'aria-label': 'Search frames', oninput: search});
  const canvas = h('div', {class: 'flame', tabindex: '0', role: 'group',
    'aria-label': `${label}. Arrows move between frames, Enter zooms, Escape shows all.`});
  const key = (color, text) => h('span', {}, h('i', {css: {'--key': `var(${color})`}}), text);
  host.append(h('div', {class: 'bar'},
    h('div', {class: 'legend'}, compared ? [key('--grew', '\u25b2 grew'), key('--shrank', '\u25bc shrank'), key('--same', 'as before')]
      : layers.map((l) => key(l.color, l.name))),
    h('div', {class: 'tools'}, tools.filter(Boolean), found, term,
      h('button', {type: 'button', title: 'Show all frames', onclick: () => { chart && chart.resetZoom(); focus(null); }}, 'Zoom out'))),
  said, canvas, tip);

  let tree = null;
  let chart = null;
  let current = null; // frame that the keys are at

  function color(d) {
    if (d.highlight) return cssColor('--hit');
    if (compared) {
      const {after, before} = d.data;
      const share = Math.abs(after - before) / Math.max(after, before, 1);
      return mix(cssColor('--same'), cssColor(after > before ? '--grew' : '--shrank'), share === 0 ? 0 : 0.2 + 0.6 * share);
    }
    const layer = layers[layerOf(d.data.name)];
    if (!layer) return cssColor('--same');
    return mix(cssColor(layer.color), cssColor('--pale'), (0.5 * shadeOf(d.data.name, shades)) / (shades - 1));
  }

  // What colour says is in the text too: the sign of a change, and the layer in the weight of the letters.
  function called(d) {
    const sign = compared && d.data.after !== d.data.before ? (d.data.after > d.data.before ? '\u25b2 ' : '\u25bc ') : '';
    return sign + shortFrame(d.data.name);
  }

  function say(d) {
    const of = (n) => `${fixed((100 * n) / Math.max(1, tree.value), 1)} %`;
    return compared
      ? `${d.data.name}: ${signed(d.data.after - d.data.before)} (${bytes(d.data.before)} ${compared.before}, `
        + `${bytes(d.data.after)} ${compared.after})`
      : `${d.data.name}: ${bytes(d.data.after)}, ${of(d.data.after)}, ${count(d.data.blocks)} `
        + `${d.data.blocks === 1 ? 'block' : 'blocks'}`;
  }

  function showTip(event, d) {
    const row = (k, v, b) => h('tr', {'data-bytes': b}, h('td', {}, k), h('td', {class: 'n'}, v));
    const layer = layers[layerOf(d.data.name)];
    fill(tip, h('b', {}, d.data.name), layer ? h('div', {class: 'muted'}, layer.name) : null, h('table', {}, compared
      ? [row(compared.before, bytes(d.data.before), d.data.before), row(compared.after, bytes(d.data.after), d.data.after),
        row('grew by', signed(d.data.after - d.data.before))]
      : [row('live', bytes(d.data.after), d.data.after),
        row('of all', `${fixed((100 * d.data.after) / Math.max(1, tree.after), 1)} %`)],
    row('blocks', count(d.data.blocks))));
    placeTip(tip, event.clientX, event.clientY);
  }
  const tips = () => {};
  tips.show = showTip;
  tips.hide = () => { tip.hidden = true; };

  function draw() {
    current = null;
    tip.hidden = true;
    canvas.replaceChildren();
    if (!tree || tree.value === 0) {
      canvas.append(h('p', {class: 'muted'}, 'Nothing is live here.'));
      chart = null;
      return;
    }
    chart = flamegraph().width(Math.max(280, canvas.clientWidth)).cellHeight(cell).inverted(true).minFrameSize(0.7)
      .transitionDuration(0).tooltip(tips).setColorMapper(color).selfValue(false)
      .getName(called)
      .setSearchMatch((d, text) => Boolean(text) && d.data.name.toLowerCase().includes(text.toLowerCase()))
      .setSearchHandler((results, sum) => {
        found.textContent = `${count(results.length)} found, ${bytes(sum)}`;
        found.dataset.bytes = String(sum);
      })
      .onClick((d) => focus(d));
    // It keeps notes in what it draws (fade, hide): each drawing gets nodes of its own.
    select(canvas).datum(copy(tree)).call(chart);
    mark();
    const svg = canvas.querySelector('svg');
    svg.setAttribute('aria-hidden', 'true'); // the keys say each frame
    if (term.value) search();
  }

  function copy(n) {
    return {name: n.name, value: n.value, after: n.after, before: n.before, blocks: n.blocks, children: n.children.map(copy)};
  }

  function search() {
    if (!chart) return;
    if (term.value) chart.search(term.value);
    else {
      chart.clear();
      found.textContent = '';
    }
    mark();
  }

  function focus(d) {
    current = d;
    said.textContent = d ? say(d) : '';
    mark();
  }

  function mark() {
    select(canvas).selectAll('g.frame').classed('current', (d) => d === current && d !== null)
      .classed('own', (d) => layerOf(d.data.name) === 0).classed('framework', (d) => layerOf(d.data.name) === 2);
  }

  canvas.addEventListener('keydown', (e) => {
    if (!chart) return;
    const at = current || select(canvas).datum();
    const wide = (d) => d && d.value > 0 && !d.data.hide;
    const sibling = (step) => {
      const all = at.parent ? at.parent.children.filter(wide) : [at];
      return all[Math.max(0, Math.min(all.length - 1, all.indexOf(at) + step))];
    };
    const to = {ArrowDown: () => (current ? (at.children || []).find(wide) : at), ArrowUp: () => at.parent,
      ArrowLeft: () => sibling(-1), ArrowRight: () => sibling(1)}[e.key];
    if (to) focus(to() || at);
    else if (e.key === 'Enter' && current) {
      chart.zoomTo(current);
      focus(current);
    } else if (e.key === 'Escape') {
      chart.resetZoom();
      focus(null);
    } else return;
    e.preventDefault();
  });

  let width = 0;
  new ResizeObserver(() => {
    if (canvas.clientWidth === width || canvas.clientWidth === 0) return;
    width = canvas.clientWidth;
    draw();
  }).observe(canvas);
  onScheme(draw);
  return {
    show(made) {
      tree = made;
      width = canvas.clientWidth;
      draw();
    },
  };
}
