package recordingtest

import (
	"bytes"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/segments"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
	"github.com/google/go-cmp/cmp"
)

// AnyFile reads b and, where that works, checks the traces and that both writers give them back.
func AnyFile(t *testing.T, b []byte) {
	f, err := open.Read(bytes.NewReader(b), "some.file")
	if err != nil {
		var e *recording.Error
		if !errors.As(err, &e) || e.Path != "some.file" || strings.ContainsAny(err.Error(), "\n\r") {
			t.Fatalf("%T %q; expected one line that names the file", err, err)
		}
		return
	}
	var own bytes.Buffer
	if err := native.Write(&own, f); err != nil {
		t.Fatalf("writing: %v", err)
	}
	again, err := open.Read(&own, "some.file")
	if err != nil {
		t.Fatalf("reading again: %v", err)
	}
	for i, tr := range f.Traces {
		Check(t, tr)
		got := again.Traces[i]
		if !slices.Equal(got.Events, tr.Events) || !slices.Equal(got.Initial, tr.Initial) ||
			len(got.Final) != len(tr.Final) || !slices.Equal(got.Notes, tr.Notes) ||
			!slices.Equal(got.Tags, tr.Tags) || !slices.Equal(got.Libraries, tr.Libraries) || !maps.Equal(got.Threads, tr.Threads) {
			t.Fatalf("device %d is not what was written", tr.Device)
		}
		for k := range tr.Final {
			if !slices.Equal(got.Final[k].Blocks, tr.Final[k].Blocks) {
				t.Fatalf("blocks of segment %d are not what was written", k)
			}
		}
		if d := cmp.Diff(tr.Failures, got.Failures); d != "" {
			t.Fatalf("failures (-want +got):\n%s", d)
		}
	}
	if slices.ContainsFunc(f.Traces, func(t *recording.Trace) bool { return len(segments.Complete(t).Events) == 0 }) {
		return // a snapshot without events is none
	}
	if len(f.Traces) == 0 {
		return // a driver trace of a program that got no memory on a device
	}
	var pickle bytes.Buffer
	if err := pytorch.Write(&pickle, f.Traces...); err != nil {
		return // two traces of a device, or events that a snapshot has no word for: Cistern's format may hold them
	}
	snap, err := open.Read(&pickle, "some.file")
	if err != nil {
		t.Fatalf("reading the snapshot: %v", err)
	}
	for i, tr := range f.Traces {
		tr = segments.Complete(tr)
		if len(snap.Traces[i].Events) != len(tr.Events) {
			t.Fatalf("%d events; expected %d", len(snap.Traces[i].Events), len(tr.Events))
		}
		for k := range tr.Events {
			e, s := &tr.Events[k], snap.Traces[i]
			if got, want := s.TagName(s.Events[k].Tag), strings.ToValidUTF8(tr.TagName(e.Tag), "\ufffd"); got != want {
				t.Fatalf("event %d: tag %q; expected %q", k, got, want)
			}
			if got, want := s.LibraryName(s.Events[k].Library), strings.ToValidUTF8(tr.LibraryName(e.Library), "\ufffd"); got != want {
				t.Fatalf("event %d: library %q; expected %q", k, got, want)
			}
			if s.Events[k].Thread != e.Thread {
				t.Fatalf("event %d: thread %d; expected %d", k, s.Events[k].Thread, e.Thread)
			}
		}
	}
}
