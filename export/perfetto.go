package export

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// Field numbers of Perfetto's trace format, protos/perfetto/trace/*.proto in its repository.
const (
	tracePacket = 1

	packetClockSnapshot   = 6
	packetTimestamp       = 8
	packetSequence        = 10
	packetTrackEvent      = 11
	packetInterned        = 12
	packetFlags           = 13
	packetTrackDescriptor = 60

	clockSnapshotClock = 1
	clockID            = 1
	clockTimestamp     = 2
	clockRealtime      = 1
	clockBoottime      = 6

	descUUID        = 1
	descName        = 2
	descProcess     = 3
	descThread      = 4
	descParent      = 5
	descCounter     = 8
	descChildren    = 11
	descRank        = 12
	descProcesses   = 19
	childrenByRank  = 3
	processesByRank = 1
	processPID      = 1
	processName     = 6
	counterUnit     = 3
	counterScale    = 7
	unitBytes       = 3

	eventAnnotation = 4
	eventType       = 9
	eventTrack      = 11
	eventName       = 23
	eventCounter    = 30
	eventFlow       = 47
	eventFlowEnd    = 48
	typeInstant     = 3
	typeCounter     = 4

	annotationUint    = 3
	annotationString  = 6
	annotationPointer = 7
	annotationName    = 10
)

// WritePerfetto writes a timeline: for each device a process with counters in bytes (live, active, reserved; in groups
// live by pool and by stream where there are several, by tag and by library where they were recorded), and instants on
// tracks of their own for what was got from the driver and given back, for requests that failed, and for marks; what the
// program's threads allocated and gave back (threads.go); the calls of a driver trace (calls.go). Times are the file's, in
// nanoseconds, taken as the clock that Perfetto counts from (BOOTTIME) and, where they have a date, as REALTIME too.
//
// The importer of Perfetto 58.2 read timelines of recorded runs, driver traces and files of out-of-memory without error or
// loss: the tests check what it asks of a file.
func WritePerfetto(w io.Writer, f *recording.File) error {
	p := &perfetto{w: bufio.NewWriterSize(w, 1<<16)}
	c := clockOf(f)
	calls := f.Driver != nil && len(f.Driver.Calls) > 0
	if !c.known && !calls {
		if !slices.ContainsFunc(f.Traces, func(t *recording.Trace) bool { return len(t.Events) > 0 }) {
			return errors.New("there are no events to put on a timeline")
		}
		return errors.New("the events have no times, which a timeline needs")
	}
	p.clocks(f, c)
	p.order()
	devices := uint64(len(f.Traces))
	var threads *programThreads
	if !calls { // which are on the threads in all detail
		threads = p.threads(f, devices+1)
	}
	for i, t := range f.Traces {
		if threads != nil {
			threads.device(i)
		}
		d := perfettoDevice{perfetto: p, t: t, sequence: uint64(i + 1), line: c.line(t), flows: map[uint64]uint64{}, threads: threads}
		d.write(gpuPIDs+uint64(i), whose(f, i))
	}
	if calls {
		p.calls(f, devices+1)
	}
	return p.w.Flush()
}

// perfetto writes packets.
type perfetto struct {
	w                     *bufio.Writer
	packet, body, leaf    []byte // reused
	lastTrack, lastFlowID uint64
}

// emit writes the packet that has been built.
func (p *perfetto) emit() {
	head := protowire.AppendTag(p.leaf[:0], tracePacket, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(p.packet)))
	p.leaf = head
	_, _ = p.w.Write(head) // the writer remembers; Flush tells
	_, _ = p.w.Write(p.packet)
}

func number(b []byte, field protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), v)
}

func text(b []byte, field protowire.Number, s string) []byte {
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), s)
}

func message(b []byte, field protowire.Number, m []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), m)
}

// nanoseconds of a time in microseconds. Times before 1970 are none that a recorder writes.
func nanoseconds(us int64) uint64 { return uint64(max(0, us)) * 1000 }

// clocks says which time of day the timestamps are.
func (p *perfetto) clocks(f *recording.File, c clock) {
	if d := f.Driver; d != nil && len(d.Calls) > 0 {
		if us := wallNS(d, &d.Calls[0]) / 1000; !c.known || us < c.start {
			c.start = us
		}
	}
	if c.start < dated {
		return
	}
	var snapshot []byte
	for _, id := range []uint64{clockBoottime, clockRealtime} {
		snapshot = message(snapshot, clockSnapshotClock,
			number(number(nil, clockID, id), clockTimestamp, nanoseconds(c.start)))
	}
	p.packet = number(p.packet[:0], packetTimestamp, nanoseconds(c.start))
	p.packet = number(p.packet, packetSequence, 1)
	p.packet = message(p.packet, packetClockSnapshot, snapshot)
	p.emit()
}

// order says that processes are ranked, which Perfetto heeds from version 57 on: without it the one of most slices comes
// first, and the GPUs in the order of how much happened on them.
func (p *perfetto) order() {
	p.packet = number(p.packet[:0], packetSequence, 1)
	p.packet = message(p.packet, packetTrackDescriptor, number(number(nil, descUUID, 0), descProcesses, processesByRank))
	p.emit()
}

// perfettoDevice writes what happened on one device.
type perfettoDevice struct {
	*perfetto
	t        *recording.Trace
	sequence uint64
	line     timeline
	process  uint64
	counters []counter
	parts    []breakdown
	threads  *programThreads // nil where none were recorded
	driver   uint64          // tracks
	failed   uint64
	marks    uint64
	flows    map[uint64]uint64 // of segments that are held, by address
}

// counter is one counter track.
type counter struct {
	track uint64
	value func(w *walker) uint64
	last  uint64
	known bool
}

// breakdown is the live bytes by one thing: a counter for each of its values. An event changes those of few.
type breakdown struct {
	of       func(b *block) int
	counters []counter // by value; without a track where nothing has it
}

// gpuPIDs number what stands for a GPU among the processes: from above the pids that there can be on Linux.
const gpuPIDs = 1 << 23

// write is of one device; whose says more of it where it is not the only one of its number.
func (d *perfettoDevice) write(pid uint64, whose string) {
	t := d.t
	d.process = d.processTrack(pid, fmt.Sprintf("GPU %d%s: %s", t.Device, whose, t.Path), nil)
	d.counter("live: requested and not yet returned", func(w *walker) uint64 { return w.bytes })
	d.counter("active: live, rounded to 512", func(w *walker) uint64 { return w.active })
	kinds := t.Counts()
	if len(t.InitialSegments) > 0 || kinds[event.SegmentAlloc]+kinds[event.SegmentMap] > 0 {
		d.counter("reserved: held from the driver", func(w *walker) uint64 { return w.reserved })
		d.driver = d.track(d.process, "driver: segments allocated and freed", nil)
	}
	if len(t.Streams) > 1 {
		d.breakdown("live by stream", len(t.Streams), func(i int) string { return "live on stream " + streamName(t.Streams[i]) },
			func(i, k int) int { return cmp.Compare(t.Streams[i], t.Streams[k]) },
			func(b *block) int { return int(b.stream) }, func(w *walker) []uint64 { return w.streams })
	}
	if len(t.Pools) > 1 {
		d.breakdown("live by pool", len(t.Pools), func(i int) string { return "live in pool " + poolName(t.Pools[i]) },
			func(i, k int) int { return slices.Compare(t.Pools[i][:], t.Pools[k][:]) },
			func(b *block) int { return int(b.pool) }, func(w *walker) []uint64 { return w.pools })
	}
	tags, libraries := labelsUsed(t)
	if tags != nil {
		d.breakdown("live by tag", len(tags), func(i int) string {
			if i == 0 || !tags[i] {
				return either(tags[i], "live without a tag")
			}
			return "live with tag " + t.TagName(uint16(i))
		}, cmp.Compare[int], func(b *block) int { return int(b.tag) }, func(w *walker) []uint64 { return w.tags })
	}
	if libraries != nil {
		d.breakdown("live by library", len(libraries), func(i int) string {
			if i == 0 || !libraries[i] {
				return either(libraries[i], "live of no library")
			}
			return "live of " + t.LibraryName(uint8(i))
		}, cmp.Compare[int], func(b *block) int { return int(b.library) }, func(w *walker) []uint64 { return w.libs })
	}
	if kinds[event.OOM]+kinds[event.Retry] > 0 {
		d.failed = d.track(d.process, "out of memory", nil)
	}
	if kinds[event.Snapshot]+kinds[event.Annotation] > 0 {
		d.marks = d.track(d.process, "marks", nil)
	}
	w := newWalker(t)
	next := nanoseconds(d.line.last)
	d.start(w, next)
	for i := range t.Events {
		e := &t.Events[i]
		// Instants of one time are nested in each other, and Perfetto drops those below the 512th, so that events which the
		// record gives the same microsecond are a nanosecond apart.
		ns := max(next, nanoseconds(d.line.at(e)))
		next = ns + 1
		if w.apply(i) {
			d.count(w, ns)
		}
		d.instant(i, e, ns)
		if d.threads != nil {
			d.threads.event(d.t, i, e, ns)
		}
	}
}

// either is s, or nothing.
func either(ok bool, s string) string {
	if ok {
		return s
	}
	return ""
}

// labelsUsed says which tags and libraries blocks have, 0 among them; nil where there are no others.
func labelsUsed(t *recording.Trace) (tags, libraries []bool) {
	use := func(all *[]bool, i int) {
		for len(*all) <= i {
			*all = append(*all, false)
		}
		(*all)[i] = true
	}
	for i := range t.Events {
		if e := &t.Events[i]; e.Kind == event.Alloc {
			use(&tags, int(e.Tag))
			use(&libraries, int(e.Library))
		}
	}
	for i := range t.Initial {
		if b := &t.Initial[i]; b.State != recording.Inactive {
			use(&tags, int(b.Tag))
			use(&libraries, int(b.Library))
		}
	}
	if len(tags) < 2 {
		tags = nil
	}
	if len(libraries) < 2 {
		libraries = nil
	}
	return tags, libraries
}

// track declares a track under another.
func (d *perfettoDevice) track(parent uint64, name string, more func([]byte) []byte) uint64 {
	d.lastTrack++
	b := number(nil, descUUID, d.lastTrack)
	if parent != 0 {
		b = number(b, descParent, parent)
	}
	if name != "" {
		b = text(b, descName, name)
	}
	if more != nil {
		b = more(b)
	}
	d.packet = number(d.packet[:0], packetSequence, d.sequence)
	d.packet = message(d.packet, packetTrackDescriptor, b)
	d.emit()
	return d.lastTrack
}

func (d *perfettoDevice) counter(name string, value func(*walker) uint64) {
	d.counters = append(d.counters, d.newCounter(d.process, 0, fmt.Sprintf("memory of track %d", d.process), name, value))
}

// newCounter declares one. Those below one track that name the same scale are drawn on it.
func (d *perfettoDevice) newCounter(parent, rank uint64, scale, name string, value func(*walker) uint64) counter {
	track := d.track(parent, name, func(b []byte) []byte {
		if rank != 0 {
			b = number(b, descRank, rank)
		}
		return message(b, descCounter, text(number(nil, counterUnit, unitBytes), counterScale, scale))
	})
	return counter{track: track, value: value}
}

// breakdown declares a group of counters for the n values of something, sorted by order; those without a name have
// none. Perfetto keeps an order only within a group: what is directly below a process it sorts by name, stream 10 before 2.
func (d *perfettoDevice) breakdown(group string, n int, name func(i int) string, order func(i, k int) int, of func(b *block) int,
	sums func(w *walker) []uint64) {
	p := breakdown{of: of, counters: make([]counter, n)}
	parent := d.track(d.process, group, func(b []byte) []byte { return number(b, descChildren, childrenByRank) })
	ranked := make([]int, n)
	for i := range ranked {
		ranked[i] = i
	}
	slices.SortStableFunc(ranked, order)
	for rank, i := range ranked {
		if s := name(i); s != "" {
			p.counters[i] = d.newCounter(parent, uint64(rank+1), group, s, func(w *walker) uint64 {
				if all := sums(w); i < len(all) {
					return all[i]
				}
				return 0
			})
		}
	}
	d.parts = append(d.parts, p)
}

// start writes all counters.
func (d *perfettoDevice) start(w *walker, ns uint64) {
	for i := range d.counters {
		d.value(&d.counters[i], w, ns)
	}
	for _, p := range d.parts {
		for i := range p.counters {
			d.value(&p.counters[i], w, ns)
		}
	}
}

// count writes the counters that the last event has changed.
func (d *perfettoDevice) count(w *walker, ns uint64) {
	for i := range d.counters {
		d.value(&d.counters[i], w, ns)
	}
	for _, p := range d.parts {
		for k := range w.touched {
			if i := p.of(&w.touched[k]); i < len(p.counters) {
				d.value(&p.counters[i], w, ns)
			}
		}
	}
}

// value writes a counter that has changed.
func (d *perfettoDevice) value(c *counter, w *walker, ns uint64) {
	if c.track == 0 {
		return
	}
	v := c.value(w)
	if c.known && v == c.last {
		return
	}
	c.last, c.known = v, true
	d.body = number(d.body[:0], eventType, typeCounter)
	d.body = number(d.body, eventTrack, c.track)
	d.body = number(d.body, eventCounter, v)
	d.event(ns)
}

// event writes the track event in d.body.
func (d *perfettoDevice) event(ns uint64) {
	d.packet = number(d.packet[:0], packetTimestamp, ns)
	d.packet = number(d.packet, packetSequence, d.sequence)
	d.packet = message(d.packet, packetTrackEvent, d.body)
	d.emit()
}

// instant writes an event that is more than a block's coming and going. A flow leads from where a segment was got to
// where it was given back.
func (d *perfettoDevice) instant(i int, e *event.Event, ns uint64) {
	track := d.driver
	switch e.Kind {
	case event.SegmentAlloc, event.SegmentFree, event.SegmentMap, event.SegmentUnmap:
	case event.OOM, event.Retry:
		track = d.failed
	case event.Snapshot, event.Annotation:
		track = d.marks
	default:
		return
	}
	if track == 0 { // given back without having been got
		d.driver = d.track(d.process, "driver: segments allocated and freed", nil)
		track = d.driver
	}
	d.body = number(d.body[:0], eventType, typeInstant)
	d.body = number(d.body, eventTrack, track)
	d.body = text(d.body, eventName, e.Kind.String())
	switch e.Kind {
	case event.SegmentAlloc, event.SegmentMap:
		d.lastFlowID++
		d.flows[e.Addr] = d.lastFlowID
		d.flow(eventFlow, d.lastFlowID)
	case event.SegmentFree, event.SegmentUnmap:
		if id, ok := d.flows[e.Addr]; ok {
			delete(d.flows, e.Addr)
			d.flow(eventFlowEnd, id)
		}
	}
	d.annotateNumber("event", annotationUint, uint64(i))
	if e.Size > 0 {
		d.annotateNumber("bytes", annotationUint, e.Size)
	}
	switch {
	case e.Addr == 0: // not known
	case e.Kind == event.OOM:
		d.annotateNumber("device_free_bytes", annotationUint, e.Addr)
	default:
		d.annotateNumber("address", annotationPointer, e.Addr)
	}
	if track != d.marks {
		d.annotateText("stream", streamName(streamOf(d.t, e.Stream)))
		d.annotateText("pool", poolName(poolOf(d.t, e.Pool)))
	}
	if e.Handle != 0 {
		d.annotateNumber("handle", annotationUint, e.Handle)
	}
	for _, label := range [][2]string{{"tag", d.t.TagName(e.Tag)}, {"library", d.t.LibraryName(e.Library)}, {"thread", d.t.ThreadName(e.Thread)}} {
		if label[1] != "" {
			d.annotateText(label[0], label[1])
		}
	}
	d.frames(e.Stack)
	d.event(ns)
}

// frames annotates a stack, innermost frame first.
func (d *perfettoDevice) frames(stack uint32) {
	for k, f := range d.t.FramesOf(stack) {
		d.annotateText("frame "+strconv.Itoa(k), f.String())
	}
}

func (d *perfettoDevice) flow(field protowire.Number, id uint64) {
	d.body = protowire.AppendFixed64(protowire.AppendTag(d.body, field, protowire.Fixed64Type), id)
}

func (d *perfettoDevice) annotateNumber(name string, kind protowire.Number, v uint64) {
	d.leaf = number(text(d.leaf[:0], annotationName, name), kind, v)
	d.body = message(d.body, eventAnnotation, d.leaf)
}

func (d *perfettoDevice) annotateText(name, value string) {
	d.leaf = text(text(d.leaf[:0], annotationName, name), annotationString, value)
	d.body = message(d.body, eventAnnotation, d.leaf)
}
