package rmm_test

import (
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// FuzzRMM is rows below a header.
func FuzzRMM(f *testing.F) {
	f.Add(recordingtest.RMMLog[39:])
	f.Add("1,00:00:00:5,free,(nil),0,\n")
	f.Add(",,,,,\n\"\n")
	f.Fuzz(func(t *testing.T, rows string) { recordingtest.AnyFile(t, []byte(recordingtest.RMMLog[:39]+rows)) })
}

func TestRMM(t *testing.T) {
	tr := recordingtest.ReadRMM(t, recordingtest.RMMLog, "rmm_log.dev3.txt")
	day := int64(86400e6)
	end := day - 100_000
	want := []event.Event{
		{Kind: event.Alloc, Addr: 0x7f8a00000000, Size: 1024, TimeUS: end},
		{Kind: event.Alloc, Addr: 0x7f8a00000400, Size: 2048, TimeUS: end + 99_999, Stream: 1},
		// Nine microseconds back: another thread's row, not another day.
		{Kind: event.FreeRequested, Addr: 0x7f8a00000000, Size: 1024, TimeUS: end + 99_990},
		{Kind: event.FreeCompleted, Addr: 0x7f8a00000000, Size: 1024, TimeUS: end + 99_990},
		{Kind: event.Alloc, Addr: 0x7f8a00000000, Size: 512, TimeUS: day + 4, Stream: 1},
		{Kind: event.OOM, Size: 99999999999, TimeUS: day + 1_500_000},
		{Kind: event.FreeRequested, Addr: 0x7f8a00000000, Size: 512, TimeUS: day + 2_000_000, Stream: 1},
		{Kind: event.FreeCompleted, Addr: 0x7f8a00000000, Size: 512, TimeUS: day + 2_000_000, Stream: 1},
		{Kind: event.FreeRequested, Addr: 0x7f8a99990000, Size: 4096, TimeUS: day + 2_000_001, Stream: 2},
		{Kind: event.FreeCompleted, Addr: 0x7f8a99990000, Size: 4096, TimeUS: day + 2_000_001, Stream: 2},
	}
	if d := cmp.Diff(want, tr.Events); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]uint64{0, 0x7fab12345678, 2}, tr.Streams); d != "" {
		t.Errorf("streams (-want +got):\n%s", d)
	}
	// The free of an address that was never allocated here: it was live before.
	if d := cmp.Diff([]recording.Block{{Addr: 0x7f8a99990000, Size: 4096, Requested: 4096, Stream: 2, State: recording.Active}},
		tr.Initial); d != "" {
		t.Errorf("initial (-want +got):\n%s", d)
	}
	if live, at := tr.PeakLive(); live != 4096+1024+2048 || at != 1 {
		t.Errorf("peak of %d bytes at event %d", live, at)
	}
	if tr.FromStart || tr.Final != nil || tr.Settings.Known || tr.Device != 3 || tr.RecordedOOMs() != 1 ||
		tr.Duration() != 2_100_001 {
		t.Errorf("%+v, duration %d", tr, tr.Duration())
	}
}

func TestRMMVariants(t *testing.T) {
	want := recordingtest.ReadRMM(t, recordingtest.RMMLog, "log")
	for name, log := range map[string]string{
		"carriage returns": strings.ReplaceAll(recordingtest.RMMLog, "\n", "\r\n"),
		"a mark in front":  "\ufeff" + recordingtest.RMMLog,
		"headers again":    recordingtest.RMMLog[:39] + recordingtest.RMMLog,
		"quoted, spaced":   strings.Replace(recordingtest.RMMLog, "Thread,Time,Action", `"thread", Time ,"ACTION"`, 1),
		"old times":        strings.NewReplacer("59.9", "59:9", "00.0", "00:0").Replace(recordingtest.RMMLog),
		"no last newline":  strings.TrimSuffix(recordingtest.RMMLog, "\n"),
		"upper case":       strings.ReplaceAll(recordingtest.RMMLog, "0x7fab12345678", "0X7FAB12345678"),
		"empty rows":       strings.ReplaceAll(recordingtest.RMMLog, "\n", "\n\n"),
		"deallocate":       strings.ReplaceAll(recordingtest.RMMLog, ",free,", ",deallocate,"),
		"no prefix":        strings.ReplaceAll(recordingtest.RMMLog, "0x7f8a", "7f8a"),
		"null written out": strings.ReplaceAll(recordingtest.RMMLog, "(nil)", "0x0"),
		"other columns": func() string {
			var b strings.Builder
			for _, line := range strings.Split(strings.TrimSpace(recordingtest.RMMLog), "\n") {
				f := strings.Split(line, ",")
				b.WriteString(strings.Join([]string{f[2], f[1], "x", f[4], f[3], f[5]}, ",") + "\n")
			}
			return strings.Replace(b.String(), ",x,", ",Note,", 1)
		}(),
	} {
		t.Run(name, func(t *testing.T) {
			got := recordingtest.ReadRMM(t, log, "log")
			if d := cmp.Diff(want, got, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(recording.Trace{}, "StoredBytes")); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
	t.Run("cut in the last row", func(t *testing.T) {
		got := recordingtest.ReadRMM(t, recordingtest.RMMLog[:len(recordingtest.RMMLog)-20], "log")
		if len(got.Events) != len(want.Events)-2 || !strings.Contains(strings.Join(got.Notes, ";"), "cut off") {
			t.Errorf("%d events, notes %q", len(got.Events), got.Notes)
		}
	})
}

func TestHostileRMM(t *testing.T) {
	head := "Thread,Time,Action,Pointer,Size,Stream\n"
	for name, c := range map[string]struct{ file, want string }{
		"no rows":             {head, "line 1: the log has no rows"},
		"few fields":          {head + "1,00:00:00.5,allocate,0x10\n", "line 2: 4 fields; expected 6"},
		"many fields":         {head + "1,00:00:00.5,allocate,0x10,1,0x0,9\n", "line 2: more than the 6 fields"},
		"a time that is none": {head + "1,25:00:00.5,allocate,0x10,1,0x0\n", `line 2: time "25:00:00.5"; expected hh:mm:ss`},
		"a negative size":     {head + "1,00:00:00.5,allocate,0x10,-1,0x0\n", `size "-1"; expected bytes`},
		"a pointer of words":  {head + "1,00:00:00.5,allocate,hello,1,0x0\n", `pointer "hello"; expected`},
		"a long pointer":      {head + "1,00:00:00.5,allocate,0x11112222333344445,1,0x0\n", "expected a hexadecimal address"},
		"a stream of words":   {head + "1,00:00:00.5,allocate,0x10,1,per-thread\n", `stream "per-thread"; expected`},
		"a long row":          {head + strings.Repeat("9", 1<<20), "line 2: a row of more than 4096 bytes"},
		"binary":              {head + strings.Repeat("\x00\n", 9), "line 2: 1 fields"},
	} {
		t.Run(name, func(t *testing.T) { recordingtest.Refused(t, []byte(c.file), c.want) })
	}
	// Memory stays bounded where every row is another stream.
	var b strings.Builder
	b.WriteString(head)
	for i := range 200_000 {
		b.WriteString("1,00:00:00.5,free,0x")
		b.WriteString(strings.Repeat("f", 1+i%3))
		b.WriteString(",1,0x10\n")
	}
	f, err := open.Read(strings.NewReader(b.String()), "log")
	if err != nil || len(f.Traces[0].Events) != 400_000 || len(f.Traces[0].Initial) != 3 {
		t.Errorf("%v", err)
	}
}
