package export

import (
	"math"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// What the program's own threads allocated and gave back, as instants on their tracks, where the record says which thread
// it was. There are as many as there are events, so that their texts are interned: each is in the file once, and has a
// number from there on (protos/perfetto/trace/interned_data in Perfetto's repository).

// Field numbers.
const (
	processCommand = 2
	threadPID      = 1
	threadTID      = 2
	threadName     = 5

	internedEventNames      = 2
	internedAnnotationNames = 3
	internedStrings         = 29
	internedID              = 1
	internedText            = 2

	eventNameID       = 10
	annotationNameID  = 1
	annotationTextID  = 17
	flagsCleared      = 1 // numbers count from here on
	flagsNeedsNumbers = 2
)

// programPID stands for the program among the processes, where the record does not say its number.
const programPID = gpuPIDs + 1<<16

// programThreads writes the threads of a program, one device's events after another's.
type programThreads struct {
	*perfettoDevice
	first   uint64 // sequence; each device has one of its own, in which times rise and texts are numbered
	devices int
	pid     uint64
	process uint64
	names   map[uint32]string
	tracks  map[uint32]uint64
	started bool
	fresh   []byte // texts that the packet being built is the first to use
	ids     map[internedKey]uint64
	last    map[protowire.Number]uint64
	stacks  map[uint32]string
}

// internedKey is a text of one of the lists.
type internedKey struct {
	list protowire.Number
	text string
}

// threads begins the threads of a file; nil where it does not say any.
func (p *perfetto) threads(f *recording.File, sequence uint64) *programThreads {
	for _, t := range f.Traces {
		for i := range t.Events {
			if t.Events[i].Thread != 0 {
				return p.newThreads(f, sequence)
			}
		}
	}
	return nil
}

func (p *perfetto) newThreads(f *recording.File, sequence uint64) *programThreads {
	w := &programThreads{perfettoDevice: &perfettoDevice{perfetto: p, sequence: sequence}, first: sequence, devices: len(f.Traces),
		pid: programPID, names: threadNames(f), tracks: map[uint32]uint64{}}
	name, command := "the program of "+filepath.Base(f.Path), []string(nil)
	for _, t := range f.Traces {
		for _, x := range t.Failures { // which say whose they are
			if x.PID > 0 && len(x.Program) > 0 {
				w.pid, name, command = uint64(x.PID), filepath.Base(x.Program[0]), x.Program
			}
		}
	}
	w.process = w.processTrack(w.pid, name, command)
	return w
}

// device begins the events of the next device.
func (w *programThreads) device(i int) {
	w.sequence, w.started = w.first+uint64(i), false
	w.ids, w.last, w.stacks = map[internedKey]uint64{}, map[protowire.Number]uint64{}, map[uint32]string{}
}

// threadNames are the names of all threads in a file.
func threadNames(f *recording.File) map[uint32]string {
	names := map[uint32]string{}
	for _, t := range f.Traces {
		for n, name := range t.Threads {
			names[n] = name
		}
	}
	return names
}

// processTrack declares a process. They are ranked by their sequences: GPUs by number, then the programs.
func (d *perfettoDevice) processTrack(pid uint64, name string, command []string) uint64 {
	return d.track(0, "", func(b []byte) []byte {
		b = number(b, descRank, d.sequence)
		m := number(nil, processPID, pid)
		for _, s := range command {
			m = text(m, processCommand, s)
		}
		if name != "" {
			m = text(m, processName, name)
		}
		return message(b, descProcess, m)
	})
}

// threadTrack declares a thread of a process.
func (d *perfettoDevice) threadTrack(process, pid uint64, tid uint32, name string) uint64 {
	return d.track(process, "", func(b []byte) []byte {
		m := number(number(nil, threadPID, pid), threadTID, uint64(min(tid, math.MaxInt32))) // Linux has no higher ones
		if name != "" {
			m = text(m, threadName, name)
		}
		return message(b, descThread, m)
	})
}

// event writes an event of a thread. What completes a free is no thread's doing.
func (w *programThreads) event(t *recording.Trace, i int, e *event.Event, ns uint64) {
	switch e.Kind {
	case event.Alloc, event.FreeRequested, event.SegmentAlloc, event.SegmentFree, event.SegmentMap, event.SegmentUnmap, event.OOM:
	default:
		return
	}
	if e.Thread == 0 {
		return
	}
	track, ok := w.tracks[e.Thread]
	if !ok {
		track = w.threadTrack(w.process, w.pid, e.Thread, w.names[e.Thread])
		w.tracks[e.Thread] = track
	}
	w.fresh = w.fresh[:0]
	w.body = number(w.body[:0], eventType, typeInstant)
	w.body = number(w.body, eventTrack, track)
	w.body = number(w.body, eventNameID, w.id(internedEventNames, e.Kind.String()))
	w.number("event", annotationUint, uint64(i))
	w.number("bytes", annotationUint, e.Size)
	if e.Kind != event.OOM {
		w.number("address", annotationPointer, e.Addr)
	}
	if w.devices > 1 {
		w.number("device", annotationUint, uint64(t.Device))
	}
	if len(t.Streams) > 1 {
		w.text("stream", streamName(streamOf(t, e.Stream)))
	}
	if len(t.Pools) > 1 {
		w.text("pool", poolName(poolOf(t, e.Pool)))
	}
	w.text("tag", t.TagName(e.Tag))
	w.text("library", t.LibraryName(e.Library))
	if e.Stack != 0 {
		s, ok := w.stacks[e.Stack]
		if !ok {
			s = stackText(t, e.Stack)
			w.stacks[e.Stack] = s
		}
		w.text("stack", s)
	}
	w.packet = number(w.packet[:0], packetTimestamp, ns)
	w.packet = number(w.packet, packetSequence, w.sequence)
	if len(w.fresh) > 0 {
		w.packet = message(w.packet, packetInterned, w.fresh)
	}
	flags := uint64(flagsNeedsNumbers)
	if !w.started {
		w.started, flags = true, flags|flagsCleared
	}
	w.packet = number(w.packet, packetFlags, flags)
	w.packet = message(w.packet, packetTrackEvent, w.body)
	w.emit()
}

// id is the number of a text in one of the lists of interned data.
func (w *programThreads) id(list protowire.Number, s string) uint64 {
	k := internedKey{list, s}
	n, ok := w.ids[k]
	if !ok {
		w.last[list]++
		n = w.last[list]
		w.ids[k] = n
		w.leaf = text(number(w.leaf[:0], internedID, n), internedText, s)
		w.fresh = message(w.fresh, list, w.leaf)
	}
	return n
}

func (w *programThreads) number(name string, kind protowire.Number, v uint64) {
	id := w.id(internedAnnotationNames, name)
	w.leaf = number(number(w.leaf[:0], annotationNameID, id), kind, v)
	w.body = message(w.body, eventAnnotation, w.leaf)
}

// text annotates what is not empty.
func (w *programThreads) text(name, value string) {
	if value == "" {
		return
	}
	key, text := w.id(internedAnnotationNames, name), w.id(internedStrings, value)
	w.leaf = number(number(w.leaf[:0], annotationNameID, key), annotationTextID, text)
	w.body = message(w.body, eventAnnotation, w.leaf)
}
