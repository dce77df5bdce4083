package report

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
)

// The long data of a page are unsigned integers below 2^53 (a JavaScript number holds no more), seven bits a byte, low
// bits first; signed ones are zigzag-coded; compressed by gzip and written in base64. web/src/decode.js reads them.

// maxPoints bounds the points of one curve and the times of one trace. Curves with more are thinned with their peaks
// kept (analyze.Curve.Downsample); times are taken of every n-th event.
const maxPoints = 1 << 20

// A trace of more than manyEvents is first drawn from firstPoints: more than screens have columns, and little enough to be
// read in milliseconds.
const (
	manyEvents  = 1 << 16
	firstPoints = 1 << 14
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

// strideOf is how many events of n share a point, so that there are at most so many points.
func strideOf(n, points int) int { return max(1, (n+points-1)/points) }

// times writes stride, count, and the time of every stride-th event since the first, in microseconds; the last of them is the
// same with any stride. Clocks that step back are held: a chart's x never falls.
func (e *encoder) times(t *recording.Trace, stride int) {
	n := len(t.Events)
	e.uint(uint64(stride))
	e.uint(uint64((n + stride - 1) / stride))
	last, start := int64(0), analyze.StartUS(t)
	for i := 0; i < n; i += stride {
		at := i
		if finest := strideOf(n, maxPoints); i+stride >= n {
			at = (n - 1) / finest * finest
		}
		now := max(last, recording.SinceUS(start, t.Events[at].TimeUS))
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

// chart is the text of the times and curves of a trace.
func chart(t *recording.Trace, curves []analyze.Curve) (string, error) {
	var e encoder
	e.times(t, strideOf(len(t.Events), maxPoints))
	for _, c := range curves {
		e.curve(c)
	}
	return e.text()
}

// firstChart is the same with fewer points, from which a chart is drawn that looks alike.
func firstChart(t *recording.Trace, curves []analyze.Curve) (string, error) {
	var e encoder
	stride := strideOf(len(t.Events), firstPoints)
	e.times(t, stride)
	for _, c := range curves {
		e.curve(extremes(c, stride))
	}
	return e.text()
}

// extremes keeps of every stride events the smallest, the largest and the last value, each at its own event.
func extremes(c analyze.Curve, stride int) analyze.Curve {
	var out analyze.Curve
	for from, to := 0, 0; from < len(c.Event); from = to {
		entry := int(c.Event[from]+int32(stride)) / stride // what was before the first event is an entry of its own
		low, high := from, from
		for ; to < len(c.Event) && (int(c.Event[to])+stride)/stride == entry; to++ {
			if c.Value[to] < c.Value[low] {
				low = to
			}
			if c.Value[to] > c.Value[high] {
				high = to
			}
		}
		kept := []int{low, high, to - 1}
		slices.Sort(kept)
		for _, i := range slices.Compact(kept) {
			out.Event = append(out.Event, c.Event[i])
			out.Value = append(out.Value, c.Value[i])
		}
	}
	return out
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
