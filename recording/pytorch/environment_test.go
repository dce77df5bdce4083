package pytorch_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

// withEnvironment is a snapshot of two devices with more keys behind the traces.
func withEnvironment(more ...any) []byte {
	device := recordingtest.Pickle(']', '(', recordingtest.Entry("alloc", 1<<30, 512), 'e')[2:]
	return recordingtest.Pickle('}', '(', "segments", ']', "device_traces", ']', '(', device, device, 'e', recordingtest.Pickle(more...)[2:], 'u', '.')
}

func TestEnvironment(t *testing.T) {
	versions := recording.Environment{PyTorch: "2.11.0+cu130", CUDA: "13.0", Driver: "580.65.06"}
	named := versions
	named.Device, named.DeviceTotal = "NVIDIA H100 80GB HBM3", 85017493504
	long := strings.Repeat("x", 255)
	for _, c := range []struct {
		name string
		keys []any
		want [2]recording.Environment // of the devices
	}{
		{"of PyTorch's own recorder", nil, [2]recording.Environment{}},
		{"whole", []any{"cistern", '}', '(', "torch", "2.11.0+cu130", "cuda", "13.0", "driver", "580.65.06",
			"devices", '}', "0", "NVIDIA H100 80GB HBM3", 's', "total_memory", '}', '(', "0", 85017493504, "7", 1, 'u', 'u'},
			[2]recording.Environment{named, versions}},
		{"one entry, as Python's pickler writes it", []any{"cistern", '}', "torch", "2.9.1", 's'},
			[2]recording.Environment{{PyTorch: "2.9.1"}, {PyTorch: "2.9.1"}}},
		{"one dict in one dict", []any{"cistern", '}', "devices", '}', "1", "T4", 's', 's'}, [2]recording.Environment{{}, {Device: "T4"}}},
		{"a later version's keys", []any{"cistern", '}', '(', "version", 2, "hosts", '}', '(', "a", ']', 'u', "torch", "2.9.1", 'u'},
			[2]recording.Environment{{PyTorch: "2.9.1"}, {PyTorch: "2.9.1"}}},
		{"a string", []any{"cistern", "2.9.1"}, [2]recording.Environment{}},
		{"a list", []any{"cistern", ']', '(', "torch", "2.9.1", 'e'}, [2]recording.Environment{}},
		{"other types inside", []any{"cistern", '}', '(', "torch", 2, "cuda", 'N', "driver", ']', "devices", "H100", "total_memory", '}', '(',
			"0", "much", "1", -5, 'u', 'u'}, [2]recording.Environment{}},
		{"a dict too deep", []any{"cistern", '}', '(', "devices", '}', '(', "0", '}', '(', "name", "H100", 'u', 'u', 'u'}, [2]recording.Environment{}},
		{"control characters", []any{"cistern", '}', '(', "torch", "2\x1b[31m\n9", "cuda", "\xff", 'u'},
			[2]recording.Environment{{PyTorch: "2\ufffd[31m\ufffd9", CUDA: "\ufffd"}, {PyTorch: "2\ufffd[31m\ufffd9", CUDA: "\ufffd"}}},
		{"long text", []any{"cistern", '}', '(', "torch", byte(pytorch.OpBinunicode), recordingtest.U32(1 << 20), bytes.Repeat([]byte{'x'}, 1<<20), 'u'},
			[2]recording.Environment{{PyTorch: long + "x"}, {PyTorch: long + "x"}}},
		{"twice", []any{"cistern", '}', '(', "torch", "2.9.1", 'u', "cistern", '}', '(', "torch", "2.10.0", 'u'},
			[2]recording.Environment{{PyTorch: "2.9.1"}, {PyTorch: "2.9.1"}}},
		{"more entries than any recorder writes", []any{"cistern", '}', '(', bytes.Repeat(recordingtest.Pickle("a", 1)[2:], 100_000), "torch", "2.9.1", 'u'},
			[2]recording.Environment{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, err := open.Read(bytes.NewReader(withEnvironment(c.keys...)), "some.file")
			if err != nil {
				t.Fatal(err)
			}
			for i, tr := range f.Traces {
				if tr.Environment != c.want[i] {
					t.Errorf("device %d: %+v, want %+v", i, tr.Environment, c.want[i])
				}
			}
			var out bytes.Buffer
			if err := pytorch.Write(&out, f.Traces...); err != nil {
				t.Fatal(err)
			}
			again, err := open.Read(&out, "some.file")
			if err != nil {
				t.Fatal(err)
			}
			recordingtest.Diff(t, again.Traces, f.Traces)
		})
	}
}
