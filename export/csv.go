package export

import (
	"bufio"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// csvRows writes rows as RFC 4180 has them, but for lines that end in a newline alone: a header, then a line for each
// row. Null is an empty field.
type csvRows struct {
	w     *bufio.Writer
	line  []byte
	texts []string // words as fields
}

func newCSV(w io.Writer, columns []Column) *csvRows {
	c := &csvRows{w: bufio.NewWriterSize(w, 1<<16)}
	for _, col := range columns {
		c.field(col.Name)
	}
	_ = c.end() // the writer remembers; close tells
	return c
}

func (c *csvRows) speak(w *words) {
	c.texts = make([]string, len(w.list))
	for i, s := range w.list {
		if formula(s) {
			s = "'" + s
		}
		if strings.ContainsAny(s, ",\"\r\n") {
			s = `"` + strings.ReplaceAll(s, `"`, `""`) + `"`
		}
		c.texts[i] = s
	}
}

// formula reports whether a spreadsheet would take a text for a formula, and run it: it has an apostrophe put before it, which
// marks text there. Numbers stay as they are.
func formula(s string) bool {
	r, _ := utf8.DecodeRuneInString(s)
	return strings.ContainsRune("=+-@\t\r＝＋－＠", r) && s != ""
}

func (c *csvRows) field(s string) { c.line = append(append(c.line, s...), ',') }
func (c *csvRows) null()          { c.line = append(c.line, ',') }
func (c *csvRows) int(v int64)    { c.line = append(strconv.AppendInt(c.line, v, 10), ',') }
func (c *csvRows) uint(v uint64)  { c.line = append(strconv.AppendUint(c.line, v, 10), ',') }
func (c *csvRows) text(id uint32) { c.field(c.texts[id]) }
func (c *csvRows) truth(v bool)   { c.line = append(strconv.AppendBool(c.line, v), ',') }

func (c *csvRows) end() error {
	c.line[len(c.line)-1] = '\n'
	_, err := c.w.Write(c.line)
	c.line = c.line[:0]
	return err
}

func (c *csvRows) close() error { return c.w.Flush() }
