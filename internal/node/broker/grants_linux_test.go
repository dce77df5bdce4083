package broker_test

import (
	"testing"

	"github.com/cistern-gpu/cistern/internal/node/grants"
)

// memoryOfGrants is the descriptor of a segment of grants.
func memoryOfGrants(t *testing.T) int {
	t.Helper()
	s, err := grants.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s.Descriptor()
}
