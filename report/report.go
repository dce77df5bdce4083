// Package report shows what replay and analyze found: tables for a terminal, and one self-contained HTML page. It has
// no numbers of its own.
//
// The page is one file that opens without a network. Its script and style are bundled by esbuild from web/ into dist/
// and embedded here (a clone that never ran the bundler still builds; ErrNoBundle then says what to run). Its data are
// JSON for what is text, and one block of compressed integers per trace for what is long (encode.go). Nothing of a moment
// is drawn ahead: the page gets the lifetimes of all blocks (tables.go) and computes any moment from them. Its content
// security policy lets nothing run but that one script, by its hash, and nothing be fetched; whatever comes
// from a trace, stack names among it, is set as text.
package report
