//go:build linux && cgo

package pools

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
)

// The test's program is the importing process too.
func TestMain(m *testing.M) {
	if os.Getenv(childMark) != "" {
		if err := Run(os.Args[2:], os.Stderr); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func lab(t *testing.T, args string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	err := Run(strings.Fields(args), &out)
	return out.String(), err
}

const small = " -ops 3000 -blocks 5 -largest 20KiB -load 64KiB"

// Two processes over simulated devices, whose checker judges the order of all uses, and over the stand-in.
func TestOrdered(t *testing.T) {
	for _, driver := range []string{"sim:1GiB", "nvidia:" + standin.Build(t)} {
		out, err := lab(t, "-driver "+driver+small)
		if err != nil || !strings.HasPrefix(out, "ok: 3000 turns") || strings.Contains(out, " 0 blocks") {
			t.Errorf("%s: %q, %v", driver, out, err)
		}
	}
}

// Without order, the checker of the simulated device says so. The stand-in does all work at once, so nothing is wrong there, which
// is an error.
func TestUnordered(t *testing.T) {
	out, err := lab(t, "-driver sim:1GiB -unordered"+small)
	if err != nil || !strings.Contains(out, "a stream of another process") {
		t.Errorf("%q, %v", out, err)
	}
	out, err = lab(t, "-unordered -driver nvidia:"+standin.Build(t)+small)
	if err == nil || !strings.Contains(err.Error(), "nothing was wrong") {
		t.Errorf("%q, %v", out, err)
	}
}
