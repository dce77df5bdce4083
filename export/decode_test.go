package export

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/pprof/profile"
	"github.com/parquet-go/parquet-go"
	"google.golang.org/protobuf/encoding/protowire"
)

// Readers of the outputs for tests: Perfetto's by its schema, written down here a second time; the others by the
// libraries that other programs use.

// field is what Perfetto's schema says of a field: its name, and what is in it.
type field struct {
	name string
	kind string // uint, int, string, fixed64, or the name of a message
}

// schema is the part of Perfetto's that may occur, copied by hand from its .proto files: message, number, field.
var schema = map[string]map[protowire.Number]field{
	"Trace": {1: {"packet", "TracePacket"}},
	"TracePacket": {6: {"clock_snapshot", "ClockSnapshot"}, 8: {"timestamp", "uint"}, 10: {"trusted_packet_sequence_id", "uint"},
		11: {"track_event", "TrackEvent"}, 12: {"interned_data", "InternedData"}, 13: {"sequence_flags", "uint"}, 60: {"track_descriptor", "TrackDescriptor"}},
	"ClockSnapshot": {1: {"clocks", "Clock"}},
	"Clock":         {1: {"clock_id", "uint"}, 2: {"timestamp", "uint"}},
	"TrackDescriptor": {1: {"uuid", "uint"}, 2: {"name", "string"}, 3: {"process", "ProcessDescriptor"},
		4: {"thread", "ThreadDescriptor"}, 5: {"parent_uuid", "uint"}, 8: {"counter", "CounterDescriptor"}, 11: {"child_ordering", "uint"},
		12: {"sibling_order_rank", "uint"}, 19: {"process_ordering", "uint"}},
	"ProcessDescriptor": {1: {"pid", "int"}, 2: {"cmdline", "string"}, 6: {"process_name", "string"}},
	"ThreadDescriptor":  {1: {"pid", "int"}, 2: {"tid", "int"}, 5: {"thread_name", "string"}},
	"CounterDescriptor": {3: {"unit", "uint"}, 7: {"y_axis_share_key", "string"}},
	"InternedData": {2: {"event_names", "InternedString"}, 3: {"debug_annotation_names", "InternedString"},
		29: {"debug_annotation_string_values", "InternedString"}},
	"InternedString": {1: {"iid", "uint"}, 2: {"str", "string"}},
	"TrackEvent": {4: {"debug_annotations", "DebugAnnotation"}, 9: {"type", "uint"}, 10: {"name_iid", "uint"}, 11: {"track_uuid", "uint"}, 23: {"name", "string"},
		30: {"counter_value", "int"}, 47: {"flow_ids", "fixed64"}, 48: {"terminating_flow_ids", "fixed64"}},
	"DebugAnnotation": {1: {"name_iid", "uint"}, 17: {"string_value_iid", "uint"}, 3: {"uint_value", "uint"}, 6: {"string_value", "string"}, 7: {"pointer_value", "uint"}, 10: {"name", "string"}},
}

// decoded is a message: its fields in the order of the file.
type decoded struct {
	name   string
	fields []value
}

type value struct {
	name string
	n    uint64
	s    string
	m    *decoded
}

func (d *decoded) get(name string) *value {
	for i := range d.fields {
		if d.fields[i].name == name {
			return &d.fields[i]
		}
	}
	return &value{}
}

func decode(kind string, b []byte) (*decoded, error) {
	d := &decoded{name: kind}
	for len(b) > 0 {
		num, wire, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil, fmt.Errorf("%s: %w", kind, protowire.ParseError(n))
		}
		b = b[n:]
		f, ok := schema[kind][num]
		if !ok {
			return nil, fmt.Errorf("%s has no field %d", kind, num)
		}
		v := value{name: f.name}
		want := protowire.BytesType
		switch f.kind {
		case "uint", "int":
			want = protowire.VarintType
			v.n, n = protowire.ConsumeVarint(b)
			if f.kind == "int" && v.n > math.MaxInt64 {
				return nil, fmt.Errorf("%s.%s is negative", kind, f.name)
			}
		case "fixed64":
			want = protowire.Fixed64Type
			v.n, n = protowire.ConsumeFixed64(b)
		default:
			var inner []byte
			inner, n = protowire.ConsumeBytes(b)
			if f.kind == "string" {
				v.s = string(inner)
			} else if n >= 0 {
				var err error
				if v.m, err = decode(f.kind, inner); err != nil {
					return nil, err
				}
			}
		}
		if wire != want || n < 0 {
			return nil, fmt.Errorf("%s.%s: wire type %d, want %d", kind, f.name, wire, want)
		}
		b = b[n:]
		d.fields = append(d.fields, v)
	}
	return d, nil
}

func (d *decoded) String() string {
	var parts []string
	for _, v := range d.fields {
		switch {
		case v.m != nil:
			parts = append(parts, v.name+"{"+v.m.String()+"}")
		case v.s != "":
			parts = append(parts, fmt.Sprintf("%s:%q", v.name, v.s))
		default:
			parts = append(parts, fmt.Sprintf("%s:%d", v.name, v.n))
		}
	}
	return strings.Join(parts, " ")
}

// packets are those of a Perfetto trace, checked for what Perfetto asks of every file: tracks are declared once and
// before they are used, counters have values only on counter tracks, every event has a time and a sequence.
func packets(t testing.TB, b []byte) []*decoded {
	t.Helper()
	d, err := decode("Trace", b)
	if err != nil {
		t.Fatal(err)
	}
	var all []*decoded
	counters := map[uint64]bool{} // by track
	flows := map[uint64]bool{}    // open
	slices := map[uint64]uint64{} // when the open one began, by track
	texts := interned{}
	times := map[uint64]uint64{} // the last of each sequence; calls are written as they end
	owners := map[[2]uint64]bool{}
	instants := map[[2]uint64]bool{} // tracks and times of those there were
	for _, v := range d.fields {
		p := v.m
		all = append(all, p)
		if p.get("trusted_packet_sequence_id").n == 0 {
			t.Errorf("no sequence: %v", p)
		}
		if track := p.get("track_descriptor").m; track != nil {
			id, parent := track.get("uuid").n, track.get("parent_uuid").n
			if _, ok := counters[id]; ok || (id == 0) != (track.get("process_ordering").n != 0) { // which only the root says
				t.Errorf("track %d is declared twice, or has no number: %v", id, track)
			}
			if _, ok := counters[parent]; !ok && parent != 0 {
				t.Errorf("the parent of track %d is not declared before: %v", id, track)
			}
			counters[id] = track.get("counter").m != nil
			// One track for each process and thread, as trace_processor takes a second one for a number used again.
			for kind, of := range map[uint64]*decoded{1: track.get("process").m, 2: track.get("thread").m} {
				if of == nil {
					continue
				}
				owner := [2]uint64{kind, of.get("pid").n<<32 | of.get("tid").n}
				if owners[owner] {
					t.Errorf("a second track of the same process or thread: %v", track)
				}
				owners[owner] = true
			}
		}
		texts.read(t, p)
		e := p.get("track_event").m
		if e == nil {
			continue
		}
		counter, ok := counters[e.get("track_uuid").n]
		if !ok || counter != (e.get("type").n == typeCounter) || p.get("timestamp").n == 0 {
			t.Errorf("an event without a track of its kind or without a time: %v", p)
		}
		if at, seq := p.get("timestamp").n, p.get("trusted_packet_sequence_id").n; e.get("type").n == typeInstant || counter {
			if at < times[seq] {
				t.Errorf("time goes back in sequence %d: %v", seq, p)
			}
			times[seq] = at
		}
		switch id, at := e.get("track_uuid").n, p.get("timestamp").n; e.get("type").n {
		case typeInstant: // trace_processor nests those of one time in each other, and drops those below the 512th
			if instants[[2]uint64{id, at}] {
				t.Errorf("a second instant of the same time on a track: %v", p)
			}
			instants[[2]uint64{id, at}] = true
		case typeBegin:
			if slices[id] != 0 {
				t.Errorf("a slice in a slice: %v", p)
			}
			slices[id] = at
		case typeEnd:
			if slices[id] == 0 || at < slices[id] {
				t.Errorf("a slice ends that began at %d: %v", slices[id], p)
			}
			delete(slices, id)
		}
		for _, f := range e.fields {
			switch f.name {
			case "flow_ids":
				flows[f.n] = true
			case "terminating_flow_ids":
				if !flows[f.n] {
					t.Errorf("flow %d ends without having begun", f.n)
				}
				delete(flows, f.n)
			}
		}
	}
	if len(slices) > 0 {
		t.Errorf("%d slices do not end", len(slices))
	}
	return all
}

// interned are the texts that sequences have numbered, by sequence and list.
type interned map[uint64]map[string]map[uint64]string

// read takes in what a packet interns, and puts texts in the place of the numbers that it uses, which must be known in
// its sequence.
func (n interned) read(t testing.TB, p *decoded) {
	t.Helper()
	seq, flags := p.get("trusted_packet_sequence_id").n, p.get("sequence_flags").n
	if flags&flagsCleared != 0 {
		n[seq] = map[string]map[uint64]string{}
	}
	if data := p.get("interned_data").m; data != nil {
		for _, v := range data.fields {
			id := v.m.get("iid").n
			if n[seq] == nil || id == 0 {
				t.Errorf("text %d in a sequence that has not begun: %v", id, p)
				continue
			}
			if n[seq][v.name] == nil {
				n[seq][v.name] = map[uint64]string{}
			}
			if _, ok := n[seq][v.name][id]; ok {
				t.Errorf("text %d a second time: %v", id, p)
			}
			n[seq][v.name][id] = v.m.get("str").s
		}
	}
	e := p.get("track_event").m
	if e == nil {
		return
	}
	use := func(v *value, list string) {
		s, ok := n[seq][list][v.n]
		if !ok || flags&flagsNeedsNumbers == 0 {
			t.Errorf("text %d of %s is not known, or the packet does not say that it needs one: %v", v.n, list, p)
		}
		v.name, v.n, v.s = strings.TrimSuffix(v.name, "_iid"), 0, s
	}
	for i := range e.fields {
		switch v := &e.fields[i]; v.name {
		case "name_iid":
			use(v, "event_names")
		case "debug_annotations":
			for k := range v.m.fields {
				switch a := &v.m.fields[k]; a.name {
				case "name_iid":
					use(a, "debug_annotation_names")
				case "string_value_iid":
					use(a, "debug_annotation_string_values")
				}
			}
		}
	}
}

// profileText is a profile in the order of the file.
func profileText(t testing.TB, b []byte) string {
	t.Helper()
	p, err := profile.Parse(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, s := range p.SampleType {
		fmt.Fprintf(&out, "%s/%s ", s.Type, s.Unit)
	}
	fmt.Fprintf(&out, "default %s, time %d, duration %d, mapping %s\n", p.DefaultSampleType, p.TimeNanos, p.DurationNanos, p.Mapping[0].File)
	for _, c := range p.Comments {
		fmt.Fprintln(&out, "#", c)
	}
	for _, s := range p.Sample {
		fmt.Fprint(&out, s.Value)
		var labels []string
		for k, v := range s.Label {
			labels = append(labels, k+"="+strings.Join(v, ","))
		}
		slices.Sort(labels)
		fmt.Fprintf(&out, " {%s}", strings.Join(labels, "; "))
		for _, l := range s.Location {
			for _, line := range l.Line {
				fmt.Fprintf(&out, " < %s %s:%d", line.Function.Name, line.Function.Filename, line.Line)
			}
		}
		fmt.Fprintln(&out)
	}
	return out.String()
}

// parquetText is a Parquet file as CSV, read by a library.
func parquetText(t testing.TB, b []byte) (text string, groups int) {
	t.Helper()
	f, err := parquet.OpenFile(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	columns := f.Schema().Fields()
	for i, c := range columns {
		if i > 0 {
			out.WriteByte(',')
		}
		out.WriteString(c.Name())
	}
	out.WriteByte('\n')
	for _, g := range f.RowGroups() {
		rows := g.Rows()
		buf := make([]parquet.Row, 1000)
		for {
			n, err := rows.ReadRows(buf)
			for _, row := range buf[:n] {
				for i, v := range row {
					if i > 0 {
						out.WriteByte(',')
					}
					switch {
					case v.IsNull():
					case v.Kind() == parquet.Int64 && columns[i].Type().String() == "INT(64,false)":
						fmt.Fprint(&out, v.Uint64())
					case v.Kind() == parquet.ByteArray:
						s := string(v.ByteArray())
						if strings.ContainsAny(s, ",\"\n\r") {
							s = `"` + strings.ReplaceAll(s, `"`, `""`) + `"`
						}
						out.WriteString(s)
					default:
						fmt.Fprint(&out, v)
					}
				}
				out.WriteByte('\n')
			}
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := rows.Close(); err != nil {
			t.Fatal(err)
		}
		groups++
	}
	return out.String(), groups
}
