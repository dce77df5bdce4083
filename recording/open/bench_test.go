package open_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
	"github.com/klauspost/compress/gzip"
)

// benchFile is the largest trace there is: of CISTERN_TRACES, else of testdata.
func benchFile(tb testing.TB) string {
	if dir := recordingtest.TracesDir(); dir != "" {
		return filepath.Join(dir, "generate_serving.pickle.gz")
	}
	return "../testdata/gpt2_varlen.pickle.gz"
}

func unzipped(tb testing.TB, path string) []byte {
	tb.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		tb.Fatal(err)
	}
	if b, err = io.ReadAll(z); err != nil {
		tb.Fatal(err)
	}
	return b
}

// MB/s are of the uncompressed file; peak-heap/file-B is the memory that reading needs, the result included, relative
// to it.
func BenchmarkReadSnapshot(b *testing.B) {
	path := benchFile(b)
	data := unzipped(b, path)
	packed, err := os.ReadFile(path)
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		name string
		file []byte
	}{{"plain", data}, {"gzip", packed}} {
		b.Run(c.name, func(b *testing.B) {
			events := 0
			read := func() {
				f, err := open.Read(bytes.NewReader(c.file), path)
				if err != nil {
					b.Fatal(err)
				}
				events = len(f.Traces[0].Events)
			}
			peak := recordingtest.PeakHeap(read)
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			b.ResetTimer()
			for b.Loop() {
				read()
			}
			b.ReportMetric(float64(peak)/float64(len(data)), "peak-heap/file-B")
			b.ReportMetric(float64(events)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mevents/s")
		})
	}
}

// BenchmarkGunzip is the share of decompression in BenchmarkReadSnapshot/gzip.
func BenchmarkGunzip(b *testing.B) {
	packed, err := os.ReadFile(benchFile(b))
	if err != nil {
		b.Fatal(err)
	}
	var n int64
	for b.Loop() {
		z, err := gzip.NewReader(bytes.NewReader(packed))
		if err != nil {
			b.Fatal(err)
		}
		if n, err = io.Copy(io.Discard, z); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(n)
}

// MB/s of all are of the uncompressed pickle, so that they compare with BenchmarkReadSnapshot. B/event is the file's.
func BenchmarkCistern(b *testing.B) {
	path := benchFile(b)
	f := recordingtest.Read(b, path)
	benchCistern(b, f, path)
	// Two threads that take turns, and a tag for each stack, as programs have that tag their modules.
	t := f.Traces[0]
	t.Threads = map[uint32]string{4_001_234: "python", 4_001_301: "pt_autograd_0"}
	t.Libraries, t.Tags = []string{"", "torch"}, make([]string, 41)
	for i := range t.Events {
		e := &t.Events[i]
		e.Tag, e.Library, e.Thread = uint16(e.Stack*2654435761>>16%41), 1, 4_001_234
		if i/100%3 == 0 {
			e.Thread = 4_001_301
		}
	}
	b.Run("labelled", func(b *testing.B) { benchCistern(b, f, path) })
}

func benchCistern(b *testing.B, f *recording.File, path string) {
	var out bytes.Buffer
	if err := native.Write(&out, f); err != nil {
		b.Fatal(err)
	}
	b.Run("write", func(b *testing.B) {
		b.SetBytes(f.DecodedBytes)
		for b.Loop() {
			if err := native.Write(io.Discard, f); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(out.Len())/float64(len(f.Traces[0].Events)), "B/event")
	})
	b.Run("read", func(b *testing.B) {
		b.SetBytes(f.DecodedBytes)
		for b.Loop() {
			if _, err := open.Read(bytes.NewReader(out.Bytes()), path); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkWritePyTorch(b *testing.B) {
	f := recordingtest.Read(b, benchFile(b))
	b.SetBytes(f.DecodedBytes)
	for b.Loop() {
		if err := pytorch.Write(io.Discard, f.Traces...); err != nil {
			b.Fatal(err)
		}
	}
}

// A log of a hundred thousand rows of 55 bytes.
func BenchmarkReadRMM(b *testing.B) {
	var log bytes.Buffer
	log.WriteString(recordingtest.RMMLog[:39])
	for i := range 50_000 {
		at := fmt.Sprintf("%02d:%02d:%02d.%06d", i/3600%24, i/60%60, i%60, i*37%1_000_000)
		fmt.Fprintf(&log, "19165,%s,allocate,0x7f8a%08x,%d,0x7f0012345678\n", at, i%1000*4096, 1024+i%1000)
		fmt.Fprintf(&log, "19166,%s,free,0x7f8a%08x,%d,0x7f0012345678\n", at, i%1000*4096, 1024+i%1000)
	}
	var peak uint64
	read := func() {
		if _, err := open.Read(bytes.NewReader(log.Bytes()), "log"); err != nil {
			b.Fatal(err)
		}
	}
	peak = recordingtest.PeakHeap(read)
	b.SetBytes(int64(log.Len()))
	b.ReportAllocs()
	b.ResetTimer()
	for b.Loop() {
		read()
	}
	b.ReportMetric(float64(peak)/float64(log.Len()), "peak-heap/file-B")
}
