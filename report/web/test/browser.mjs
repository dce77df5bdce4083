// What the tests of pages have in common: a real browser, offline, and ways to look at what is drawn.

import {readFileSync} from 'node:fs';
import {pathToFileURL} from 'node:url';
import {chromium} from 'playwright-core';

const [, , executablePath, expectFile] = process.argv;

/** What must be seen, as the Go test wrote it. */
export const expect = JSON.parse(readFileSync(expectFile, 'utf8'));

const wrong = [];
let where = '';

/** Says what is looked at, for what is found wrong. */
export function at(place) {
  where = place;
}

export function check(ok, what) {
  if (!ok) wrong.push(`${where}: ${what}`);
}

// A machine may be busy with other things for long: what does not come at all is to be found out, not what comes late.
const timeout = 180_000;

const browser = await chromium.launch({executablePath, timeout: timeout, args: ['--no-sandbox', '--disable-gpu', '--disable-gpu-watchdog']});

/** Runs tests one after the other, prints what is wrong, one line each, and exits with 1 if anything is. */
export async function run(...tests) {
  try {
    for (const test of tests) await test();
  } catch (e) {
    wrong.push(`${where}: ${e.message.split('\n')[0]}`);
  } finally {
    await browser.close();
  }
  for (const w of wrong) console.log(w);
  process.exit(wrong.length ? 1 : 0);
}

/** A page, opened offline, with everything it says or asks for held against it. `first` runs in it before its own script. */
export async function open(path, options = {}, hash = '', first = () => {}) {
  const context = await browser.newContext({viewport: {width: 1280, height: 900}, offline: true, ...options});
  context.setDefaultTimeout(timeout);
  const page = await context.newPage();
  await page.addInitScript(first);
  const url = pathToFileURL(path).href;
  page.on('console', (m) => {
    if (m.text().includes('willReadFrequently')) return; // the test's own readback
    if (['error', 'warning'].includes(m.type())) check(false, `console ${m.type()}: ${m.text()}`);
  });
  page.on('pageerror', (e) => check(false, `page error: ${e.message}`));
  page.on('request', (r) => {
    if (r.url() !== url && r.url() !== url + hash && !r.url().startsWith('data:')) check(false, `request to ${r.url().slice(0, 100)}`);
  });
  await page.goto(url + hash);
  await page.waitForFunction(() => document.documentElement.dataset.ready);
  await drawn(page);
  return page;
}

/** Waits until the page has drawn what was done to it: it does that at once, or in the next frame. */
export function drawn(page) {
  return page.evaluate(() => new Promise((done) => {
    requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0)));
  }));
}

let left = timeout; // of all tests together, so that a page that is wrong does not take for ever

/** What is read from a page as soon as it is as wanted, or in the end. */
export async function until(read, wanted) {
  for (;;) {
    const begin = Date.now();
    const value = await read();
    if (left < 0 || wanted(value)) return value;
    await new Promise((done) => { setTimeout(done, 20); });
    left -= Date.now() - begin;
  }
}

/** How many pixels of a canvas have a colour of the style sheet, within a tolerance for smoothing. */
export function pixels(page, selector, variable) {
  return page.evaluate(([sel, name]) => {
    const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    probe.fillRect(0, 0, 1, 1);
    const want = probe.getImageData(0, 0, 1, 1).data;
    const canvas = document.querySelector(sel);
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    let n = 0;
    for (let i = 0; i < data.length; i += 4) {
      if (Math.abs(data[i] - want[0]) < 6 && Math.abs(data[i + 1] - want[1]) < 6 && Math.abs(data[i + 2] - want[2]) < 6
        && Math.abs(data[i + 3] - want[3]) < 40) n++;
    }
    return n;
  }, [selector, variable]);
}

/** What a value that is missing looks like when it is shown. */
export async function nothingMissing(page, selector) {
  const text = await page.locator(selector).innerText();
  const found = /\b(null|undefined|NaN|Infinity)\b|\[object/.exec(text);
  check(!found, `${selector} shows ${found} in ${JSON.stringify(text.slice(0, 400))}`);
}

/** What keeps people from using a page: controls and regions without names, ids given twice, text of too little contrast. */
export async function accessible(page) {
  await page.evaluate(() => document.querySelectorAll('details').forEach((d) => { d.open = true; }));
  const found = await page.evaluate(() => {
    const bad = [];
    const say = (e, what) => bad.push(`${e.tagName.toLowerCase()}${e.id && `#${e.id}`} ${JSON.stringify((e.textContent || '').slice(0, 40))}: ${what}`);
    const name = (e) => e.getAttribute('aria-label') || e.textContent.trim() || (e.labels && e.labels[0] && e.labels[0].textContent) || '';
    for (const e of document.querySelectorAll('button, select, input, a, summary, nav, th, h1, h2, h3, [tabindex], [role=img]')) {
      if (!name(e)) say(e, 'no name');
      if (e.tabIndex >= 0 && e.closest('[aria-hidden=true]')) say(e, 'a control that readers are not told of');
    }
    for (const e of document.querySelectorAll('canvas')) if (e.getAttribute('role') !== 'img' && !e.closest('[aria-hidden=true], .uplot')) say(e, 'no role');
    const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
    for (const id of new Set(ids.filter((x, i) => ids.indexOf(x) !== i))) bad.push(`id ${id} is there twice`);
    if (document.querySelectorAll('main, h1').length !== 2) bad.push('not one main part and one title');

    const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgba = (c) => {
      probe.clearRect(0, 0, 1, 1);
      probe.fillStyle = c;
      probe.fillRect(0, 0, 1, 1);
      return probe.getImageData(0, 0, 1, 1).data;
    };
    const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => sum + w * (c[i] / 255 <= 0.04045 ? c[i] / 255 / 12.92 : ((c[i] / 255 + 0.055) / 1.055) ** 2.4), 0);
    const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
    const behind = (e) => {
      const frame = e.closest('g.frame');
      if (frame) return rgba(frame.querySelector('rect').getAttribute('fill'));
      for (let at = e; at; at = at.parentElement) {
        const c = rgba(getComputedStyle(at).backgroundColor);
        if (c[3] === 255) return c;
      }
      return [255, 255, 255];
    };
    const texts = document.createTreeWalker(document.querySelector('#cistern-page'), NodeFilter.SHOW_TEXT);
    const seen = new Set();
    while (texts.nextNode()) {
      const e = texts.currentNode.parentElement;
      if (!texts.currentNode.data.trim() || seen.has(e) || !e.getClientRects().length) continue;
      seen.add(e);
      const ratio = contrast(rgba(getComputedStyle(e).color), behind(e));
      if (ratio < 4.5) say(e, `contrast ${ratio.toFixed(2)}`);
    }
    if (seen.size < 20) bad.push(`only ${seen.size} texts were looked at`);
    return bad;
  });
  for (const f of found) check(false, f);
}
