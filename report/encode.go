package report

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"fmt"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
)

// The long data of a page are unsigned integers below 2^53 (a JavaScript number holds no more), seven bits a byte, low
// bits first; signed ones are zigzag-coded; compressed by gzip and written in base64. web/src/decode.js reads them.

// maxPoints bounds the points of one curve and the times of one trace. Curves with more are thinned with their peaks
// kept (analyze.Curve.Downsample); times are taken of every n-th event. firstPoints is the same of what a chart is first
// drawn from: more than screens have columns, and little enough to be read in milliseconds.
const (
	maxPoints   = 1 << 20
	firstPoints = 1 << 13
)

// longData are the numbers of a page that are too many for JSON, each a text in base64.
type longData struct {
	series string // what the chart is first drawn from; read before the script runs
	curves string // times and curves of up to maxPoints, where the series are thinned to fewer
	tables string
}

// encoder collects integers.
type encoder struct{ buf []byte }

func (e *encoder) uint(v uint64) { e.buf = binary.AppendUvarint(e.buf, v) }

func (e *encoder) int(v int64) { e.buf = binary.AppendVarint(e.buf, v) }

// times writes stride, count, and the time of every stride-th event since the first, in microseconds. Clocks that
// step back are held: a chart's x never falls.
func (e *encoder) times(t *recording.Trace, points int) {
	n := len(t.Events)
	stride := max(1, (n+points-1)/points)
	e.uint(uint64(stride))
	e.uint(uint64((n + stride - 1) / stride))
	last, start := int64(0), analyze.StartUS(t)
	for i := 0; i < n; i += stride {
		now := max(last, recording.SinceUS(start, t.Events[i].TimeUS))
		e.int(now - last)
		last = now
	}
}

// curve writes count, then event and value of each point as differences.
func (e *encoder) curve(c analyze.Curve, points int) {
	c = c.Downsample(points)
	e.uint(uint64(len(c.Value)))
	at, value := int32(-1), uint64(0)
	for i := range c.Value {
		e.uint(uint64(c.Event[i] - at))
		e.int(int64(c.Value[i] - value))
		at, value = c.Event[i], c.Value[i]
	}
}

// chart is the text of the times and curves of a trace, with at most about so many points.
func chart(t *recording.Trace, curves []analyze.Curve, points int) (string, error) {
	var e encoder
	e.times(t, points)
	for _, c := range curves {
		e.curve(c, points)
	}
	return e.text()
}

// text is everything so far, compressed, in base64.
func (e *encoder) text() (string, error) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	if _, err := w.Write(e.buf); err != nil {
		return "", fmt.Errorf("compressing the HTML report's data: %w", err)
	}
	if err := w.Close(); err != nil {
		return "", fmt.Errorf("compressing the HTML report's data: %w", err)
	}
	return base64.StdEncoding.EncodeToString(z.Bytes()), nil
}
