package report

import (
	"testing"

	"github.com/cistern-gpu/cistern/recording"
)

func TestEnvironmentLine(t *testing.T) {
	for want, e := range map[string]recording.Environment{
		"": {},
		"PyTorch 2.11.0+cu130, CUDA 13.0, driver 580.65.06, NVIDIA H100 80GB HBM3, 79.18 GiB of memory": {PyTorch: "2.11.0+cu130", CUDA: "13.0", Driver: "580.65.06",
			Device: "NVIDIA H100 80GB HBM3", DeviceTotal: 85017493504},
		"PyTorch 2.9.1": {PyTorch: "2.9.1"},
	} {
		if got := environmentLine(e); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
