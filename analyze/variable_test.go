package analyze

import (
	"slices"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/google/go-cmp/cmp"
)

func TestTorchVariables(t *testing.T) {
	const before, after = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
	for version, want := range map[string][]string{
		"1.13.1":                     {before},
		"2.2":                        {before},
		"2.8.0+cu126":                {before},
		"2.9.1":                      {before},
		"2.9.1+cu128":                {before},
		"2.9.0a0+50eac811a6.nv25.09": {before},
		"2.10.0":                     {after},
		"2.10.0+cu128":               {after},
		"2.10.0rc3":                  {after},
		"2.11.0+cu130":               {after},
		"2.12.0.dev20260301+cu130":   {after},
		"2.12.0a0+git1234":           {after},
		"3.0":                        {after},
		"10.1.0":                     {after},
		// Builds of the months before 2.10: some are from before the change.
		"2.10.0a0+git1234":         {before, after},
		"2.10.0.dev20250915+cu128": {before, after},
		"":                         {before, after},
		"garbage":                  {before, after},
		"2":                        {before, after},
		"2.x":                      {before, after},
		"-2.9":                     {before, after},
		"99999999999999999999.1":   {before, after},
	} {
		var got []string
		for _, v := range TorchVariables(version) {
			got = append(got, v.Name)
			if (v.For != "") != (len(want) == 2) {
				t.Errorf("%q: %s is for %q", version, v.Name, v.For)
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%q (-want +got):\n%s", version, d)
		}
	}
}

func TestTorchSettings(t *testing.T) {
	const conf = "roundup_power2_divisions:[64:2,>:4]"
	type given struct {
		Title, Do   string
		ByVersion   []ForVersion
		Environment map[string]string
	}
	for _, c := range []struct {
		version, own, conf string
		want               given
	}{
		{"2.9.1", "", conf, given{"PYTORCH_CUDA_ALLOC_CONF=" + conf, "export PYTORCH_CUDA_ALLOC_CONF='" + conf + "'", nil,
			map[string]string{"PYTORCH_CUDA_ALLOC_CONF": conf}}},
		{"2.9.1", conf, "", given{"PYTORCH_CUDA_ALLOC_CONF not set (PyTorch's defaults)", "unset PYTORCH_CUDA_ALLOC_CONF", nil,
			map[string]string{"PYTORCH_CUDA_ALLOC_CONF": ""}}},
		{"2.11.0+cu130", "", conf, given{"PYTORCH_ALLOC_CONF=" + conf, "export PYTORCH_ALLOC_CONF='" + conf + "'", nil,
			map[string]string{"PYTORCH_ALLOC_CONF": conf}}},
		// A run with settings may have them from the old variable, which hides the new one.
		{"2.11.0+cu130", "backend:native", conf, given{"PYTORCH_ALLOC_CONF=" + conf,
			"unset PYTORCH_CUDA_ALLOC_CONF; export PYTORCH_ALLOC_CONF='" + conf + "'", nil,
			map[string]string{"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": conf}}},
		{"2.11.0+cu130", conf, "", given{"PYTORCH_ALLOC_CONF not set (PyTorch's defaults)", "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF", nil,
			map[string]string{"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": ""}}},
		{"", "backend:native", conf, given{conf, "export PYTORCH_CUDA_ALLOC_CONF='" + conf + "'; export PYTORCH_ALLOC_CONF='" + conf + "'",
			[]ForVersion{{"PyTorch up to 2.9", "export PYTORCH_CUDA_ALLOC_CONF='" + conf + "'"}, {"PyTorch from 2.10 on", "export PYTORCH_ALLOC_CONF='" + conf + "'"}}, map[string]string{"PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf}}},
		{"", conf, "", given{"PyTorch's defaults", "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF", nil,
			map[string]string{"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": ""}}},
	} {
		s := setTorch(c.version, c.own, c.conf)
		if d := cmp.Diff(c.want, given{s.title(), s.Do(), s.ByVersion(), s.environment()}); d != "" {
			t.Errorf("PyTorch %q with %q, %q (-want +got):\n%s", c.version, c.own, c.conf, d)
		}
	}
}

// Remedies name the variable that the PyTorch of the run reads.
func TestRemediesByVersion(t *testing.T) {
	var d *recording.Trace
	for _, tr := range slices.Backward(smallTraces(t)) { // the last is the smallest
		peak, _ := tr.PeakLive()
		if d = died(t, tr, uint64(1.05*float64(peak))>>21<<21); d != nil {
			break
		}
	}
	if d == nil {
		t.Fatal("no run failed")
	}
	for _, version := range []string{"2.9.1+cu128", "2.11.0+cu130", ""} {
		d.Environment.PyTorch = version
		r := reportOn(t, d, RemedyOptions{GPULag: 20 * time.Millisecond})
		if r.Environment.PyTorch != version {
			t.Errorf("the report is of PyTorch %q", r.Environment.PyTorch)
		}
		x, n := r.Failures[0], 0
		for _, m := range append(x.Remedies, x.Tried...) {
			if m.Kind != RemedySetting {
				continue
			}
			n++
			conf := m.Conf
			if m.Policy == "torch-async" {
				conf = asyncConf
			}
			want := setTorch(version, d.Settings.Conf, conf)
			type given struct {
				Title, Do   string
				ByVersion   []ForVersion
				Environment map[string]string
			}
			if d := cmp.Diff(given{want.title(), want.Do(), want.ByVersion(), want.environment()}, given{m.Title, m.Do, m.DoByVersion, m.Environment}); d != "" {
				t.Errorf("PyTorch %q (-want +got):\n%s", version, d)
			}
		}
		if n == 0 {
			t.Errorf("PyTorch %q: nothing was tried", version)
		}
	}
}
