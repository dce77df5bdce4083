package export

import (
	"fmt"
	"strconv"
	"time"

	"github.com/cistern-gpu/cistern/recording"
)

// Moment says of which moment of a run a profile is to be. The zero Moment is the peak of live bytes.
type Moment struct {
	kind  momentKind
	event int
	after time.Duration
}

type momentKind uint8

const (
	atPeak momentKind = iota
	atStart
	atEnd
	atOOM
	atEvent
	atTime
)

// ParseMoment reads peak, oom (when the request failed that cistern report explains), start, end, the number of an event (the state after it) or a time since the first event.
func ParseMoment(s string) (Moment, error) {
	switch s {
	case "peak":
		return Moment{kind: atPeak}, nil
	case "oom":
		return Moment{kind: atOOM}, nil
	case "start":
		return Moment{kind: atStart}, nil
	case "end":
		return Moment{kind: atEnd}, nil
	}
	if n, err := strconv.Atoi(s); err == nil && n >= 0 {
		return Moment{kind: atEvent, event: n}, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return Moment{kind: atTime, after: d}, nil
	}
	return Moment{}, fmt.Errorf("%q: expected peak, oom, start, end, the number of an event, or a time since the first event such "+
		"as 1.5s", s)
}

// index is the event of t after which the moment is; -1 is before the first.
func (m Moment) index(t *recording.Trace, c clock) (int, error) {
	switch m.kind {
	case atStart:
		return -1, nil
	case atEnd:
		return len(t.Events) - 1, nil
	case atOOM:
		i, ok := t.FailedAt()
		if !ok {
			return 0, fmt.Errorf("no request failed on device %d: expected peak, start, end, the number of an event, or a time", t.Device)
		}
		return i, nil
	case atEvent:
		if m.event >= len(t.Events) {
			return 0, fmt.Errorf("device %d has no event %d: its events are 0 to %d", t.Device, m.event, len(t.Events)-1)
		}
		return m.event, nil
	case atTime:
		if !c.known {
			return 0, fmt.Errorf("the events have no times: expected peak, oom, start, end or the number of an event")
		}
		line, until := c.line(t), c.start+m.after.Microseconds()
		for i := range t.Events {
			if line.at(&t.Events[i]) > until {
				return i - 1, nil
			}
		}
		return len(t.Events) - 1, nil
	}
	_, i := t.PeakLive()
	return i, nil
}
