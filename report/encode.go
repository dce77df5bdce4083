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
// kept (analyze.Curve.Downsample); times are taken of every n-th event.
const maxPoints = 1 << 20

// encoder collects integers.
type encoder struct{ buf []byte }

func (e *encoder) uint(v uint64) { e.buf = binary.AppendUvarint(e.buf, v) }

func (e *encoder) int(v int64) { e.buf = binary.AppendVarint(e.buf, v) }

// times writes stride, count, and the time of every stride-th event since the first, in microseconds. Clocks that
// step back are held: a chart's x never falls.
func (e *encoder) times(t *recording.Trace) {
	n := len(t.Events)
	stride := max(1, (n+maxPoints-1)/maxPoints)
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
func (e *encoder) curve(c analyze.Curve) {
	c = c.Downsample(maxPoints)
	e.uint(uint64(len(c.Value)))
	at, value := int32(-1), uint64(0)
	for i := range c.Value {
		e.uint(uint64(c.Event[i] - at))
		e.int(int64(c.Value[i] - value))
		at, value = c.Event[i], c.Value[i]
	}
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
