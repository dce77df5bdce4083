package symbols

import (
	"strings"
	"testing"
)

func TestDemangled(t *testing.T) {
	for name, want := range map[string]string{
		"_ZN3c104cuda20CUDACachingAllocator6Native12_GLOBAL__N_117ExpandableSegment3mapENS3_12SegmentRangeE": "c10::cuda::CUDACachingAllocator::Native::(anonymous namespace)::ExpandableSegment::map(c10::cuda::CUDACachingAllocator::Native::(anonymous namespace)::SegmentRange)",
		"_ZNSt6vectorIiSaIiEE9push_backERKi": "std::vector<int, std::allocator<int> >::push_back(int const&)",
		"_Znwm":                              "operator new(unsigned long)",
		// Rust, as it was and as it is.
		"_ZN4core3ptr18real_drop_in_place17h0123456789abcdefE": "core::ptr::real_drop_in_place",
		"_RNvC6_123foo3bar": "123foo::bar",
		// What is no such name stays.
		"cudaMalloc": "cudaMalloc", "_Zebra": "_Zebra", "_Z": "_Z", "_R": "_R", "": "", "main": "main",
		"_ZN3c104cuda20CUDACach": "_ZN3c104cuda20CUDACach", // cut off
	} {
		if got := Demangled(name); got != want {
			t.Errorf("%s:\n%s, want\n%s", name, got, want)
		}
	}
	// A name that stands for one of gigabytes: each part doubles what was before.
	long := "_Z1fI1aE" + strings.Repeat("S0_", 40)
	double := "_Z1f" + "1a" + strings.Repeat("PFS_S_E", 1)
	for i := range 30 {
		double += "PFS" + string(rune('0'+i%10)) + "_S" + string(rune('0'+i%10)) + "_E"
	}
	for _, name := range []string{long, double, "_Z" + strings.Repeat("1a", 1<<20)} {
		if got := Demangled(name); len(got) > max(len(name), 1<<longestPlain) {
			t.Errorf("a name of %d bytes becomes one of %d", len(name), len(got))
		}
	}
}

// FuzzDemangled: whatever a file says a function is called, the answer is bounded.
func FuzzDemangled(f *testing.F) {
	f.Add("_ZN3c104cuda20CUDACachingAllocator6Native12_GLOBAL__N_117ExpandableSegment3mapENS3_12SegmentRangeE")
	f.Add("_RNvC6_123foo3bar")
	f.Fuzz(func(t *testing.T, name string) {
		if got := Demangled(name); len(got) > max(len(name), 1<<longestPlain) {
			t.Errorf("%q: %d bytes", name, len(got))
		}
	})
}
