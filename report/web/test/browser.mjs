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

/** A page, opened offline, with everything it says or asks for held against it. */
export async function open(path, options = {}, hash = '') {
  const context = await browser.newContext({viewport: {width: 1280, height: 900}, offline: true, ...options});
  context.setDefaultTimeout(timeout);
  const page = await context.newPage();
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
