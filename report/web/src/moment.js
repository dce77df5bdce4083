// The moment that the flame graph and the address map show, and the two that growth is shown between: sliders, buttons
// and clicks on the chart all set them.

import {bytes, count, duration} from './format.js';
import {fill, h} from './dom.js';
import {measure} from './lives.js';
import * as state from './state.js';

/** A slider over all events. -1 is before the first. */
export function eventSlider(label, events, value, changed) {
  return h('input', {type: 'range', min: -1, max: Math.max(-1, events - 1), step: 1, value, 'aria-label': label,
    oninput: (e) => changed(Number(e.target.value))});
}

/** When an event was, in words. */
export function when(timeline, event) {
  return event < 0 ? 'before the first event'
    : `event ${count(event)}, ${duration(timeline.us[timeline.entryOf(event)])}`;
}

/**
 * @param host element to fill
 * @param peak event at which most was live
 * @param places [{name, event}] to go to; the first is where the page begins
 * @param changed called with the event and its map, at most once a frame
 * @return {set(event)}
 */
export function momentPicker(host, timeline, lives, peak, places, changed) {
  const words = h('p', {class: 'hint', 'aria-live': 'polite', id: 'moment-words'});
  let waiting = false;
  let at = state.number('event', -1, lives.events - 1, places[0].event);
  const slider = eventSlider('Moment', lives.events, at, (e) => set(e));
  const to = (text, event) => h('button', {type: 'button', onclick: () => set(event)}, text);
  host.append(h('div', {class: 'bar'}, slider, h('div', {class: 'tools'}, places.map((p) => to(p.name, p.event)))), words);

  function show() {
    waiting = false;
    state.set({event: at === places[0].event ? null : at});
    const map = lives.mapAt(at);
    const m = measure(map);
    fill(words, `After ${when(timeline, at)}${at === peak ? ', the peak' : ''}: ${bytes(m.live)} live in `
      + `${count(m.blocks)} ${m.blocks === 1 ? 'block' : 'blocks'}${m.segments ? `, ${bytes(m.reserved)} reserved in `
      + `${count(m.segments)} ${m.segments === 1 ? 'segment' : 'segments'}, ${bytes(m.free)} free in ${count(m.pieces)} `
      + `${m.pieces === 1 ? 'piece' : 'pieces'}, the largest ${bytes(m.largest)}` : ''}.`);
    Object.assign(words.dataset, {event: at, live: m.live, blocks: m.blocks, reserved: m.reserved, free: m.free,
      pieces: m.pieces});
    changed(at, map);
  }

  function set(event) {
    at = Math.max(-1, Math.min(lives.events - 1, event));
    slider.value = String(at);
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(show);
  }
  show();
  return {set};
}
