package segments_test

import (
	"testing"

	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/internal/segments"
)

// Of traces with segments nothing changes.
func TestSegmentedKeeps(t *testing.T) {
	for _, tr := range recordingtest.Synthetic().Traces {
		if got := segments.Complete(tr); got != tr {
			t.Errorf("device %d became another", tr.Device)
		}
	}
}
