package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	allocator "github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/internal/units"
)

// diagnosis is what `cistern doctor --json` prints.
type diagnosis struct {
	Command struct {
		Path    string `json:"path"`
		Version string `json:"version"`
	} `json:"command"`
	Package  string            `json:"package"`
	Library  string            `json:"library"`
	Settings string            `json:"settings"` // CISTERN_CONF
	Driver   *driverDiagnosis  `json:"driver"`
	Devices  []deviceDiagnosis `json:"devices"`
	Python   *pythonReport     `json:"python"`
	Support  []supportRow      `json:"support"`
	Notes    []string          `json:"notes"`    // what is as it should be, but good to know
	Problems []string          `json:"problems"` // what would not work
}

type driverDiagnosis struct {
	Name    string `json:"name"`
	CUDA    string `json:"cuda"`    // 13.0
	Module  string `json:"module"`  // of the kernel: 580.159.04, empty if unknown
	Library string `json:"library"` // the file, empty if unknown
}

type deviceDiagnosis struct {
	Device  int      `json:"device"`
	Name    string   `json:"name"`
	Bytes   uint64   `json:"bytes"`
	VMM     bool     `json:"vmm"`
	Handles []string `json:"handles"`
	RDMA    bool     `json:"rdma"`
}

func newDoctor(a *app) *cobra.Command {
	var interpreter string
	var asJSON bool
	c := &cobra.Command{
		Use:   "doctor [flags]",
		Short: "Check whether PyTorch can run on Cistern here, and what is missing",
		Long: "Doctor looks at what `cistern run` needs: the driver, the devices, PyTorch, a compiler and headers for the adapter,\n" +
			"whether that is built, and the environment. A table has the versions that Cistern supports, and what is here. There is\n" +
			"one line for each thing that would not work. The exit code is 0 when all would, 1 when something would not.",
		Example: "  cistern doctor\n" +
			"  cistern doctor --python .venv/bin/python",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			d := new(diagnosis)
			d.home()
			d.gpu()
			d.environment(environment(os.Environ()))
			if d.Package != "" {
				path, err := python(interpreter)
				if err == nil {
					d.Python, err = askPython(c.Context(), path, d.Package)
				}
				if stopped := c.Context().Err(); stopped != nil {
					return stopped
				}
				if err != nil {
					d.problem("%v", err)
				} else {
					d.Problems = append(d.Problems, d.Python.Problems...)
					d.Notes = append(d.Notes, d.Python.Settings...)
				}
			}
			d.support()
			if asJSON {
				d.Notes, d.Problems = append([]string{}, d.Notes...), append([]string{}, d.Problems...)
				d.Devices = append([]deviceDiagnosis{}, d.Devices...)
				_ = writeJSON(a.out, d, true) // checkedWriter remembers
			} else {
				d.write(a.out)
			}
			a.mismatch = len(d.Problems) > 0
			return nil
		},
	}
	c.Flags().StringVar(&interpreter, "python", "", "`program`: the Python that PyTorch is installed for (default that of the virtual environment, or python3)")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return c
}

func (d *diagnosis) problem(format string, args ...any) {
	d.Problems = append(d.Problems, fmt.Sprintf(format, args...))
}

func (d *diagnosis) note(format string, args ...any) {
	d.Notes = append(d.Notes, fmt.Sprintf(format, args...))
}

// home finds Cistern's own parts.
func (d *diagnosis) home() {
	d.Command.Path, _ = os.Executable()
	d.Command.Version = buildVersion().Version
	if runtime.GOOS != "linux" {
		d.problem("%v", errNotLinux)
	}
	pkg, err := pythonPackage()
	if err != nil {
		d.problem("%v", err)
		return
	}
	d.Package = pkg
	if d.Library, err = sharedLibrary(pkg, "libcistern.so"); err != nil {
		d.problem("%v", err)
	}
	if _, err := sharedLibrary(pkg, "libcistern_plain.so"); err != nil {
		d.note("%v: without an adapter there would be no plain allocator either", err)
	}
}

// gpu asks the driver that the settings name.
func (d *diagnosis) gpu() {
	d.Settings = environ.Get("CISTERN_CONF")
	opts, err := allocator.ParseOptions(d.Settings)
	if err != nil {
		d.problem("CISTERN_CONF: %v", err)
		opts = allocator.Options{}
	}
	drv, err := open.Open(opts.Driver)
	if err != nil {
		d.problem("%v", err)
		return
	}
	d.Driver = &driverDiagnosis{Name: drv.Name(), CUDA: fmt.Sprintf("%d.%d", drv.Version()/1000, drv.Version()%1000/10)}
	if drv.Name() == "nvidia" {
		d.Driver.Module, d.Driver.Library = kernelModule(), mapped("libcuda.so")
	} else {
		d.note("CISTERN_CONF names a simulated device, on which no PyTorch runs")
	}
	n, err := drv.DeviceCount()
	if err != nil {
		d.problem("%v", err)
	}
	for i := range n {
		d.device(drv, cuda.Device(i), opts)
	}
}

func (d *diagnosis) device(drv cuda.Driver, i cuda.Device, opts allocator.Options) {
	info, err := drv.DeviceInfo(i)
	if err != nil {
		d.problem("device %d: %v", i, err)
		return
	}
	out := deviceDiagnosis{Device: int(i), Name: info.Name, Bytes: info.TotalBytes, VMM: info.VMM, RDMA: info.RDMA, Handles: []string{}}
	for _, h := range []struct {
		kind cuda.HandleType
		name string
	}{{cuda.HandlePosix, "posix"}, {cuda.HandleFabric, "fabric"}} {
		if info.Handles&h.kind != 0 {
			out.Handles = append(out.Handles, h.name)
		}
	}
	d.Devices = append(d.Devices, out)
	if !info.VMM && opts.Backend != allocator.BackendMalloc {
		d.problem("device %d (%s) has no virtual memory management: set CISTERN_CONF=backend:malloc", i, info.Name)
	}
	if info.VMM && len(out.Handles) == 0 {
		d.problem("device %d (%s) exports no memory: tensors cannot be shared with other processes", i, info.Name)
	}
	if strings.Contains(info.Name, "MIG") {
		d.note("device %d is a MIG instance: its memory is %s, and peers have no access to it", i, units.FormatBytes(info.TotalBytes))
	}
}

// kernelModule is the version of NVIDIA's kernel module.
func kernelModule() string {
	text, _ := os.ReadFile("/proc/driver/nvidia/version")
	return regexp.MustCompile(`\b\d+\.\d+(\.\d+)?\b`).FindString(string(text))
}

// mapped is the file of a library that this process has loaded.
func mapped(name string) string {
	text, _ := os.ReadFile("/proc/self/maps")
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) >= 6 && strings.HasPrefix(filepath.Base(fields[5]), name) {
			return fields[5]
		}
	}
	return ""
}

// environment looks for variables that get in the way.
func (d *diagnosis) environment(env environment) {
	if p := env.get("LD_PRELOAD"); p != "" {
		d.note("LD_PRELOAD loads %s into every program", p)
		for _, lib := range strings.FieldsFunc(p, func(r rune) bool { return r == ':' || r == ' ' }) {
			base := strings.ToLower(filepath.Base(lib))
			if strings.Contains(base, "cuda") || strings.Contains(base, "vgpu") {
				d.problem("LD_PRELOAD: %s seems to stand between programs and the CUDA driver: whether it passes on virtual "+
					"memory management is not known", lib)
			}
		}
	}
	if env.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "" {
		d.note("PYTORCH_NO_CUDA_MEMORY_CACHING is set: PyTorch will cache nothing, with Cistern as without")
	}
	if env.get("CUDA_VISIBLE_DEVICES") == "" && hasKey(env, "CUDA_VISIBLE_DEVICES") {
		d.problem("CUDA_VISIBLE_DEVICES is empty: programs see no GPU")
	}
	if n, ok := memoryLimit(); ok && n < 4<<30 {
		d.note("this container has %s of host memory; loading PyTorch alone takes more than 1 GiB", units.FormatBytes(n))
	}
}

func hasKey(env environment, key string) bool {
	for _, v := range env {
		if strings.HasPrefix(v, key+"=") {
			return true
		}
	}
	return false
}

// memoryLimit is the container's limit on host memory, if there is one.
func memoryLimit() (uint64, bool) {
	for _, file := range []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		if text, err := os.ReadFile(file); err == nil {
			n, err := units.ParseBytes(strings.TrimSpace(string(text)))
			return n, err == nil
		}
	}
	return 0, false
}

// write prints it for people.
func (d *diagnosis) write(w io.Writer) {
	line := func(what, format string, args ...any) {
		fmt.Fprintf(w, "%-10s %s\n", what, oneLine(fmt.Sprintf(format, args...)))
	}
	line("cistern", "%s, %s", d.Command.Version, d.Command.Path)
	if d.Package != "" {
		line("package", "%s", d.Package)
	}
	if d.Library != "" {
		line("library", "%s", d.Library)
	}
	if d.Settings != "" {
		line("settings", "CISTERN_CONF=%s", d.Settings)
	}
	if v := d.Driver; v != nil {
		text := v.Name + ", CUDA " + v.CUDA
		for _, more := range []string{v.Module, v.Library} {
			if more != "" {
				text += ", " + more
			}
		}
		line("driver", "%s", text)
	}
	for _, v := range d.Devices {
		text := fmt.Sprintf("%s, %s", v.Name, units.FormatBytes(v.Bytes))
		if v.VMM {
			text += ", virtual memory"
		}
		if len(v.Handles) > 0 {
			text += ", handles " + strings.Join(v.Handles, " ")
		}
		if v.RDMA {
			text += ", RDMA"
		}
		line(fmt.Sprintf("device %d", v.Device), "%s", text)
	}
	if p := d.Python; p != nil {
		p.write(line)
	}
	writeSupport(w, d.Support)
	for _, n := range d.Notes {
		line("note", "%s", n)
	}
	for _, p := range d.Problems {
		line("PROBLEM", "%s", p)
	}
	if len(d.Problems) == 0 {
		fmt.Fprintln(w, "PyTorch programs can run on Cistern here.")
	}
}

func (p *pythonReport) write(line func(what, format string, args ...any)) {
	line("python", "%s, %s", p.Python.Version, p.Python.Path)
	if t := p.Torch; t != nil {
		on := "without CUDA"
		if t.CUDA != nil {
			on = "CUDA " + *t.CUDA
		}
		line("torch", "%s, %s, %s", t.Version, on, t.Path)
	}
	if len(p.Compiler) > 0 {
		line("compiler", "%s", strings.Join(p.Compiler, " "))
	}
	if len(p.Headers) > 0 {
		line("headers", "%s", strings.Join(p.Headers, " "))
	}
	switch s := p.Adapter; {
	case s == nil:
	case s.Built && s.Build != nil:
		line("adapter", "built for torch %s in %.0f s, %s", s.Build.Torch, s.Build.Seconds, s.Path)
	case s.Built:
		line("adapter", "built, %s", s.Path)
	default:
		line("adapter", "not built yet; it would be in one of %s", strings.Join(s.Places, ", "))
	}
}
