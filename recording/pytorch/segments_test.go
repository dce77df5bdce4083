package pytorch_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

// What tells of no segments becomes a snapshot in which all lies in one: PyTorch's viewer can walk back through it, what
// is live is what was live, and nothing is held besides. Calls that were dropped leave blocks over one another.
func TestSnapshotsWithoutSegments(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		if os.Getenv("CISTERN_TOOLS_TEST") == "1" {
			t.Fatal(err)
		}
		t.Skip("python3 is not installed")
	}
	odd := recordingtest.RMMLog + "1,10:00:01.000001,allocate,0x9000,4096,0\n1,10:00:01.000002,allocate,0x9800,512,0\n" + // over the one before
		"1,10:00:01.000003,free,0x9000,4096,0\n1,10:00:01.000004,allocate,0x9800,0,0\n1,10:00:01.000005,allocate,0x9800,1024,0\n"
	files := []*recording.File{{Traces: []*recording.Trace{recordingtest.ReadRMM(t, odd, "rmm.csv")}}}
	for seed := range uint64(4) {
		calls, _ := recordingtest.DriverScript(t, recordingtest.RandomCalls(seed, 500), 1000)
		files = append(files, recordingtest.ReadDriver(t, calls[len(calls)-1]))
	}
	for i, f := range files {
		for _, tr := range f.Traces {
			var b bytes.Buffer
			if err := pytorch.Write(&b, tr); err != nil {
				t.Fatalf("file %d: %v", i, err)
			}
			path := filepath.Join(t.TempDir(), "snapshot.pickle")
			if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command(python, "testdata/check_snapshot.py", path).CombinedOutput(); err != nil {
				t.Fatalf("file %d, device %d: %v\n%s", i, tr.Device, err, out)
			}
			got, err := open.Read(&b, path)
			if err != nil {
				t.Fatal(err)
			}
			again := got.Traces[0]
			live, held := uint64(0), uint64(0)
			for _, s := range again.Final {
				held += s.Size
				for _, b := range s.Blocks {
					live += b.Requested
				}
			}
			if peak, _ := tr.PeakLive(); live != held || len(tr.Final) > 0 || peak == 0 {
				t.Errorf("file %d, device %d: at the end %d bytes live, %d held", i, tr.Device, live, held)
			}
			for k := range again.Events {
				if e := &again.Events[k]; e.Kind == event.Alloc && (k == 0 || again.Events[k-1].Kind != event.SegmentAlloc || again.Events[k-1].Size != e.Size) {
					t.Fatalf("file %d, device %d: the alloc at %d has no segment", i, tr.Device, k)
				}
			}
			if d := f.Driver; d != nil && again.Events[0].TimeUS-tr.Events[0].TimeUS != d.WallNS/1000 {
				t.Errorf("the first event is at %d, on the machine's clock at %d", again.Events[0].TimeUS, tr.Events[0].TimeUS)
			}
		}
	}
}
