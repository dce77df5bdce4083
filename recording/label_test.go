package recording

import (
	"slices"
	"testing"
)

func TestLabelNames(t *testing.T) {
	tr := &Trace{Tags: []string{"", "a", ""}, Libraries: []string{""}, Threads: map[uint32]string{5: "main"}}
	got := []string{tr.TagName(0), tr.TagName(1), tr.TagName(2), tr.TagName(9), tr.LibraryName(3), tr.ThreadName(0), tr.ThreadName(5), tr.ThreadName(6)}
	if want := []string{"", "a", "tag 2", "tag 9", "library 3", "", "main 5", "6"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}
