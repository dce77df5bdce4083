package report

import (
	"bytes"
	"strings"
	"testing"

	"charm.land/lipgloss/v2"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/recording"
)

// keptSummary is of a program that kept memory under names as long as C++ has them.
func keptSummary() *analyze.DriverSummary {
	const packages = "/opt/venv/lib/python3.12/site-packages/"
	call := func(name string) []recording.Frame {
		return []recording.Frame{{Func: "libcudart.so.13+0x41b5d", File: packages + "torch/lib/../../nvidia/cu13/lib/libcudart.so.13"},
			{Func: "c10::cuda::CUDACachingAllocator::Native::(anonymous namespace)::ExpandableSegment::map(c10::cuda::CUDACachingAllocator::Native::(anonymous namespace)::SegmentRange)", File: packages + "torch/lib/libc10_cuda.so"},
			{Func: name, File: packages + "torch/lib/libtorch_cuda.so"}}
	}
	python := append(call("at::native::empty_cuda(c10::ArrayRef<long>)"), recording.Frame{Func: "load_weights", File: "/srv/me/job.py", Line: 33},
		recording.Frame{Func: "<module>", File: "/srv/me/job.py", Line: 80})
	return &analyze.DriverSummary{Program: strings.Fields("/opt/venv/bin/python train.py --with many --arguments that --make a --line longer --than any --terminal is"),
		Calls: []analyze.DriverCalls{{Name: "cuMemPoolImportFromShareableHandle", Count: 1234567, NS: 99_999_000_000_000, MaxNS: 1e9, Waits: true}},
		Kept: []analyze.DriverKept{
			{Memory: "device", Bytes: 36 << 30, Count: 215000, PID: 4194303, Stack: call("void at::native::gpu_kernel<at::native::FillFunctor<c10::Half> >(at::TensorIteratorBase&)")},
			{Memory: "device", Bytes: 3 << 30, Count: 2, PID: 4194303, Stack: call("at::native::a_function_without_any_place_to_break_it_that_is_wider_than_the_column(int)")},
			{Memory: "virtual", Bytes: 2 << 30, Count: 1, PID: 1, Stack: python},
			{Memory: "host", Device: -1, Bytes: 1, Count: 1, PID: 1},
		}, KeptBytes: 41 << 30, KeptCount: 215004, Processes: 12, DriverNS: 305e6, WaitingNS: 140e6,
		Devices: []analyze.DriverDevice{{Device: 15, PeakHeld: 1023 << 30, PeakRequested: 1023 << 30, OOMs: 1234567}}, End: recording.DriverEnd{Unknown: []string{"cuMemOne", "cuMemTwo", "cuMemThree", "cuMemFour", "cuMemFive", "cuMemSix"}}}
}

// TestDriverWidth: the table at a program's end fits a terminal, and says all of every name; what is no terminal gets each on a line.
func TestDriverWidth(t *testing.T) {
	for _, width := range []int{80, 100, 120} {
		var b bytes.Buffer
		WriteDriver(&b, keptSummary(), Style{Width: width})
		for line := range strings.Lines(b.String()) {
			if n := lipgloss.Width(strings.TrimRight(line, "\n")); n > width {
				t.Errorf("at %d columns one line has %d: %s", width, n, line)
			}
		}
		joined := strings.Join(strings.Fields(b.String()), "")
		for _, want := range []string{"at::native::gpu_kernel<...>libtorch_cuda.so", "_that_is_wider_than_the_columnlibtorch_cuda.so", "load_weights/srv/me/job.py:33", "unknown"} {
			if !strings.Contains(joined, want) {
				t.Errorf("at %d columns there is no %s:\n%s", width, want, b.String())
			}
		}
	}
	var b bytes.Buffer
	WriteDriver(&b, keptSummary(), Style{})
	for _, want := range []string{"  at::native::gpu_kernel<...> libtorch_cuda.so\n", "  load_weights /srv/me/job.py:33\n", " each "} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("there is no %q:\n%s", want, b.String())
		}
	}
}

func TestBreakName(t *testing.T) {
	for name, want := range map[string]string{
		"":                     "",
		"abc":                  "abc",
		"abcdefghijklm":        "abcdefghij|klm",
		"abc::def::ghi":        "abc::def|::ghi",
		"a bc de fghijkl":      "a bc de|fghijkl",
		"dir/file/name.py:123": "dir/file|/name.py:1|23",
		"äöüäöüäöüäöü":         "äöüäöüäöüä|öü",
		"1234567890 abc":       "1234567890|abc",
		"torch:expand:True":    "torch:|expand:|True",
		"a,b:64,cdefgh":        "a,b:64,|cdefgh",
	} {
		if got := strings.Join(breakName(name, 10), "|"); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// TestDriverCommandLine: the arguments of a program may be of any length, and the table of it is to be read all the same.
func TestDriverCommandLine(t *testing.T) {
	for _, args := range [][]string{{"sh", "-c", strings.Repeat("é\n", 50000)}, {"prog", "-x", "a b"}} {
		var b strings.Builder
		WriteDriver(&b, &analyze.DriverSummary{Program: args, Ended: true}, Style{})
		out := b.String()
		if len(out) > 1500 || !strings.Contains(out, "driver calls of "+args[0]+" "+args[1]) || strings.Contains(out, "\ufffd") && len(args[2]) < 10 {
			t.Errorf("%d bytes: %.200s", len(out), out)
		}
		if short := len(args[2]) < 100; strings.Contains(out, "…") == short {
			t.Errorf("of %d bytes: %.500s", len(args[2]), out)
		}
	}
}
