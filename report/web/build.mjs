// Bundles src into ../dist: page.js, page.css and LICENSES.txt, which the Go package report embeds.
import {build} from 'esbuild';
import {readFileSync, writeFileSync} from 'node:fs';
import {dirname, join} from 'node:path';
import {fileURLToPath} from 'node:url';

const here = dirname(fileURLToPath(import.meta.url));
await build({
  entryPoints: {page: join(here, 'src/main.js')},
  outdir: join(here, '../dist'),
  bundle: true,
  minify: true,
  format: 'iife',
  target: ['chrome103', 'firefox113', 'safari16.4'],
  charset: 'ascii', // the page may be opened under any encoding
  legalComments: 'none',
  loader: {'.css': 'css'},
  logLevel: 'warning',
});
writeFileSync(join(here, '../dist/LICENSES.txt'),
  'The page contains uPlot 1.6:\n\n' + readFileSync(join(here, 'node_modules/uplot/LICENSE'), 'utf8'));
