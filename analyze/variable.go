package analyze

import (
	"regexp"
	"strconv"
	"strings"
)

// The variables that PyTorch's CUDA allocator reads its settings from (CUDAAllocatorConfig::instance,
// c10/cuda/CUDAAllocatorConfig.h): up to 2.9.1 the old one alone, although libc10 says there already that it is deprecated
// (pytorch issue 183387); from 2.10.0 on (pytorch pull request 165131) the old one and, only where that is not set, the new
// one.
const (
	torchOldVariable = "PYTORCH_CUDA_ALLOC_CONF"
	torchNewVariable = "PYTORCH_ALLOC_CONF"
)

// TorchVariable is a variable to set for PyTorch.
type TorchVariable struct {
	Name string
	For  string // the versions of PyTorch that are to be given it; "" where the run's is known
}

// torchVersion splits a version in its first two numbers and what marks a build of the time before its release, as in
// 2.10.0a0+git1234 and 2.10.0.dev20250915+cu128.
var torchVersion = regexp.MustCompile(`^(\d{1,4})\.(\d{1,4})(?:\.\d+)*(\.?dev|a)?`)

// TorchVariables are the variables to set for a version of PyTorch, a torch.__version__: one, or where the version is not
// known to read the new one, or not to, both.
func TorchVariables(version string) []TorchVariable {
	both := []TorchVariable{{torchOldVariable, "PyTorch up to 2.9"}, {torchNewVariable, "PyTorch from 2.10 on"}}
	part := torchVersion.FindStringSubmatch(version)
	if part == nil {
		return both
	}
	major, _ := strconv.Atoi(part[1])
	minor, _ := strconv.Atoi(part[2])
	switch {
	case major < 2 || major == 2 && minor < 10:
		return []TorchVariable{{Name: torchOldVariable}}
	case major == 2 && minor == 10 && part[3] != "":
		return both
	}
	return []TorchVariable{{Name: torchNewVariable}}
}

// TorchSetting is how PyTorch is given settings.
type TorchSetting struct {
	variables []TorchVariable
	conf      string
	own       string
}

// setTorch gives conf to a PyTorch of a version whose run had the settings own.
func setTorch(version, own, conf string) TorchSetting {
	return TorchSetting{TorchVariables(version), conf, own}
}

// BestSetting is how the recommended settings are given to the PyTorch of the run.
func (tn *Tuning) BestSetting() TorchSetting {
	return setTorch(tn.Environment.PyTorch, tn.Conf, tn.Best.AllocConf)
}

// covered reports whether the old variable may hide the new one, so that it has to go.
func (s TorchSetting) covered() bool {
	return s.variables[0].Name == torchNewVariable && (s.own != "" || s.conf == "")
}

// title names the settings in a few words.
func (s TorchSetting) title() string {
	known := len(s.variables) == 1
	switch {
	case known && s.conf == "":
		return s.variables[0].Name + " not set (PyTorch's defaults)"
	case known:
		return s.variables[0].Name + "=" + s.conf
	case s.conf == "":
		return "PyTorch's defaults"
	}
	return s.conf
}

// environment is the variables to set, and with "" those to unset.
func (s TorchSetting) environment() map[string]string {
	env := map[string]string{}
	if s.covered() {
		env[torchOldVariable] = ""
	}
	for _, v := range s.variables {
		env[v.Name] = s.conf
	}
	return env
}

// Do is a line for a shell, which does for every version that the run's may be.
func (s TorchSetting) Do() string {
	var unset, export []string
	if s.covered() {
		unset = append(unset, torchOldVariable)
	}
	for _, v := range s.variables {
		if s.conf == "" {
			unset = append(unset, v.Name)
		} else {
			export = append(export, exportLine(v.Name, s.conf))
		}
	}
	if len(unset) > 0 {
		export = append([]string{"unset " + strings.Join(unset, " ")}, export...)
	}
	return strings.Join(export, "; ")
}

// ForVersion is a line for a shell, and the versions of PyTorch that it is for.
type ForVersion struct {
	Versions string `json:"versions"`
	Do       string `json:"do"`
}

// ByVersion is what each version needs of Do, where the run's is unknown and it matters; nil elsewhere.
func (s TorchSetting) ByVersion() (lines []ForVersion) {
	if len(s.variables) == 1 || s.conf == "" {
		return nil
	}
	for _, v := range s.variables {
		lines = append(lines, ForVersion{v.For, exportLine(v.Name, s.conf)})
	}
	return lines
}

// exportLine sets a variable in a shell.
func exportLine(name, value string) string { return "export " + name + "=" + ShellWord(value) }
