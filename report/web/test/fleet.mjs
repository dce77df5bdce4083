// Opens the page of a job and looks at it. Run by the Go test TestSlowFleetInBrowser: node fleet.mjs CHROMIUM EXPECT.json

import {at, check, drawn, expect, nothingMissing, open, run} from './browser.mjs';

async function fleet() {
  const page = await open(expect.page);

  at('the limit');
  const text = await page.locator('main').innerText();
  for (const want of expect.texts) check(text.includes(want), `${want} is not among ${JSON.stringify(text)}`);
  check(await page.evaluate(() => window.hacked === undefined), 'a name was run as a script');
  check(await page.locator('#findings li').count() === expect.findings, `${await page.locator('#findings li').count()} findings`);

  at('the heat map');
  await drawn(page);
  const canvas = page.locator('#heat .heat');
  // The rank that failed stands out among lines of many ranks: it is the reddest.
  const red = await canvas.evaluate((c) => {
    const {data, width, height} = c.getContext('2d').getImageData(0, 0, c.width, c.height);
    let best = -1e9;
    let line = -1;
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const i = 4 * (y * width + x);
        if (data[i] - data[i + 2] > best) [best, line] = [data[i] - data[i + 2], y];
      }
    }
    return line / height;
  });
  check(Math.abs(red - expect.limit / expect.ranks) < 0.02, `the hottest line is at ${red}`);
  await canvas.scrollIntoViewIfNeeded();
  await drawn(page);
  const box = await canvas.boundingBox();
  await page.mouse.move(box.x + box.width / 2, box.y + (expect.limit + 0.5) / expect.ranks * box.height);
  check((await page.locator('.tip').first().innerText()).startsWith(`rank ${expect.limit}`), await page.locator('.tip').first().innerText());

  at('a rank');
  await page.mouse.click(box.x + box.width / 2, box.y + (expect.limit + 0.5) / expect.ranks * box.height);
  check((await page.locator('#chosen h2').innerText()) === `Rank ${expect.limit}`, await page.locator('#rank').innerText());
  check(await page.locator('#chosen a').getAttribute('href') === expect.report, 'the report is not linked');
  await page.locator('#ranks tbody button').nth(1).click();
  check((await page.locator('#chosen h2').innerText()) !== `Rank ${expect.limit}`, 'the table chooses no rank');
  check(await page.locator('#ranks tr[data-chosen]').count() === 1, 'the chosen rank is not marked');

  at('orders');
  for (const order of ['headroom', 'group']) {
    await page.getByLabel('Order').selectOption(order);
    await drawn(page);
  }
  await page.getByLabel('Value').selectOption('allocated');
  await drawn(page);
  await nothingMissing(page, 'body');
  await page.context().close();
}

await run(fleet);
